"""Resumes a run: finds and loads its checkpoint, and checks that it does once what the loop has done since the save."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from types import FrameType
from typing import Any

from torch import Tensor, nn

from lockstep import checkpoint
from lockstep.checkpoint import CheckpointState
from lockstep.config.options import RunOptions
from lockstep.core.fingerprint import sum_of_bits
from lockstep.core.values import differing
from lockstep.errors import CheckpointError, ConfigError, LockstepError
from lockstep.run.attributes import words_of
from lockstep.run.changed_names import Carried, carried_since, changed_since, offsets_of_frames
from lockstep.run.checks.calls import gather_agreed
from lockstep.run.epoch_loop import EpochLoop, Position
from lockstep.run.optimizer_step import has_gradients
from lockstep.run.prepare import Parts, frozen_parameters, hyperparameters
from lockstep.run.session import returning_freed_memory
from lockstep.run.state import RunState
from lockstep.strategies import IndependentStrategy
from lockstep.strategies.absent import AbsentTensor
from lockstep.text import plural, shorten

logger = logging.getLogger(__name__)

ENDED_FOLDERS = set[Path]()
"""The folders that runs of this process have written to, and have ended."""


def resume(
    state: RunState,
    options: RunOptions,
    fingerprint: Callable[[], str],
    *,
    restarted: bool = False,
    is_main: bool = True,
) -> bool:
    """Resumes as the options say; whether there was something to resume, which the main process notes.

    Where the launcher has ``restarted`` the run, its own newest checkpoint comes first.
    """
    found = None
    if restarted and options.resume != "auto" and options.directory is not None and state.world.run_id:
        found = checkpoint.read_newest(options.directory, written_by=state.world.run_id)
    if found is None and options.resume:
        found = _find(options.resume, options.directory)
    if found is None:
        if is_main and options.directory is not None:
            directory = Path(options.directory)
            if paths := checkpoint.committed(directory.expanduser()):
                note(
                    "%s holds checkpoints of an earlier training, the last one %s. This run begins anew, and its own "
                    "take their place. To go on from there give resume='auto'; to keep both, another directory=.",
                    *(directory, paths[-1].name),
                )
        return False
    path, position = found.path, state.position
    before, now = found.state.progress.get("sources", {}), state.sources
    with returning_freed_memory(state.strategy.device):
        written = _restore(state, path, found.state, options.force_context, restarted)
        del found  # its files are mapped into memory
        is_equal = fingerprint() == written
    if not position.inside and position.done:
        position.epoch, position.done = position.epoch + 1, 0
    if not is_equal:
        raise CheckpointError(
            f"{path} was loaded, but its parameters do not have the fingerprint that it records. Use "
            "another checkpoint."
        )
    if is_main:
        changed = [name for name in now if before.get(name, now[name]) != now[name]]
        _mention_resumed(path, position, changed, is_found=options.resume == "auto")
    return True


def _mention_resumed(path: Path, position: Position, changed: Sequence[str], *, is_found: bool) -> None:
    """Notes where a run resumes; warns of what has ``changed`` in the program, and of another run's folder."""
    between = position.epoch and not position.inside
    epoch = f"after epoch {position.epoch}" if between else f"epoch {position.epoch + 1}"
    note("Resumed from %s: %s, step %d.", path, epoch, position.step)
    if is_found and path.parent.resolve() in ENDED_FOLDERS:
        logger.warning(
            "%s was written by an earlier run of this program, which has ended, and this run goes on from it. If "
            "each is a training of its own, as in cross-validation, give it another directory=.",
            path,
        )
    if changed:
        logger.warning(
            "The program is not the one that wrote the checkpoint: the %s has changed, so it may compute something "
            "else from here on.",
            shorten(changed, 3),
        )


def _restore(state: RunState, path: Path, stored: CheckpointState, force_context: bool, restarted: bool) -> str:
    """As ``RunState.restore``; a record that passes its checksums and is not one of a run is refused as a whole."""
    try:
        return state.restore(stored, force_context, restarted=restarted)
    except LockstepError:
        raise
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, AssertionError) as error:
        raise CheckpointError(
            f"{path} does not hold the state of a run ({type(error).__name__}: {str(error)[:200]}). Use "
            "another checkpoint."
        ) from error


def _find(resume: str, directory: Path | str | None) -> checkpoint.Restored | None:
    """The checkpoint that ``resume`` names, or the newest of that run folder ("auto": of the run's own, if any)."""
    if resume == "auto":
        return checkpoint.read_newest(directory) if directory is not None else None
    if newest := checkpoint.read_newest(resume):
        return newest
    return checkpoint.Restored(Path(resume), checkpoint.read(resume))


