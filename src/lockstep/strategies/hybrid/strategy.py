"""Pipeline parallel with sharded stages: a mesh ``fsdp=N,pipeline=S``.

                 between steps                           in a step
    rank 0       rows 0..n/2 of stage 0                  gather -> F0 F1 .. B0 -- B1 -- -> rows of the sums, free
    rank 1       rows 0..n/2 of stage 1                  gather -> .. F0 B0 -- F1 B1 -- -> rows of the sums, free
    rank 2       rows n/2..n of stage 0                  gather -> F2 F3 .. B2 -- B3 -- -> rows of the sums, free
    rank 3       rows n/2..n of stage 1                  gather -> .. F2 B2 -- F3 B3 -- -> rows of the sums, free

A stage is whole on each of its ranks from its first pass to its last. Parameters, gradients and optimizer state are
shared out by rows otherwise, and so is the update. Why FSDP2 is not underneath: docs/decisions/0015-sharded-stages.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.batch import Batch
from lockstep.distributed.collectives import all_reduce_max, drop_process_groups
from lockstep.strategies.hybrid.sharded_stages import OrderedRowReducer, ShardedStageState, StageRows
from lockstep.strategies.pipeline import Pipeline
from lockstep.strategies.pipeline.stage import Stage
from lockstep.strategies.pipeline.totals import StageState, Totals
from lockstep.strategies.sharding import require_rows
from lockstep.strategies.strategy import Compute, StepResult


class ShardedPipeline(Pipeline):
    """A pipeline whose stages are shared out by rows over the axis ``fsdp``; see ``Pipeline`` for the arguments.

    Its reducers are ``OrderedRowReducer``, one for each stage of this rank.
    """

    name = "hybrid"
    elementwise_only = True
    axis = "fsdp"
    _rows: Sequence[StageRows] = ()

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Keeps this rank's rows of its stages. Collective."""
        require_rows(model, self.name)
        # Every holder evaluates equally often, since its ranks gather the parameters each time.
        self.evaluation_share = replace(self.share, rounds=True)
        placed = super().setup_model(model)
        held = {name: p for rows in self._rows for name, p in rows.held.items()}
        self._trainable = {name: held[name] for name in self._trainable}
        return placed

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this rank's part of the schedule on whole stages. See ``Strategy.backward``."""
        with self._whole_stages():
            return super().backward(batch, compute, scale=scale, stop=stop)

    def release(self) -> None:
        """See ``Strategy.release``."""
        super().release()
        drop_process_groups(self._sharded, *self._rows)

    def all_reduce_max(self, flags: Tensor) -> Tensor:
        """The largest of each entry over all ranks. Collective."""
        assert self._groups.world is not None
        return all_reduce_max(flags, self._groups.world)

    def local_shard(self, name: str, whole: Tensor) -> Tensor | None:
        """This rank's rows where the parameter's stage is, None elsewhere."""
        return self._sharded.local_shard(name, whole) if self._sharded.is_mine(name) else None

    def _make_state(self, model: nn.Module, parts: Sequence[Sequence[nn.Module]], mine: range) -> StageState:
        self._sharded = ShardedStageState(model, parts, mine, self._channels, self._line)
        return self._sharded

    def _make_totals(
        self, stage: Stage, local: int, held: Mapping[str, nn.Parameter] | None = None
    ) -> Totals:
        rows = StageRows(stage, self._line)
        self._rows = (*self._rows, rows)
        totals = super()._make_totals(stage, local, rows.held)
        rows.free()
        reducer = self._reducers[local]
        assert isinstance(reducer, OrderedRowReducer)
        reducer.free_staging()
        return totals

    @contextmanager
    def _whole_stages(self) -> Iterator[None]:
        try:
            for rows in self._rows:
                rows.gather()
            yield
        finally:
            for rows in self._rows:
                rows.free()

    @property
    def _line(self) -> dist.ProcessGroup:
        line = self._groups.along(self.axis)
        assert line is not None, "one rank shares nothing out"
        return line
