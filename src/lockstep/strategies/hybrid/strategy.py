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

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.data.batch import Batch
from lockstep.distributed.collectives import all_reduce_max, drop_process_groups
from lockstep.strategies.gradients import StepSums
from lockstep.strategies.hybrid.sharded_stages import OrderedRowReducer, StageRows
from lockstep.strategies.pipeline import Pipeline
from lockstep.strategies.pipeline.stage import Stage
from lockstep.strategies.sharding import gather_rows, require_rows, rows_of, squares_of_rows
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
        self._shared = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        return super().setup_model(model)

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this rank's part of the schedule on whole stages. See ``Strategy.backward``."""
        with self._whole_stages():
            return super().backward(batch, compute, scale=scale, stop=stop)

    def release(self) -> None:
        """See ``Strategy.release``."""
        super().release()
        drop_process_groups(*self._rows)

    def all_reduce_max(self, flags: Tensor) -> Tensor:
        """The largest of each entry over all ranks. Collective."""
        assert self._groups.world is not None
        return all_reduce_max(flags, self._groups.world)

    def own_rows(self) -> Mapping[str, Tensor]:
        """This rank's rows of each parameter; buffers from the first of the ranks with a stage."""
        first = self._groups.coordinate(self.axis) == 0
        return {n: t for n, t in self._held.items() if first or (n in self._shared and t.numel())}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies what is held here from whole tensors."""
        super().load_state({name: self._rows_of(name, state[name]) for name in self._held})

    def gather_full(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.gather_full``; the rows of a stage's ranks are put together first."""
        if self._is_mine(name) and name in self._shared and part is not None:
            part = gather_rows(part.detach().to(self.device), self._specs[name].shape, self._line)
        return super().gather_full(name, part, dtype)

    def local_shard(self, name: str, whole: Tensor) -> Tensor | None:
        """This rank's rows where the parameter's stage is, None elsewhere."""
        return self._rows_of(name, whole) if self._is_mine(name) else None

    def _rows_of(self, name: str, whole: Tensor) -> Tensor:
        """This rank's rows of a tensor that belongs to a parameter; a buffer as it is."""
        if name not in self._shared:
            return whole
        return whole[rows_of(whole.shape[0], dist.get_world_size(self._line), dist.get_rank(self._line))]

    def _own_squares(self) -> dict[str, Tensor]:
        gradients = [parameter.grad for parameter in self._trainable.values()]
        rows = [self._specs[name].shape[0] for name in self._trainable]
        return dict(zip(self._trainable, squares_of_rows(gradients, rows, self.device, self._line)))

    def _make_sums(
        self, stage: Stage, local: int, held: Mapping[str, nn.Parameter] | None = None
    ) -> StepSums:
        rows = StageRows(stage, self._line)
        self._rows = (*self._rows, rows)
        sums = super()._make_sums(stage, local, rows.held)
        rows.free()
        reducer = self._reducers[local]
        assert isinstance(reducer, OrderedRowReducer)
        reducer.free_staging()
        return sums

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