def mention_nothing_left(epochs: int, done: int) -> None:
    """Says that a loop over epochs of a resumed run, which has done ``done`` of them, takes no further step."""
    if isinstance(epochs, int) and 0 < epochs <= done:
        note(
            "run.epochs(%d) has no step left: the run that was resumed has done %s. To go on there, give it a larger "
            "number, in a job by --epochs; to begin anew, another run folder.",
            *(epochs, plural(done, "epoch")),
        )


def note(text: str, *arguments: object) -> None:
    """Logs what somebody should see whose script has not set up logging, too."""
    logger.log(logging.INFO if logger.hasHandlers() else logging.WARNING, text, *arguments)


class Resumption:
    """A check that a resumed run does what the loop has done since the last save, once: neither never nor again.

    save in the body of the loop over steps    the rest of that body is not repeated: compared at its end
    save after the steps                       the rest of the epoch is not repeated: compared at its end
    resumed                                    what comes before the loop is repeated: compared where that begins
    resumed within an epoch                    what comes before the steps is repeated: compared there
    """

    run: RunState
    """The run, once it is prepared. Before that nothing is restored or saved, so nothing is compared."""

    def __init__(self, loop: EpochLoop) -> None:
        self._loop = loop
        self._restored: dict[str, str] = {}
        """Texts of what a checkpoint has restored, until the script's loop begins; empty in a run that begins anew."""
        self._at_start: dict[str, str] = {}
        """Those of what a loop sets at the start of an epoch, where a resumed run goes on within one."""
        self._extra: dict[str, str] = {}
        """Those of the entries of ``run.extra`` there."""
        self._place, self._held = "", dict[str, str]()
        """The loop in whose body the last checkpoint was written, see ``EpochLoop.place``, and what was saved there."""
        self._at_end: dict[str, str] = {}
        """Those of what a loop changes, as the last steps of an epoch, or its end, have left it."""
        self._at_loop_end: dict[str, str] = {}
        """Those of what a script sets there, as a loop over epochs has left it, or the checkpoint written there."""
        self._attributes_at_loop_end: dict[tuple[str, str], str] = {}
        """The attributes of this process there."""
        self._attributes: dict[tuple[str, str], str] = {}
        """See ``RunState.held_attributes``; where a resumed epoch begins, and at a save."""
        self._frames: dict[FrameType, int] = {}
        """Where the code of the frames was then."""

    def begin(self) -> None:
        """Notes the run as a checkpoint has restored it. Collective."""
        self._loop.is_resumed, self._restored = True, _restored(self.run)
        if not self._loop.position.inside and not self.run.changed_after_loop:
            self._note_loop_end()

    def _compare_with_restored(self, *, settings: bool) -> None:
        """Raises ``ConfigError`` where the script has changed tensors before its loop; names settings. Collective."""
        before, self._restored = self._restored, {}
        if not before:
            return
        run = self.run
        now = _restored(run) | _entries(run)
        mine = [words for words, value in before.items() if value and now.get(words) not in ("", value)]
        lost = [*dict.fromkeys(itertools.chain(*run.strategy.gather_records(mine)))]
        once = (
            "under 'if not run.position.step:'; what stands between two loops over run.epochs, at the start of the "
            "second one, under 'if epoch == N and not run.position.done:'"
        )
        if run.changed_after_loop:
            once += ". This checkpoint has it already: then resume from an earlier one"
        if changed := [words for words in (_trained(run) if lost else ()) if words in lost]:
            raise ConfigError(
                f"After run.prepare the script has changed {shorten(changed, 3)}, which this resumed run has from its "
                "checkpoint: what was trained would be lost. Do it before run.prepare, as loading weights and "
                f"freezing layers; or {once}."
            )
        if lost and settings and run.world.is_main:
            logger.warning(
                "Before its loop the script has set %s anew, which this resumed run had from its checkpoint. What "
                "depends on it is not what it would have been without the stop. Set it before run.prepare, or %s.",
                *(shorten(lost, 3), once),
            )

    def begin_epochs(self, count: int) -> None:
        """Notes the run as the loop over epochs finds it, where it resumes within an epoch. Collective.

        What follows a loop that was over before the checkpoint is like what comes before the first one.
        """
        position, is_resumed = self._loop.position, self._loop.is_resumed and isinstance(count, Integral)
        changed = self.run.changed_after_loop if is_resumed and not self._at_loop_end else []  # that of the checkpoint
        has_passed = is_resumed and (position.epoch, position.inside or bool(changed)) > (count, False)
        if changed and not has_passed and not self._loop.has_passed and self.run.world.is_main:
            logger.warning(
                "The checkpoint was written after a loop over run.epochs(%d), and after it the script had changed %s. "
                "The run goes on with that, as one without the stop would not. To go on without it, resume from a "
                "checkpoint written at the end of the last epoch.",
                *(position.epoch, shorten(changed, 3)),
            )
        self._loop.has_passed = has_passed
        if has_passed:
            self._restored |= _entries(self.run)
            return
        self._compare_with_restored(settings=True)
        if is_resumed and position.inside:
            self._at_start, self._extra = _set(self.run), _texts(self.run.extra)
            self._note_attributes()

    def check_start(self) -> None:
        """Raises ``ConfigError`` where what comes before the steps of an epoch has changed the run once more."""
        if self._place == "epoch" and self._loop.left_early:
            self._require_none(["the place in the epoch, by another loop over run.batches"], "epochs")
        self._compare_with_restored(settings=self._loop.position.done > 0)  # else a loop of its own may set them
        self._place = ""
        self.require_start_once()
        self._at_loop_end, self.run.changed_after_loop = {}, []  # this one may be left by break

    def require_start_once(self) -> None:
        """Raises ``ConfigError`` where the start of the epoch in which the run was resumed has changed it, once."""
        before, self._at_start = self._at_start, {}
        if not before:
            return
        changed = [words for words, value in _set(self.run).items() if before.get(words, value) not in ("", value)]
        if changed := changed + self._extra_carried() + self._attributes_set_since():
            after_save = "The checkpoint was written after that: put run.save() at the end of the body."
            remedy = "Do it under 'if not run.position.done:'." if self.run.position.done else after_save
            raise ConfigError(
                f"The run goes on within epoch {self.run.position.epoch + 1}, and before run.batches gave a batch the "
                f"body of the loop over epochs has changed {shorten(changed, 3)}. Without the stop it would do that at "
                f"the start of the epoch only, so the bits would not continue. {remedy}"
            )

    def _extra_carried(self) -> list[str]:
        """Entries of ``run.extra`` that the start of the epoch has made of what they were: not what it replaces."""
        now = _texts(self.run.extra)
        differ = differing(self._extra, now)
        carried = carried_since(self._frames) if differ else set()
        return [f"run.extra[{key!r}]" for key in differ if carried & {Carried(key), Carried("extra")}]

    def _note_attributes(self) -> None:
        self._attributes, self._frames = self.run.held_attributes(), offsets_of_frames()

    def _attributes_set_since(self) -> list[str]:
        """Those that the loop's own code has set since they were noted; forward passes set others. Collective."""
        before, frames = self._attributes, self._frames
        self._attributes, self._frames = {}, {}
        return _set_by_code(before, self.run.held_attributes(), frames)

    def note(self) -> None:
        """Says that a checkpoint has the run as it stands."""
        self._loop.note_save()
        independent = isinstance(self.run.strategy, IndependentStrategy)  # servers continue by themselves
        self._place = "" if independent else self._loop.place
        self._held = _held(self.run, self._loop) if self._place else {}
        if self._place:
            self._note_attributes()

    def note_end(self, ends_loop: bool) -> None:
        """Notes the run as the last step of an epoch, or its end, has left it."""
        self._at_end = _held(self.run, self._loop, _versions)
        if ends_loop:
            self._note_loop_end()

    def _note_loop_end(self) -> None:
        if not isinstance(self.run.strategy, IndependentStrategy):  # servers continue by themselves
            self._at_loop_end = _set(self.run) | _entries(self.run)
            self._attributes_at_loop_end = self.run.held_attributes(alone=True)

    def is_as_at_end(self) -> bool:
        """True if nothing has changed since that a resumed run, which goes on there, would change again. Collective."""
        strategy = self.run.strategy
        # Servers continue by themselves.
        mine = isinstance(strategy, IndependentStrategy) or self._at_end == _held(self.run, self._loop, _versions)
        return all(gather_agreed(mine, strategy.all_ranks, strategy.device))

    def begin_save(self) -> None:
        """Notes for a checkpoint what the script has changed since the end of a loop over epochs. Collective.

        Raises:
            ConfigError: as ``require_start_once``, where the checkpoint may have been written that was resumed.
        """
        if not self._loop.position.done:
            self.require_start_once()
        if self._loop.in_epochs:
            self.run.changed_after_loop = []
        elif self._at_loop_end:
            mine = differing(self._at_loop_end, _set(self.run) | _entries(self.run))
            mine += _set_by_code(self._attributes_at_loop_end, self.run.held_attributes(alone=True), {})
            of_all = gather_agreed(mine, self.run.strategy.all_ranks, self.run.strategy.device)
            self.run.changed_after_loop = [*dict.fromkeys(itertools.chain(*of_all))]

    def forget(self) -> None:
        """Says that nothing of what comes would be lost."""
        self._place, self._attributes, self._frames = "", {}, {}

    def require_nothing_since(self, place: str) -> None:
        """Raises ``ConfigError`` at the end of a body, with the words for what a resumed run would not do again."""
        saved, self._place = self._place, ""
        if not saved or (saved != place and self._loop.next_epoch is None):
            return  # in the second case the training ends here
        lost = ["the end of the loop over its batches, by break"]
        if saved == place:
            now = _held(self.run, self._loop)
            lost = [words for words, value in now.items() if value != self._held.get(words)]
            lost += self._attributes_set_since()
        self._require_none(lost, "batches" if saved == "body" else "epochs")

    def _require_none(self, lost: Sequence[str], what: str) -> None:
        if lost:
            raise ConfigError(
                f"run.save() came before the end of the body of the loop over {what}, and after it the loop has "
                f"changed {shorten(lost, 3)}. A resumed run does not do that again, so it would go on with other bits. "
                f"Put run.save() at the end of that body. The checkpoint of step {self._loop.position.step} lacks it: "
                "do not resume from it."
            )


