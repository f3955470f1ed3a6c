"""All that a checkpoint of a run covers: given as a whole state, and taken up again on any number of processes."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch.optim import Optimizer

from lockstep import checkpoint
from lockstep.checkpoint import CheckpointState
from lockstep.data.decoding import jpeg_decoder
from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError
from lockstep.fingerprint import Context
from lockstep.precision import Precision
from lockstep.run.parts import Parts
from lockstep.run.placing import Placed
from lockstep.run.position import Position
from lockstep.run.whole_state import Record, SharedOptimizer, require_elements, share_out
from lockstep.strategies import Strategy
from lockstep.strategies.elementwise import is_elementwise

logger = logging.getLogger(__name__)


@dataclass
class Saved:
    """All that a checkpoint of a run covers."""

    parts: Parts
    placed: Placed
    strategy: Strategy
    group: dist.ProcessGroup | None
    precision: Precision
    position: Position
    context: Context
    run_id: str = ""
    """Of the run, over all its restarts."""
    extra: dict[str, Any] = field(default_factory=dict)
    """What the user, or the trainer, stores beside it; must survive JSON."""
    resumed_context: dict[str, Any] = field(default_factory=dict)
    """What the bits depended on where the checkpoint was written."""

    def reads_photos(self, decoded: str) -> None:
        """Adds to the context what photos are decoded to; empty: the data set decodes none.

        Raises:
            CheckpointMismatch: they were decoded to other pixels where the checkpoint was written.
        """
        if not decoded or decoded == self.context.photos:
            return
        if self.strategy.share.holder == 0:
            logger.info("Photos are decoded by %s.", jpeg_decoder())
        self.context = replace(self.context, photos=decoded)
        before = self.resumed_context.get("photos") or decoded
        if before != decoded:
            raise CheckpointMismatch(
                f"The checkpoint was trained on photos that were decoded to other pixels ({before} there, {decoded} "
                "here), so Pillow has another JPEG library. Install the Pillow of that run, or go on at level B with "
                "force_context=True (--force-context)."
            )

    def capture(self, fingerprint: str, *, keep: bool) -> CheckpointState:
        """The whole state as it stands; shares memory with the run where the strategy has replicas. Collective.

        Args:
            fingerprint: of the model as it stands.
            keep: whether this process needs it; without, it only helps others to gather theirs.
        """
        state = self._without_tensors(fingerprint)
        state.model.update(self._without_aliases(self.model_state(keep=keep)))
        for number, optimizer in enumerate(self.parts.optimizers):
            if self.strategy.replicated:
                tensors, record = checkpoint.optimizer_state(optimizer, self._names())
            else:
                shared = self._shared_state(number, optimizer)
                tensors, record = shared.gathered(self.strategy, keep=keep), shared.record
            _add_optimizer(state, number, tensors, record)
        self._add_modules(state)
        return state

    def capture_rows(self, fingerprint: str, rows: Mapping[str, Tensor], *, first: bool) -> CheckpointState:
        """What this process writes of a checkpoint that all write; shares memory with the run. Collective.

        Args:
            fingerprint: of the model as it stands.
            rows: from ``Strategy.own_rows``.
            first: whether this process writes what no other holds a part of, such as step counters.
        """
        state = self._without_tensors(fingerprint)
        state.model.update(self._without_aliases(rows))
        for number, optimizer in enumerate(self.parts.optimizers):
            shared = self._shared_state(number, optimizer)
            tensors = shared.own(rows) | (shared.others if first else {})
            _add_optimizer(state, number, tensors, shared.record)
        if first:
            self._add_modules(state)
        return state

    def model_state(self, *, keep: bool) -> dict[str, Tensor]:
        """Whole parameters and buffers, tied ones under each name; none without ``keep``. Collective."""
        found = {}
        for name, tensor in self.strategy.state():
            if keep:
                found[name] = tensor if self.strategy.replicated else tensor.detach().to("cpu", copy=True)
        return found

    def restore(self, state: CheckpointState, force_context: bool) -> str:
        """Takes up a state; returns the fingerprint it was written with. Collective.

        Raises:
            CheckpointMismatch: it is of another model, recipe or software.
        """
        written = state.progress
        differences = self.context.differences(written["context"])
        if differences and not force_context:
            raise CheckpointMismatch(
                "The checkpoint was written under other conditions, so the bits would not continue:\n  "
                + "\n  ".join(differences)
                + "\nRestore these, or go on at level B with force_context=True (--force-context)."
            )
        self.resumed_context = {} if force_context else written["context"]
        self._require_equal_counts(state)
        checkpoint.require_same_model(state.model, state.aliases, self.placed.tensors, self.placed.aliases)
        self.strategy.load_state(
            {**state.model, **{a: state.model[name] for a, name in state.aliases.items()}}
        )
        for number, optimizer in enumerate(self.parts.optimizers):
            self._load_optimizer(number, optimizer, state)
        for number, module in enumerate(self.parts.modules):
            own = _under(f"module{number}|", state.optimizer)
            checkpoint.load_model_state(module, own, checkpoint.model_state(module)[1])
        if self.precision.scaler is not None and written["scaler"]:
            self.precision.scaler.load_state_dict(written["scaler"])
        for scheduler, stored in zip(self.parts.schedulers, written["schedulers"]):
            scheduler.load_state_dict(_like(scheduler.state_dict(), stored))
        self.position.take_up(written["position"])
        self.extra = dict(written["extra"])
        return str(written["fingerprint"])

    def _without_tensors(self, fingerprint: str) -> CheckpointState:
        scaler = self.precision.scaler
        progress = {
            "position": self.position.as_dict(),
            "fingerprint": fingerprint,
            "context": self.context.as_dict(),
            "scaler": scaler.state_dict() if scaler is not None else {},
            "schedulers": [_plain(each.state_dict()) for each in self.parts.schedulers],
            "modules": len(self.parts.modules),
            "extra": self.extra,
            "run": self.run_id,
        }
        return CheckpointState({}, {}, progress, self.placed.aliases)

    def _without_aliases(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: tensor for name, tensor in tensors.items() if name not in self.placed.aliases}

    def _shared_state(self, number: int, optimizer: Optimizer) -> SharedOptimizer:
        members = self.placed.members[number]
        return SharedOptimizer.of(optimizer, self._names(), members, self.strategy, self.group)

    def _add_modules(self, state: CheckpointState) -> None:
        for number, module in enumerate(self.parts.modules):
            tensors, _ = checkpoint.model_state(module)
            if not self.strategy.replicated:
                tensors = {name: tensor.clone() for name, tensor in tensors.items()}
            state.optimizer.update({f"module{number}|{name}": tensor for name, tensor in tensors.items()})

    def _load_optimizer(self, number: int, optimizer: Optimizer, state: CheckpointState) -> None:
        tensors, record = _under(f"{number}|", state.optimizer), state.optimizer_records[str(number)]
        if not isinstance(record, dict):
            raise CheckpointError("The checkpoint's optimizer record is not one. Use another checkpoint.")
        members = None
        shapes = {name: tensor.shape for name, tensor in state.model.items()}
        if is_elementwise(optimizer):
            require_elements(tensors, shapes)
        if not self.strategy.replicated:
            members = self.placed.members[number]
            tensors = share_out(tensors, shapes, self.strategy)
        checkpoint.load_optimizer_state(optimizer, self._names(), tensors, record, members)

    def _names(self) -> dict[Tensor, str]:
        if self.strategy.replicated:
            return checkpoint.parameter_names(self.parts.model)
        return {parameter: name for name, parameter in self.strategy.trainable().items()}

    def require_accumulable(self, pending: bool) -> None:
        """Raises ``ConfigError`` where a backward pass could not use the loss scale rightly."""
        if self.precision.scaler is None:
            return
        if not self.parts.optimizers:
            raise ConfigError(
                "precision fp16 needs the optimizer: model, optimizer = run.prepare(model, optimizer)."
            )
        if pending:
            raise ConfigError(
                "With precision fp16 a second run.backward before optimizer.step() would add gradients of two loss "
                "scales. To accumulate, give lockstep.init a larger global_batch and more micro_batches; to add "
                "losses, add them in one loss function; or use bf16 or fp32."
            )

    def _require_equal_counts(self, state: CheckpointState) -> None:
        written = state.progress
        for kind, stored, here in (
            ("optimizers", len(state.optimizer_records), len(self.parts.optimizers)),
            ("schedulers", len(written["schedulers"]), len(self.parts.schedulers)),
            ("further modules", written["modules"], len(self.parts.modules)),
        ):
            if stored != here:
                raise CheckpointMismatch(
                    f"The checkpoint holds {stored} {kind}, and run.prepare was given {here}. Give the same ones."
                )


def _add_optimizer(
    state: CheckpointState, number: int, tensors: Mapping[str, Tensor], record: Record
) -> None:
    state.optimizer_records[str(number)] = record
    state.optimizer.update({f"{number}|{key}": tensor for key, tensor in tensors.items()})


def _under(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors whose names begin with ``prefix``, without it."""
    return {key.removeprefix(prefix): tensor for key, tensor in tensors.items() if key.startswith(prefix)}


def _plain(state: Any) -> Any:
    """A scheduler's state, and those inside of it, without functions, which the user's code makes again."""
    if isinstance(state, Counter):
        return {str(name): count for name, count in state.items()}
    if isinstance(state, list):
        return [_plain(each) for each in state]
    if not isinstance(state, dict):
        return state
    kept = {key: value for key, value in state.items() if not callable(value) and key != "lr_lambdas"}
    return {key: _plain(value) for key, value in kept.items()}


def _like(own: Any, stored: Any) -> Any:
    """The stored state in the types of the scheduler's own."""
    if isinstance(own, Counter):
        return Counter({int(name): count for name, count in stored.items()})
    if isinstance(own, list) and isinstance(stored, list) and len(own) == len(stored):
        return [_like(mine, theirs) for mine, theirs in zip(own, stored)]
    if isinstance(own, dict) and isinstance(stored, dict):
        return {**own, **{key: _like(own.get(key), value) for key, value in stored.items()}}
    return stored
