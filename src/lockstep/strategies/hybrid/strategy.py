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
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.collectives import let_go_of_groups
from lockstep.data.batch import Batch
from lockstep.plan import Share
from lockstep.strategies.contract import Compute, StepResult
from lockstep.strategies.elementwise import require_elementwise
from lockstep.strategies.hybrid.holding import ShardedHolding
from lockstep.strategies.hybrid.reduce_scatter import OrderedRowReducer
from lockstep.strategies.hybrid.stage_rows import StageRows
from lockstep.strategies.pipeline import Pipeline
from lockstep.strategies.pipeline.holding import Holding
from lockstep.strategies.pipeline.stage import Stage
from lockstep.strategies.pipeline.totals import Totals
from lockstep.strategies.rows import require_rows


class ShardedPipeline(Pipeline):
    """A pipeline whose stages are shared out by rows over the axis ``fsdp``; see ``Pipeline`` for the arguments.

    Its reducers are ``OrderedRowReducer``, one for each stage of this rank.
    """

    name = "hybrid"
    axis = "fsdp"
    _rows: Sequence[StageRows] = ()

    def place(self, model: nn.Module) -> nn.Module:
        """Keeps this rank's rows of its stages. Collective."""
        require_rows(model, self.name)
        placed = super().place(model)
        held = {name: p for rows in self._rows for name, p in rows.held.items()}
        self._trainable = {name: held[name] for name in self._trainable}
        return placed

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this rank's part of the schedule on whole stages. See ``Strategy.backward``."""
        with self._whole_stages():
            return super().backward(batch, compute, scale=scale, stop=stop)

    @property
    def evaluation_share(self) -> Share:
        """Every holder evaluates equally often, since its ranks gather the parameters each time."""
        return replace(self.share, rounds=True)

    def release(self) -> None:
        """See ``Strategy.release``."""
        super().release()
        let_go_of_groups(self._sharded, *self._rows)

    def check_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Refuses optimizers whose update of an element depends on others: they would see this rank's rows only."""
        require_elementwise(optimizer, self.name)

    def any_rank(self, flags: Tensor) -> Tensor:
        """The largest of each entry over all ranks. Collective."""
        largest = flags.clone()
        dist.all_reduce(largest, dist.ReduceOp.MAX, group=self._groups.world)
        return largest

    def part(self, name: str, whole: Tensor) -> Tensor | None:
        """This rank's rows where the parameter's stage is, None elsewhere."""
        return self._sharded.part(name, whole) if self._sharded.is_mine(name) else None

    def _make_holding(self, model: nn.Module, parts: Sequence[Sequence[nn.Module]], mine: range) -> Holding:
        self._sharded = ShardedHolding(model, parts, mine, self._wiring, self._line)
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
        reducer.rest()
        return totals

    def _whole_stages(self) -> AbstractContextManager[None]:
        return _gathered(self._rows)

    @property
    def _line(self) -> dist.ProcessGroup:
        line = self._groups.along(self.axis)
        assert line is not None, "one rank shares nothing out"
        return line


@contextmanager
def _gathered(stages: Sequence[StageRows]) -> Iterator[None]:
    try:
        for rows in stages:
            rows.gather()
        yield
    finally:
        for rows in stages:
            rows.free()