def _restored(run: RunState) -> dict[str, str]:
    """As ``_set``, with the attributes that a checkpoint would hold. Collective."""
    return _set(run) | {words_of(*place): value for place, value in run.held_attributes().items()}


def _entries(run: RunState) -> dict[str, str]:
    """Texts of ``run.extra``, by the words for its entries."""
    return {f"run.extra[{key!r}]": text for key, text in _texts(run.extra).items()}


def _set_by_code(
    before: Mapping[tuple[str, str], str], now: Mapping[tuple[str, str], str], frames: Mapping[FrameType, int]
) -> list[str]:
    """The attributes that differ and that the code of the user's frames sets, after these offsets, in words."""
    differ = differing(before, now)
    names = changed_since(frames) if differ else set()
    return [words_of(*place) for place in differ if place[1] in names]


def _texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in values.items()}


def _held(run: RunState, loop: EpochLoop, read: Callable[[Sequence[Tensor]], str] | None = None) -> dict[str, str]:
    """Texts of what a loop changes after a step, by the words for it; ``read`` gives those of buffers."""
    read = read or _bits
    parts = run.parts
    parameters, buffers, beside = _tensors(run)
    found = {
        "gradients, by run.backward": str(loop.backward_passes),
        "parameters": _versions(parameters),
        "buffers": read(buffers),
        # Versions are read quickly; the bits of a buffer may be set back by an evaluation.
        "modules beside the model": str([_versions([t]) if isinstance(t, nn.Parameter) else read([t]) for t in beside]),
        "run.extra": str(run.extra),
        "which parameters are frozen": str(frozen_parameters(run.model.module)),
        **hyperparameters(parts.optimizers),
    }
    for number, optimizer in enumerate(parts.optimizers):
        found[f"the gradients of optimizer {number}, as by zero_grad()"] = str(has_gradients(optimizer))
    return found | _schedulers(parts)


