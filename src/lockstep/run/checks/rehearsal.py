"""Rehearses the first steps: computes a micro-batch twice under the same keys, to find what user code keeps.

    state of the model and the loss -> [first micro-batch of each rank] -> state -> [the same again] -> state
                                        losses, gradients                 losses, gradients
    [micro-batch 0 on every rank] -> losses, which must be equal
    everything is restored -> the step itself

A rehearsal is a short step of one micro-batch for each holder, without callbacks, whose gradients are thrown away.
Where micro-batches run side by side it has two for each. The second time these take turns in the other order, so one
that reads what the other has kept gets different bits. All ranks learn what each has found, and raise the same error.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import CodeType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lockstep.config.options import RunOptions
from lockstep.config.strategy_options import Level
from lockstep.core.fingerprint import checksums
from lockstep.core.generators import encoded_states, generators_kept
from lockstep.core.users_code import names_reached
from lockstep.data.batch import Batch
from lockstep.data.rereading import content_of
from lockstep.errors import ConfigError
from lockstep.numerics.compilation import fix_graphs
from lockstep.numerics.hidden_state import Kind, Snapshot, draws_globally, told, without_key
from lockstep.numerics.hooks import hooks_gradients
from lockstep.numerics.randomness import KeyedRandomness
from lockstep.numerics.running_buffers import warn_of_few_samples
from lockstep.run.attributes import held_places
from lockstep.run.checks import other_samples
from lockstep.run.checks.agreement import agreed_digests, differences
from lockstep.run.checks.calls import (
    ASKED,
    OF_WHOLE_BATCH,
    OFF,
    counts_read,
    warn_of_settings,
    watching_calls,
)
from lockstep.run.checks.findings import Findings, refuse_evaluation
from lockstep.run.checks.means import Deviation
from lockstep.run.checks.short_step import (
    Buffers,
    PassBits,
    RehearsalCompute,
    Watched,
    noting_mistakes,
    on_all_ranks,
    put_back,
    shortened,
    taken_gradients,
    with_own_data,
)
from lockstep.run.checks.sums import SCALES, GradientSizes
from lockstep.run.live_variables import read_in_loop
from lockstep.run.step import StepCompute, code_of
from lockstep.run.step_errors import other_on_ranks
from lockstep.run.whole_batch import SurrogateCompute, stand_in, surrogate
from lockstep.runtime.events import StepEvents
from lockstep.strategies import IndependentStrategy, Strategy
from lockstep.text import shorten

if TYPE_CHECKING:
    from lockstep.run.state import PreparedRun, RunState

logger = logging.getLogger(__name__)
_MOST = 3
"""Names in a message."""
_FURTHER = 4
"""Computations after the second, where a call changes what the one before has left."""
_LOOKS = 2
"""The rehearsals of a loss in which the model is called on other rows of a micro-batch."""
_EARLY, _APART = 6, 100
"""Epochs after the first that are rehearsed in their first step; steps that must have passed for later ones."""
_LATER = 32
"""The latest step for the next rehearsal; then one follows after twice the steps, and in the last of all, if known."""
_COUNTED = 8
"""The same where calls change something, and then each time the number of steps has grown by a quarter."""
_VALUES = (Kind.NUMBER, Kind.TENSOR)
_GENERATORS = ("torch", "NumPy", "random")
_DEVIATES = "The loss %s %s The gradient is that of the average over micro-batches: see docs/means.md."
_NOT_SET = (
    "The loop reads %s, which a forward sets. It keeps its value: strategy %r puts the layers that this forward calls "
    "into stages, and does not call it. Return what the loop needs, and take its mean with run.backward(..., also=)."
)
_STORE_IT = "Make it a registered buffer, or let its module's get_extra_state and set_extra_state store it."
_TIMES = {"first": 2, "always": math.inf, "off": 1}
"""For each setting of ``checks``, how often each loss is rehearsed, or at least looked at."""


@dataclass(frozen=True)
class Due:
    """The step in which the next rehearsal of a loss function is due: loops change at epochs, and with time."""

    after_epoch: float
    from_step: int = 0
    """In the first step from this one on that is in a later epoch."""
    at_latest: int | None = None
    """In this step, if that comes first, and in the last of all; None: not before a later epoch."""


class Rehearsals:
    """The rehearsals of one run, for the setting ``checks``."""

    def __init__(self, options: RunOptions, strategy: Strategy, events: StepEvents, *, is_main: bool) -> None:
        self._strategy, self._events, self._is_main = strategy, events, is_main
        self.times: float = _TIMES[options.checks]
        """See ``_TIMES``."""
        self.done: dict[CodeType | type, int] = {}
        """How often each loss function was rehearsed or looked at, by its code."""
        self.due: dict[CodeType | type, Due] = {}
        """When the next one of each is due, at once where there was none; see ``Run.backward_pass``."""
        self._starts: dict[CodeType | type, dict[str, tuple[str, Any]]] = {}
        """For each loss, the places that its calls have changed, also in the model: text and value before the first."""
        self.deviations: dict[str, str] = {}
        """Why losses are not means over samples, by their names."""
        self._places: dict[str, str] = {}
        """The texts of all places that the last rehearsal looked at, by name."""
        self._read: dict[str, str] = {}
        """The texts of the variables that the loss and the model read, by name."""
        self._moved: set[str] = set()
        """The variables that calls change, or that differed between the ranks from the start."""
        self._are_concurrent = options.sync_batch_norm
        alone = options.micro_batches == 1 and strategy.all_ranks is None
        # Without these, two passes may differ by themselves.
        repeats = options.deterministic or strategy.device.type == "cpu"
        first = options.checks == "first"
        self.is_on = repeats and (options.checks == "always" or (first and not alone))
        self._is_for_resume = repeats and alone and first and options.directory is not None
        """True if one process computes all, and what a checkpoint does not hold would only be missed after a stop."""
        self._mixing: set[CodeType | type] = set()
        """Losses of outputs that depend on other samples."""
        self._warned: set[str] = set()
        self._checks = options.checks != "off"
        self._seen: set[Any] = set()

    def new_metrics(self, functions: Mapping[str, Callable[..., Any]], *, evaluated: bool = False) -> set[str]:
        """The names of the metrics that should be checked and were not, or not with a result.

        Functions that one line makes, such as lambdas in a loop, count as one. ``evaluated``: they are metrics of
        ``run.evaluate``, not of a step.
        """
        new = functions.items() if self._checks else ()
        return {name for name, each in new if (code_of(each), evaluated) not in self._seen}

    def note_checked(self, metrics: Iterable[Callable[..., Any]], *, evaluated: bool = False) -> None:
        """Notes metrics that need not be checked again."""
        self._seen |= {(code_of(each), evaluated) for each in metrics}

    def is_new_evaluation(self, model: nn.Module, *own: Callable[..., Any] | None, resumed: bool = False) -> bool:
        """True for an evaluation that should be rehearsed, the first time that it is asked about."""
        code = type(model), *map(code_of, own)
        if code in self._seen or not (self.is_on or (self._is_for_resume and resumed)):
            return False
        self._seen.add(code)
        return True

    def rehearse_evaluation(
        self, model: nn.Module, own: Mapping[str, Callable[..., Any] | None], compute: Callable[[], Any] | None
    ) -> None:
        """Computes the output for one micro-batch of an evaluation twice, and puts everything back. Collective.

        ``compute`` gives the output; None on a process without a micro-batch. What ``own`` functions keep is told.

        Raises:
            ConfigError: the second output has other bits, buffers change, or processes exchange values.
        """
        found: list[Any] = [False, {}, [], {}]
        asked: list[str] = []
        with self._strategy.joined_calls():  # not every process has a micro-batch
            if compute is not None:
                watched = Watched({"": model, **own}, (model,))
                with watched.restored(), self._events.silenced(), generators_kept():
                    with watching_calls(asked, "the forward pass of an evaluation"):
                        first = content_of(compute())
                    after = watched.now()
                    moved = watched.buffers.moved(model)
                    changes, of_model = watched.before.changed(after), Snapshot({"": model}, restorable=False).texts
                    kept = {name: pair for name, pair in changes.items() if name not in of_model}
                    found = [content_of(compute()) != first, changes, moved, kept]
        self._warn_of_asked(asked, "The forward pass of an evaluation")
        everyone = self._strategy.gather_records(found)
        changed = next((each for differs, each, *_ in everyone if differs), None)
        if self._is_for_resume:
            if changed is None or (changed and all(map(held_places(model), changed))):
                return
            what = told(changed, _MOST) if changed else "something that was not found, such as an iterator"
            raise ConfigError(
                f"The forward pass of the evaluation keeps {what} from one call to the next. The checkpoint does not "
                f"hold it, so this run would evaluate otherwise than without the stop. {_STORE_IT} With "
                "checks='off' the run goes on anyway."
            )
        refuse_evaluation(changed, next((buffers for *_, buffers, _ in everyone if buffers), ()))
        kept = {name: pair for *_, each in everyone for name, pair in each.items()}
        if kept and self._is_main and len(everyone) > 1:
            logger.warning(
                "An evaluation changes %s, by the samples of one rank. Let run.predict(data, keep=...) give all rows.",
                told(kept, 3),
            )

    def begin(
        self,
        prepared: PreparedRun,
        compute: StepCompute,
        batch: Batch,
        loss: Callable[..., Any],
        scale: float,
    ) -> None:
        """Looks at what a backward pass will call, and rehearses it if that is asked for. Collective.

        ``loss`` is as the user gave it; ``scale``: see ``Strategy.backward``.

        Raises:
            ConfigError: the result would depend on the number of processes.
        """
        code, step = code_of(loss), batch.plan.step
        done = self._schedule(code, batch.plan.epoch, step)
        if done == 1 and draws_globally(loss, compute.forward):
            compute.randomness.key_global_generators()
        if isinstance(self._strategy, IndependentStrategy) or self._strategy.level is Level.STATISTICAL:
            return
        is_first = done == 1 and scale == 1.0  # fp16 scales the loss, which must not become larger
        if not (self.is_on or self._is_for_resume):
            if is_first and self._checks and hooks_gradients(prepared.state.parts.model):
                self._warn_of_sums(prepared, compute, batch, loss)
            return
        prepared.state.model.require_own_types()
        if parametrize._cache_enabled:
            raise ConfigError(
                "run.backward was called under parametrize.cached(), which would keep a weight's graph from one micro-"
                "batch to the next. Put it into the model's forward, or into forward=."
            )
        compute.heartbeat.leave_untimed()
        self.require_equal_draws()
        if len(self.done) == done == 1 and self._is_main:
            alone = self._strategy.all_ranks is None
            warn_of_settings(self._events.callbacks, is_alone=alone, device=self._strategy.device)
            if names := read_in_loop(self._strategy.places_not_set()):
                logger.warning(_NOT_SET, shorten(names, _MOST), self._strategy.name)
            if not self._are_concurrent:
                warn_of_few_samples(prepared.state.parts.model, len(batch.plan.indices[0]), batch.plan.samples)
        findings = self._rehearse(prepared, compute, batch, loss, scale)
        if self._is_for_resume:
            self._judge_resumption(findings, prepared.state)
            return
        found = findings.of_all_ranks(self._strategy)
        prepared.state.loop.lost = {n: each for n, each in prepared.state.loop.lost.items() if n not in found.filled}
        self.judge(found, _placed(loss), is_divided=batch.plan.leaves > 1)
        if found.keeps:
            self.due[code] = replace(self.due[code], at_latest=max(_COUNTED, step + step // 4))
        if found.ranks_differ:
            agreed_digests(prepared.state, partial(checksums, device=self._strategy.device), of_all_modules=False)
            everyone = self._strategy.gather_records(self._places)
            raise other_on_ranks(everyone, OFF)
        self._require_equal_variables(done)
        if is_first:
            self._warn_of_sums(prepared, compute, batch, loss)

    def _warn_of_sums(
        self, prepared: PreparedRun, compute: StepCompute, batch: Batch, loss: Callable[..., Any]
    ) -> None:
        """Warns of what a backward pass makes of the size of gradients, which are those of sums. Collective."""
        compute.heartbeat.leave_untimed()
        strategy, model = self._strategy, prepared.state.parts.model
        watched = Watched({"": model, "loss": loss, "forward=": compute.forward}, (model, prepared.forward_pass.model))
        short, rehearsal = shortened(batch, compute, strategy.share, 1 + self._are_concurrent)
        sizes = GradientSizes(strategy, model)
        for scale in SCALES:
            if not sizes.is_done():
                with put_back(strategy, watched, self._events):
                    sizes.add(scale, self._gradients(short, rehearsal, scale), watched.now())
        moved = [] if self.is_on or self._is_for_resume else list(watched.before.changed(watched.now()))
        self.tell_sums(sizes.warnings(moved), len(batch.plan.indices[0]))

    def tell_sums(self, found: Mapping[str, list[str]], samples: int) -> None:
        """Logs the warnings of ``GradientSizes``, for micro-batches of so many samples; each name once."""
        for text, names in found.items():
            if self._untold(f"{text} {name}" for name in names):
                logger.warning(text, {"names": shorten(names, _MOST), "most": samples})

    def _schedule(self, code: CodeType | type, epoch: int, step: int) -> int:
        """The number of rehearsals of a loss with this one, after which it sets when the next is due."""
        self.done[code] = done = self.done.get(code, 0) + 1
        if done < self.times:
            self.due[code] = Due(after_epoch=epoch - 1)
        elif self.is_on:
            self.due[code] = Due(epoch, 0 if epoch < _EARLY else step + _APART, max(_LATER, 2 * step))
        else:
            self.due[code] = Due(after_epoch=math.inf)
        return done

    def _require_equal_variables(self, done: int) -> None:
        """Refuses variables that were the same on all ranks at first, and that differ between ranks by now."""
        everyone = self._strategy.gather_records([self._read, sorted(self._moved)])
        self._moved = {name for _, moved in everyone for name in moved}
        first = everyone[0][0]
        names = [name for name in first if any(each.get(name) != first[name] for each, _ in everyone)]
        if done == 1 or len(everyone) != self._strategy.share.holders:  # others do not call the loss
            self._moved.update(map(without_key, names))
        if unequal := [name for name in names if without_key(name) not in self._moved]:
            raise ConfigError(
                f"The loss or the model reads {shorten(unequal, _MOST)}, which was the same on all ranks before and is "
                "not any more. What a step leaves on its rank is of that rank's samples only: take such numbers from "
                f"what run.backward returns with also=, or from run.evaluate or run.predict. {OFF}"
            )

    def require_equal_draws(self) -> None:
        """Raises ``ConfigError`` where the loop has drawn random numbers on some ranks only. Collective."""
        self._strategy.require_no_calls()
        states = dict(zip(_GENERATORS, encoded_states(), strict=True))
        if names := differences(states, self._strategy.all_ranks, self._strategy.device):
            raise ConfigError(
                f"The loop drew random numbers from {' and '.join(names)} on some ranks only before run.backward, so "
                "the next ones that it draws would differ between the ranks. Draw on every rank, or, where only one "
                f"rank needs them, from a generator of its own, as np.random.default_rng() is. {OFF}"
            )

    def _rehearse(
        self,
        prepared: PreparedRun,
        compute: StepCompute,
        batch: Batch,
        loss: Callable[..., Any],
        scale: float,
    ) -> Findings:
        strategy, model = self._strategy, prepared.state.parts.model
        strategy.before_step()
        roots = {"": model, f"the loss {_name_of(loss)}": loss, "forward=": compute.forward}
        watched = Watched(roots, (model, prepared.forward_pass.model))
        before, buffers, findings = watched.before, watched.buffers, Findings()
        short, rehearsal = shortened(batch, compute, strategy.share, 2 if self._are_concurrent else 1)
        judging = replace(rehearsal, judged=None if compute.function is stand_in else [])
        compute_again = partial(self._pass, short, rehearsal, scale, buffers)
        asking = watching_calls(findings.asked, "the forward pass or the loss", ranks=strategy.share.holders == 1)
        with put_back(strategy, watched, self._events):
            with noting_mistakes(prepared, watched, strategy, findings), asking:
                first = self._first_pass(compute_again, compute.randomness, buffers)
            after = watched.now()
            buffers.restore()  # the next step would begin from new running statistics
            # Those that run side by side find what others keep in the other order.
            turned = replace(short, micro_batches=short.micro_batches[::-1])
            second = self._pass(turned, judging, scale, buffers)
            later = watched.now()
            is_counting = self._is_early(loss) and bool(after.changed(later))
            others = [second, *self._further_passes(compute_again, buffers, is_counting)]
            buffers.restore()
            differs = any(each != first for each in others)
            starts = self._starts.setdefault(code_of(loss), {})
            from_start = self._pass_from_start(compute_again, watched, starts, differs)
            if strategy.interleaves and self._is_early(loss) and not differs:
                disturbed = self._pass(short, replace(rehearsal, disturbs=True), scale)
                findings.disturbed = disturbed.other_gradients(first)
            # Each time: a loop may give back what a step has left on its rank.
            if strategy.share.holders > 1:
                findings.ranks_differ = self._pass_of_all(short, rehearsal, scale)
                self._places = {n: t for n, t in before.texts.items() if "environment variable" not in n}
            findings.deviation = self._judge_loss(judging, compute, batch, loss, keeps=bool(before.changed(after)))
            if self._is_main and self.done[code_of(loss)] == 1 and not self._are_concurrent:
                other_samples.warn_of_division(strategy, compute, batch, model, buffers)
        passes = _Passes(first, [*others, *from_start], from_start, before, after, later)
        is_called, functions = any(map(len, short.micro_batches)), (loss, compute.forward)
        self._compare(findings, passes, prepared.state, roots, functions, is_called)
        return findings

    def _is_early(self, loss: Callable[..., Any]) -> bool:
        """True for the first rehearsals of a loss, which look at more than later ones do."""
        return self.done[code_of(loss)] <= max(2, self.times)

    def _judge_loss(
        self, judging: RehearsalCompute, compute: StepCompute, batch: Batch, loss: Callable[..., Any], *, keeps: bool
    ) -> str:
        """Why the loss is not a mean over samples, also for what the model does; empty where nothing tells.

        ``keeps``: a call has changed something, such as a term for the loss, which may be 0 in the first micro-batch.
        """
        strategy, code, seen = self._strategy, code_of(loss), other_samples.Seen()
        done, is_divided = self.done[code], batch.plan.leaves > 1
        others = batch.micro_batches if done == 1 else batch.micro_batches[::-1]  # one may show nothing
        with strategy.joined_calls():  # a loss may call the model
            deviations = judging.deviations()
            looks = done == 1 or (keeps and done <= _LOOKS and not strategy.computes_together)
            if looks and is_divided and not self._are_concurrent:
                judges = judging.judged is not None
                seen = other_samples.look_at_others(strategy, compute, others, judges=judges, keeps=keeps)
        if seen.mixes is not None:
            seen.warn(told=bool(self._mixing) or not self._is_main)
            self._mixing.add(code)
        if code in self._mixing:  # then its value tells nothing
            deviations = [each for each in deviations if each is not Deviation.WITHOUT_ROWS]
        elif all(each is Deviation.WITHOUT_ROWS for each in deviations):
            alone = strategy.replicated and not self._are_concurrent
            if done == 1 and deviations and (found := other_samples.judge_lengths(compute, others, alone=alone)):
                return found.reason
            if seen.loss is not None and not strategy.replicated:
                return seen.loss.reason
            if alone and done <= _LOOKS and others:
                deviations = [other_samples.judge_with_model(compute, others, seen.mode, trains=done == 1)]
            elif done > 1 or not others:
                deviations = []  # as for the last step of an epoch, of single samples
        deviations += [Deviation.KEPT] if seen.loss is not None and seen.loss.reason else []
        return next((each.reason for each in deviations if each.reason and judging.judged is not None), "")

    def _compare(
        self,
        findings: Findings,
        passes: _Passes,
        state: RunState,
        roots: Mapping[str, Any],
        functions: tuple[Callable[..., Any], Callable[..., Any] | None],
        is_called: bool,
    ) -> None:
        """Adds what the passes differ in, and what they have changed; ``functions`` are the loss and ``forward=``."""
        strategy, code, before = self._strategy, code_of(functions[0]), passes.before
        is_early, starts = self._is_early(functions[0]), self._starts[code]
        findings.losses_differ = any(each.losses != passes.first.losses for each in passes.others)
        findings.gradients = passes.first.other_gradients(*passes.others)
        findings.buffers = passes.first.other_buffers(*passes.others)
        noted, counting = findings.note_changes(before, passes.after, passes.later)
        changed, set_anew = {**noted, **counting}, {} if findings.differ else noted
        moved = {*map(without_key, changed)}
        self._moved |= moved
        texts = [(n, text) for n, text in before.texts.items() if before.kinds[n] in _VALUES]
        self._read = {n: text for n, text in texts if n.startswith(("the global variable", "the variable"))}
        left, kinds = counting, {**passes.after.kinds, **passes.later.kinds}
        if self.done[code] > 1:  # a cache is filled in the first step
            state.loop.note_made()
            left = changed
        findings.left = read_in_loop([name for name in left if kinds.get(name) in _VALUES])
        for name, value in before.values_of(changed).items():
            starts.setdefault(name, (before.texts[name], value))
        codes = [each for each in map(code_of, functions) if isinstance(each, CodeType)]
        if is_early and strategy.all_ranks is not None:
            findings.asked += counts_read(before, codes, strategy.all_ranks.size())
        if is_early and is_called and (lost := state.loop.lost):
            names = names_reached(codes, before.functions)
            read = [name for name, each in lost.items() if each.is_read_by(before, (), names)]
            findings.lost = [name for name in read if lost[name].is_read_by(before, set_anew, names)]
            findings.filled = [name for name in read if name not in findings.lost]
        findings.lost += state.unheld.look(state, roots, before, moved)
        state.idle -= moved
        state.idle |= {*map(without_key, set_anew)}.difference(map(without_key, counting))
        if any(each != passes.first for each in passes.from_start):
            now = {name: (text, before.texts.get(name, "nothing")) for name, (text, _) in starts.items()}
            findings.changed = {name: pair for name, pair in now.items() if pair[0] != pair[1]}

    def _first_pass(self, compute: Callable[[], PassBits], randomness: KeyedRandomness, buffers: Buffers) -> PassBits:
        """The first computation; done again where it drew from global generators that were not keyed yet."""
        _, *states = encoded_states()
        result = compute()
        fix_graphs()  # a forward pass may load the compiler
        is_keyed = randomness.keys_global_generators
        if not is_keyed and any(self._strategy.gather_records(encoded_states()[1:] != states)):
            randomness.key_global_generators()
            buffers.restore()
            result = compute()
        return result

    def _further_passes(self, compute: Callable[[], PassBits], buffers: Buffers, is_counting: bool) -> list[PassBits]:
        """More computations where every call changes something: the effect of one may be as small as rounding."""
        if not any(self._strategy.gather_records(is_counting)):
            return []
        found = []
        for _ in range(_FURTHER):
            buffers.restore()
            found.append(compute())
        return found

    def _pass_from_start(
        self,
        compute: Callable[[], PassBits],
        watched: Watched,
        starts: Mapping[str, tuple[str, Any]],
        differs: bool,
    ) -> list[PassBits]:
        """One more computation, from the values before the first call of what calls have changed.

        So a count that has reached a threshold is found. Empty if other bits were found before, or nothing was changed.
        """
        everyone = self._strategy.gather_records([differs, bool(starts)])
        if any(found for found, _ in everyone) or not any(changed for _, changed in everyone):
            return []
        watched.before.restore()
        watched.before.put({name: value for name, (_, value) in starts.items()})
        found = compute()
        watched.restore()
        return [found]

    def _pass_of_all(self, batch: Batch, compute: RehearsalCompute, scale: float) -> bool:
        """Returns whether processes that compute rank 0's micro-batch under the same keys get losses of other bits.

        False, too, where the data of the micro-batch are not tensors, or not alike on all ranks.
        """
        common = on_all_ranks(batch, compute, self._strategy)
        losses = [] if common is None else self._pass(*common, scale).losses
        return any(loss != losses[0] for loss in losses)

    def _pass(self, batch: Batch, compute: StepCompute, scale: float, buffers: Buffers | None = None) -> PassBits:
        """The bits of one computation of the short step; of the ``buffers``, where it began with their first values."""
        losses = self._backward(batch, compute, scale).view(torch.int64).tolist()
        return PassBits(losses, taken_gradients(self._strategy), buffers.bits() if buffers is not None else {})

    def _gradients(self, batch: Batch, compute: StepCompute, scale: float) -> dict[str, Tensor]:
        """The gradients of one computation of the short step, by parameter, which are taken away."""
        self._backward(batch, compute, scale)
        trained = self._strategy.trainable().items()
        taken = {name: parameter.grad for name, parameter in trained if parameter.grad is not None}
        for _, parameter in trained:
            parameter.grad = None
        return taken

    def _backward(self, batch: Batch, compute: StepCompute, scale: float) -> Tensor:
        """The losses of the short step, computed on data of its own: a forward pass may write into its input."""
        parts = tuple(with_own_data(each) for each in batch.micro_batches)
        result = self._strategy.backward(replace(batch, micro_batches=parts), compute, scale=scale, stop=0)
        compute.randomness.leave()
        return result.losses

    def judge(self, found: Findings, loss: str, *, is_divided: bool = True) -> None:
        """Raises ``ConfigError``, or warns, because of the findings of all ranks; ``loss`` is the name of the loss.

        A loss need not be a mean if all samples of a step are in one micro-batch, and the step not ``is_divided``.
        """
        found.refuse()
        if found.deviation and loss not in self.deviations:
            is_told = found.deviation in self.deviations.values()
            self.deviations[loss] = found.deviation
            said = ("The same holds for the loss %s.", loss) if is_told else (_DEVIATES, loss, found.deviation)
            if self._is_main and is_divided:
                logger.warning(*said)
        if left := self._untold(found.left):
            logger.warning(
                "The loop reads %s, which the forward pass or the loss sets. The value is that of the micro-batches of "
                "this process, so it depends on the number of processes. Return it, and take its mean over the step "
                "with run.backward(..., also=); for all samples use run.evaluate or run.predict.",
                shorten(left, _MOST),
            )
        if new := {name: found.changed[name] for name in self._untold(found.changed)}:
            logger.warning(
                "The forward pass or the loss changes %s. So far the loss does not depend on it. This is checked again "
                "later, and the run is refused once it does. Each process sees only its own micro-batches: for a count "
                "or a mean over all samples, return it, and take its mean by run.backward(..., also=).",
                told(new, _MOST),
            )
        self._warn_of_asked(found.asked)

    def _untold(self, names: Iterable[str]) -> list[str]:
        """Those of the names of which no warning has told, and will not again; none where another process warns."""
        new = [name for name in names if without_key(name) not in self._warned]
        self._warned.update(map(without_key, new))
        return new if self._is_main else []

    def _warn_of_asked(self, places: Iterable[str], where: str = "The forward pass or the loss") -> None:
        if asked := self._untold(places):
            logger.warning(ASKED, where, shorten(asked, _MOST))

    def of_whole_batch(self, compute: StepCompute, batch: Batch, *, looks: bool) -> SurrogateCompute:
        """As ``surrogate``. If it ``looks``, it checks the loss, which no rehearsal calls, on the way. Collective.

        Raises:
            ConfigError: the loss exchanges values with other processes, or differs there.
        """
        if not (looks and self.is_on):
            return surrogate(compute, batch, self._strategy)
        asked: list[str] = []
        with watching_calls(asked, "the loss of the whole batch", no_exchange=OF_WHOLE_BATCH):
            found = surrogate(compute, batch, self._strategy, looks=True)
        self._warn_of_asked(asked)
        if found.remark and self._untold(["the pair"]):
            logger.warning("%s", found.remark)
        mine = found.digests() if batch.micro_batches else []
        everyone = [each for each in self._strategy.gather_records(mine) if each]
        if any(each != everyone[0] for each in everyone):
            places = self._strategy.gather_records(self._places)
            raise other_on_ranks(places, OFF, what="The loss of the whole batch")
        return found

    def _judge_resumption(self, found: Findings, state: RunState) -> None:
        """Warns of what no checkpoint holds and the loss depends on; refuses it in a run that was resumed."""
        found.require_nothing_lost()
        kept = [*found.foreign, *found.drew, *found.changed]
        is_held = held_places(state.parts.model)
        missed = [name for name in kept if not is_held(name)]
        depends = found.differ or found.foreign or found.drew
        if not depends or (kept and not missed):
            return
        what = shorten(missed, _MOST) or "something that was not found, such as an iterator or a file"
        if state.resumed_context:
            raise ConfigError(
                f"The forward pass or the loss keeps {what} from one call to the next. The checkpoint does not hold "
                "it, so this run would go on with other bits than without the stop. Begin anew without resume. "
                f"{_STORE_IT} With checks='off' the run goes on anyway."
            )
        if self._untold(missed or [what]):
            logger.warning(
                "The forward pass or the loss keeps %s from one call to the next, which no checkpoint holds: after a "
                "stop, the run cannot be resumed. %s",
                what,
                _STORE_IT,
            )


class _Passes(NamedTuple):
    """The computations of one rehearsal, and the places of the user's code around the first two."""

    first: PassBits
    others: list[PassBits]
    from_start: list[PassBits]
    """Those of them that began with what calls change as it was before the first one."""
    before: Snapshot
    after: Snapshot
    later: Snapshot


def _name_of(function: Any) -> str:
    function = getattr(function, "func", function)  # of one with arguments filled in, as in job files
    return str(getattr(function, "__qualname__", type(function).__qualname__))


def _placed(loss: Any) -> str:
    """The name of a loss in messages: of a lambda with its file and line."""
    name, code = _name_of(loss), code_of(loss)
    if isinstance(code, CodeType) and name.endswith("<lambda>"):
        return f"{name} ({Path(code.co_filename).name}:{code.co_firstlineno})"
    return name
