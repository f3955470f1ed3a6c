"""The findings of a rehearsal on one rank, and the messages with which a run is refused because of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import Kind, Snapshot, told
from lockstep.run.checks.calls import OFF
from lockstep.strategies import Strategy
from lockstep.text import shorten

_MOST = 3
"""Names in a message."""


@dataclass
class Findings:
    """The findings of a rehearsal on one rank; texts for messages."""

    foreign: dict[str, str] = field(default_factory=dict)
    """Modules that were called and do not belong to the prepared model, with what is wrong with them."""
    written: list[str] = field(default_factory=list)
    """Parameters that the forward or backward pass wrote to."""
    deviation: str = ""
    """Why the loss is not a mean over samples."""
    losses_differ: bool = False
    keeps: bool = False
    """True if calls changed anything."""
    ranks_differ: bool = False
    """True if several processes have computed one micro-batch, and their losses have other bits."""
    gradients: list[str] = field(default_factory=list)
    """Parameters whose gradients differ."""
    buffers: list[str] = field(default_factory=list)
    """Buffers that a computation leaves with other values."""
    disturbed: list[str] = field(default_factory=list)
    """Those whose gradients differ only where another forward pass came before the backward pass."""
    changed: dict[str, tuple[str, str]] = field(default_factory=dict)
    """By place, the texts before and after; generators and numbers come first."""
    drew: list[str] = field(default_factory=list)
    """Generators of random numbers that advanced."""
    left: list[str] = field(default_factory=list)
    """Numbers and tensors that each micro-batch overwrites, and the loop reads."""
    lost: list[str] = field(default_factory=list)
    """Variables of the loop that the loss or the model reads, and that are not what they were before a stop."""
    filled: list[str] = field(default_factory=list)
    """Such that the forward pass or the loss has set itself, on one of the processes, as a cache."""
    asked: list[str] = field(default_factory=list)
    """Lines and places in which the loss or the model reads the number of processes."""
    added: list[str] = field(default_factory=list)
    """Sums of a loop that runs the model itself, which grow in each of its passes."""

    @property
    def differ(self) -> bool:
        """True if a computation gave other bits than the first one."""
        return self.losses_differ or bool(self.gradients or self.buffers)

    def of_all_ranks(self, strategy: Strategy) -> Findings:
        """The findings of all ranks together: all entries of lists and dicts, and the first text. Collective."""
        whole = Findings()
        for each in strategy.gather_records(vars(self)):
            for name, found in vars(whole).items():
                if isinstance(found, list):
                    found[:] = dict.fromkeys([*found, *each[name]])
                elif isinstance(found, dict):
                    found.update(each[name])
                else:
                    setattr(whole, name, found or each[name])
        whole.lost = [name for name in whole.lost if name not in whole.filled]
        return whole

    def note_changes(
        self, before: Snapshot, after: Snapshot, later: Snapshot
    ) -> tuple[dict[str, tuple[str, str]], dict[str, tuple[str, str]]]:
        """Notes and returns what the first computation changed, such as a cache, and what the second changed again."""
        noted, counting = before.changed(after), after.changed(later)
        kinds = {**after.kinds, **later.kinds}
        self.keeps = bool(noted or counting)
        self.drew = [name for name in {**noted, **counting} if kinds.get(name) is Kind.GENERATOR]
        named = {**counting, **noted} if self.differ else counting
        ordered = sorted(named, key=lambda name: (name not in counting, kinds.get(name) is not Kind.NUMBER))
        self.changed = {
            name: (before.texts.get(name, "nothing"), later.texts.get(name, "nothing"))
            for name in ordered
            if name not in self.drew
        }
        return noted, counting

    def refuse(self) -> None:
        """Raises ``ConfigError`` for what makes the result depend on the number of processes."""
        self.require_nothing_lost()
        for name, why in self.foreign.items():
            raise ConfigError(
                f"{name} is called in the forward pass or the loss, is not part of the model that run.prepare was "
                f"given, and {why}. Put it into the model, or into the nn.ModuleDict that run.prepare is given; what "
                f"is not trained needs module.requires_grad_(False).eval(). {OFF}"
            )
        if self.written:
            raise ConfigError(
                f"The forward pass writes into the parameter {shorten(map(repr, self.written), _MOST)}, as clamp_, "
                "Embedding(max_norm=...) and an initialisation from the first batch do, or a hook of the backward pass "
                "steps an optimizer, so each micro-batch starts from other values than on another number of processes. "
                "Step, then clamp under torch.no_grad(), in the loop; initialise before run.prepare; make running "
                f"statistics buffers. {OFF}"
            )
        if self.drew:
            raise ConfigError(
                f"Random numbers were drawn from {shorten(self.drew, _MOST)}, which continues from one forward "
                "pass to the next, so what is drawn depends on the number of processes. Draw without generator=, from "
                f"torch, NumPy or random: these are seeded for each micro-batch. {OFF}"
            )
        if self.differ:
            self._refuse_other_bits()
        if self.disturbed:
            raise ConfigError(
                f"The gradient of {self.disturbed[0]!r} of one micro-batch has other bits if the forward pass of "
                "another comes before its backward pass, as under a pipeline. The forward pass, or a hook, keeps "
                "something for the backward pass: for a hook there, or for a part that torch.utils.checkpoint computes "
                "again. Give that part what it reads as an argument, keep what a hook reads in the graph (a hook on "
                "the tensor, made in each forward pass; ctx of an autograd.Function), or use strategy 'ddp' or "
                f"'fsdp'. {OFF}"
            )
        if self.added:
            raise ConfigError(
                f"The loop's body adds to {shorten(map(repr, self.added), _MOST)} in each pass. It runs once for each "
                "micro-batch of this process, and a few times more in the first two steps, so the sum depends on the "
                "number of processes. Under 'if accelerator.sync_gradients:', add accelerator.step_loss, which is the "
                "mean loss of the step over all processes, and count samples; compute an accuracy in an evaluation. "
                f"{OFF}"
            )

    def require_nothing_lost(self) -> None:
        """Raises ``ConfigError`` where the loss or the model reads what a stop has lost."""
        if self.lost:
            raise ConfigError(
                f"The loss or the model reads {shorten(self.lost, _MOST)}, which the loop changes or computes and no "
                "checkpoint holds: it is not what it was before the stop, so the bits would not continue. Set it "
                "before run.batches, from run.extra; or make it a part of the model, such as a buffer, and "
                f"begin anew without resume. {OFF}"
            )

    def _refuse_other_bits(self) -> None:
        what = "loss" if self.losses_differ else f"gradient of {self.gradients[0]!r}" if self.gradients else ""
        begin = f"The {what} of one micro-batch, computed twice under the same keys, has other bits the second time"
        if not what:
            begin = f"The buffer {self.buffers[0]!r} has other bits where one micro-batch is computed a second time"
        if self.changed:
            places = "of the loss", "the variable", "the global variable"
            is_outside = any(place in name for name in self.changed for place in places)
            once = "; or call the loss once for all samples of a step, with whole_batch=True" if is_outside else ""
            raise ConfigError(
                f"{begin}, since the forward pass or the loss keeps something from one call to the next. It changed "
                f"{told(self.changed, _MOST)}. The result would depend on the number of processes. Set it in the loop "
                f"before run.backward, from the number of the step{once}; or make it a buffer of the model that "
                f"running_buffers names, which is averaged. {OFF}"
            )
        raise ConfigError(
            f"{begin}, and nothing was found that changed in between: the model or the loss depends on something that "
            "Lockstep cannot see, such as a file, the clock, an iterator, memory that was not initialised, as that of "
            "torch.linalg.lstsq on a CPU without driver='gels' or 'gelsd', or a kernel without a fixed order. "
            f"{OFF}"
        )


def refuse_evaluation(changed: Mapping[str, tuple[str, str]] | None, buffers: Sequence[str]) -> None:
    """Raises ``ConfigError`` for a forward pass of an evaluation that keeps something, or changes buffers.

    Args:
        changed: what a call has changed where a second one gave another output; None where the output was the same.
        buffers: the names of the buffers that it has changed.
    """
    if changed is not None:
        raise ConfigError(
            "The output for one micro-batch of the evaluation, computed twice under the same keys, has other bits "
            "the second time, since the forward pass keeps something from one call to the next"
            + (f". It changed {told(changed, _MOST)}" if changed else ", such as a buffer or an iterator")
            + ". Micro-batches are evaluated by different processes, so the result would depend on their number. "
            "Begin with a fresh state in every call, with samples that hold whole sequences; or call the "
            f"model in a loop of your own over all the data, on every rank. {OFF}"
        )
    if buffers:
        raise ConfigError(
            f"The forward pass of an evaluation changes buffers ({shorten(map(repr, buffers), _MOST)}). Each process "
            "evaluates some of the samples, so they would depend on their number. Let layers use their running "
            "statistics there, as BatchNorm does in evaluation mode (training=self.training), or copies of the "
            f"buffers. {OFF}"
        )