def _tensors(run: RunState) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    """Of this process, as checkpoints hold them: parameters, buffers, and those of modules beside the model."""
    model, modules = run.model, run.parts.modules
    held = (
        [*run.strategy.trainable().values(), *model.parameters.values()],
        [each for name, each in model.module.named_buffers() if name in model.tensors],
        [each for module in modules for each in (*module.parameters(), *module.buffers())],
    )
    parameters, buffers, beside = (
        [*{id(each): each for each in tensors if not isinstance(each, AbsentTensor)}.values()] for tensors in held
    )
    return parameters, buffers, beside


def _versions(tensors: Sequence[Tensor]) -> str:
    return str([each._version for each in tensors])


def _bits(tensors: Sequence[Tensor]) -> str:
    return str([int(sum_of_bits(each)) for each in tensors])


def _trained(run: RunState) -> dict[str, str]:
    """The tensors of this process, and which parameters are frozen, as texts by the words for it."""
    parameters, buffers, beside = _tensors(run)
    return {
        "parameters": _bits(parameters),
        "which parameters are frozen": str(frozen_parameters(run.model.module)),
        "buffers": _bits(buffers),
        "modules beside the model": _bits(beside),
    }


def _set(run: RunState) -> dict[str, str]:
    """Texts of what a loop sets at the start of an epoch, by the words for it; empty where that cannot be compared."""
    parts, model = run.parts, run.model.module
    modes = str([name for name, each in model.named_modules() if not each.training])
    found = {
        **_trained(run),
        "which modules are in evaluation mode": modes if model.training else "",
        **hyperparameters(parts.optimizers),
    }
    for number, optimizer in enumerate(parts.optimizers):
        states = [
            (key, getattr(value, "_version", value))
            for name, each in optimizer.state.items()
            for key, value in (each.items() if isinstance(each, Mapping) else ((name, each),))
        ]
        found[f"the state of optimizer {number}"] = str(states)
    return found | _schedulers(parts)


def _schedulers(parts: Parts) -> dict[str, str]:
    return {
        f"scheduler {number} ({type(each).__name__})": str(each.state_dict())
        for number, each in enumerate(parts.schedulers)
    }
