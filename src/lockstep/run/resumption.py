"""Checks that a resumed run does once what the loop has done since the last save, and has what the model reads."""

from __future__ import annotations

import itertools
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from lockstep.core.fingerprint import sum_of_bits
from lockstep.core.values import differing
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import ALIAS, Snapshot, without_key
from lockstep.run.attributes import held_places, reference, words_of
from lockstep.run.changed_names import Carried, carried_since, changed_since, offsets_of_frames
from lockstep.run.checks.calls import gather_agreed
from lockstep.run.epoch_loop import EpochLoop
from lockstep.run.optimizer_step import has_gradients
from lockstep.run.prepare import Parts, frozen_parameters, hyperparameters
from lockstep.strategies import IndependentStrategy
from lockstep.strategies.absent import AbsentTensor
from lockstep.text import shorten

if TYPE_CHECKING:
    from lockstep.run.state import RunState

logger = logging.getLogger(__name__)


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


_SWITCH = re.compile(r"True|False|None|-?\d+|['\"].*", re.DOTALL)
"""The text of a value that a step may switch back to what it was at first, such as every second step."""


class UnheldPlaces:
    """The places that the model and the loss read and no checkpoint holds: globals, variables of functions, attributes
    of classes, functions and hooks. A checkpoint notes those that the loop has changed.

    A resumed run has lost such a place if its value is again that of the run's beginning.
    """

    def __init__(self, *, is_main: bool) -> None:
        self._is_main = is_main
        self._resumed: dict[str, list[str]] = {}
        """The notes of a checkpoint, see ``capture``, on places that were not looked at yet."""
        self._was_inside = False
        """True if it was written within an epoch."""
        self._roots: dict[str, Callable[[], Any]] = {}
        self._first: dict[str, str] = {}
        """The texts at the first rehearsal of all, over all resumes."""
        self._start: dict[str, str] = {}
        """The texts at the newest rehearsal after the first epoch."""
        self._moved: set[str] = set()
        """The places that calls themselves change, without the keys of entries."""

    def look(self, state: RunState, roots: Mapping[str, Any], found: Snapshot, moved: set[str]) -> list[str]:
        """Takes what a rehearsal has looked at; returns what a stop has lost, and warns of what it may have lost."""
        self._roots |= {name: reference(root) for name, root in roots.items()}
        self._moved |= moved
        lost: list[str] = []
        uncertain: list[str] = []
        for name in sorted(self._resumed.keys() & found.texts.keys()):
            first, saved, start = self._resumed.pop(name)
            self._first[name] = first
            is_set_anew = not self._was_inside and start == first  # where an epoch begins
            if found.texts[name] == first and not is_set_anew and without_key(name) not in self._moved:
                is_certain = self._was_inside and not _SWITCH.fullmatch(first)
                (lost if is_certain else uncertain).append(f"{name} ({first}, was {saved})")
        self._first = {**found.texts, **self._first}
        if state.position.epoch:
            self._start = found.texts
        if uncertain and self._is_main:
            logger.warning(
                "The model or the loss reads %s, which is what it was at the start of the run and not what it was at "
                "the checkpoint. Unless that is right, keep it in run.extra and give it back before run.batches.",
                shorten(uncertain, 3),
            )
        return lost

    def resume(self, stored: Mapping[str, Sequence[str]], *, inside: bool) -> None:
        """Takes what ``capture`` gave; ``inside``: it did so within an epoch."""
        self._resumed = {name: [str(first), str(saved), str(start)] for name, (first, saved, start) in stored.items()}
        self._was_inside = inside

    def capture(self, state: RunState) -> dict[str, list[str]]:
        """By place: the first value, the value now, and the value at the start of an epoch (empty if unknown)."""
        roots = {name: root for name, each in self._roots.items() if (root := each()) is not None}
        modules = state.parts.model, state.model.module, *state.parts.modules
        known = [each for module in modules for each in module.buffers()]
        now = Snapshot(roots, known, restorable=False)
        found = {
            name: [self._first[name], text, self._start.get(name, "")]
            for name, text in now.texts.items()
            if self._first.get(name, text) != text and without_key(name) not in self._moved
            if not (text.startswith(ALIAS) or self._first[name].startswith(ALIAS))  # it has another name, too
        }
        if not found:
            return dict(self._resumed)
        is_held, of_loop = held_places(state.parts.model), state.loop.seen_in(now)
        changed = {name: each for name, each in found.items() if name not in of_loop and not is_held(name)}
        return {**self._resumed, **changed}
