"""Pipeline parallel with stages that are sharded by rows: a mesh ``fsdp=N,pipeline=S``.

                 between steps                           in a step
    rank 0       rows 0..n/2 of stage 0                  gather -> F0 F1 .. B0 -- B1 -- -> rows of the sums, free
    rank 1       rows 0..n/2 of stage 1                  gather -> .. F0 B0 -- F1 B1 -- -> rows of the sums, free
    rank 2       rows n/2..n of stage 0                  gather -> F2 F3 .. B2 -- B3 -- -> rows of the sums, free
    rank 3       rows n/2..n of stage 1                  gather -> .. F2 B2 -- F3 B3 -- -> rows of the sums, free

A stage is whole on each of its ranks from its first pass to its last. Parameters, gradients and optimizer state are
shared out by rows otherwise, and so is the update. Why FSDP2 is not underneath: docs/decisions/0015-sharded-stages.md.

``OrderedRowReducer`` sums gradients in the tree's order and leaves each rank its rows of every sum:

    [1] all_to_all: every rank sends, of each of its nodes, rows to the rank that holds them
    [2] each rank folds the nodes of its rows along the tree

[1] of a bucket is issued as soon as the bucket is complete, while backward still runs. The memory of the nodes is freed
after each step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from itertools import chain
from math import prod

import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep.core.summation_tree import fold_in_place
from lockstep.data.batch import Batch
from lockstep.distributed.collectives import all_gather_flat
from lockstep.distributed.rank_exchange import GroupExchange, RankExchange
from lockstep.errors import ConfigError
from lockstep.numerics.hooks import share_hooks
from lockstep.reduce import BucketShape, NodeLayout
from lockstep.reduce.ordered import OrderedBucket, OrderedReducer
from lockstep.strategies.absent import Absence
from lockstep.strategies.gradients import StepSums
from lockstep.strategies.optimizer_trial import Unit
from lockstep.strategies.pipeline import Pipeline
from lockstep.strategies.pipeline.stage import Stage
from lockstep.strategies.sharding import (
    GatheredBlock,
    GatheredParameter,
    gather_rows,
    require_rows,
    rows_of,
    squares_of_rows,
    watching_writes,
)
from lockstep.strategies.strategy import Compute, StepResult


class ShardedPipeline(Pipeline):
    """A pipeline whose stages are shared out by rows over the axis ``fsdp``; see ``Pipeline`` for the arguments.

    Its reducers are ``OrderedRowReducer``, one for each stage of this rank.
    """

    name = "hybrid"
    replaces_parameters = True
    largest_unit = Unit.ELEMENT
    axis = "fsdp"
    _blocks: Sequence[GatheredBlock] = ()

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Keeps this rank's rows of its stages. Collective."""
        require_rows(model, self.name)
        # Every holder evaluates equally often, since its ranks gather the parameters each time.
        self.evaluation_share = replace(self.share, rounds=True)
        self.model_group, self._line = self._groups.world, self._groups.line(self.axis)
        self._between_holders = GroupExchange(self._line)
        self._shared = {name for name, _ in nn.Module.named_parameters(model, remove_duplicate=False)}
        return super().setup_model(model)

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this rank's part of the schedule on whole stages. See ``Strategy.backward``."""
        with self._whole_stages():
            return super().backward(batch, compute, scale=scale, stop=stop)

    def watching_writes(self) -> AbstractContextManager[set[str]]:
        """See ``Strategy.watching_writes``."""
        return watching_writes(self._blocks)

    def watched(self) -> Mapping[str, Tensor]:
        """See ``Strategy.watched``: nothing, as no rank has whole parameters when the loop's code runs."""
        return {}

    @property
    def all_bytes_sent(self) -> int:
        """See ``Strategy.all_bytes_sent``: as of a pipeline, and the parameters that are gathered."""
        return super().all_bytes_sent + sum(block.bytes_sent for block in self._blocks)

    def release(self) -> None:
        """See ``Strategy.release``."""
        super().release()
        if hasattr(self, "_between_holders"):  # else the run was refused before the model was set up
            self._between_holders.release()

    def own_rows(self) -> Mapping[str, Tensor]:
        """This rank's rows of each parameter; buffers from the first of the ranks with a stage."""
        first = self._groups.coordinate(self.axis) == 0
        return {n: t.detach() for n, t in self._held.items() if first or (n in self._shared and t.numel())}

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

    def _make_sums(self, stage: Stage, local: int, held: Mapping[str, nn.Parameter] | None = None) -> StepSums:
        absence = Absence(self.name, "no process holds it whole")
        self.absences.append(absence)
        ranks, rank = self._between_holders.ranks, self._between_holders.rank
        parameters = []
        for name, parameter in stage.named_parameters():
            parameter.data = parameter.detach().clone()  # in memory of its own, which can be given back
            rows = [rows_of(parameter.shape[0], ranks, each) for each in range(ranks)]
            parameters.append(GatheredParameter(name, parameter, rows, rank, absence))
            share_hooks(parameter, parameters[-1].held)
        self._blocks = (*self._blocks, *_in_blocks(parameters, self._between_holders, self.device))
        sums = super()._make_sums(stage, local, {each.name: each.held for each in parameters})
        for each in parameters:
            each.free()
        reducer = self._reducers[local]
        assert isinstance(reducer, OrderedRowReducer)
        reducer.free_staging()
        return sums

    @contextmanager
    def _whole_stages(self) -> Iterator[None]:
        if self.model_group is None:
            raise ConfigError(
                "The model was called after run.close(), where under strategy 'hybrid' no process gathers the rows of "
                "its stages any more. Call it before that, or load what run.state_dict() gave into a model of its own."
            )
        try:
            for block in self._blocks:
                block.gather(keep=True)
            yield
        finally:
            for block in self._blocks:
                for each in block.parameters if block.is_whole else ():
                    each.whole.grad = None  # of a backward pass that has raised
                block.free()


_BUCKET_BYTES = 8 << 20
"""About so much is gathered at once."""


def _in_blocks(
    parameters: Iterable[GatheredParameter], exchange: RankExchange, device: torch.device
) -> list[GatheredBlock]:
    """The parameters of a stage in groups that are gathered at once: of one type, and up to a few MB."""
    found: list[list[GatheredParameter]] = []
    size = 0
    for each in parameters:
        nbytes = sum(each.counts) * each.held.element_size()
        size += nbytes
        if not found or size > _BUCKET_BYTES or found[-1][0].held.dtype != each.held.dtype:
            found.append([])
            size = nbytes
        found[-1].append(each)
    return [GatheredBlock(members, exchange, device) for members in found]


class OrderedRowReducer(OrderedReducer):
    """Gives each rank its rows of the sums; buckets that hold no gradients are summed for all."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        super().__init__(group, group, device)

    def begin(self, leaves: int) -> None:
        """See ``Reducer.begin``."""
        super().begin(leaves)
        for bucket in self._buckets:
            if isinstance(bucket, _RowBucket):
                bucket.take_memory()

    def start(self, bucket: int) -> None:
        """See ``Reducer.start``; nothing is folded before ``finish``."""
        self._send(bucket)

    def finish(self, header: Tensor) -> Tensor:
        """See ``Reducer.finish``."""
        for bucket in self._buckets[: self._started]:
            bucket.fold_and_gather(self._layout, self._group)
        all_gather_flat(self._headers.view(-1), header, self._group)
        for bucket in self._buckets[: self._started]:
            bucket.finish()
        return self._headers

    def free_staging(self) -> None:
        """Frees the memory of nodes, after all views of ``staging`` have been made and until the next step."""
        for bucket in self._buckets:
            if isinstance(bucket, _RowBucket):
                bucket.free_memory()

    def _make_bucket(self, shape: BucketShape, slots: int) -> OrderedBucket:
        if shape.members:
            return _RowBucket(shape, self._ranks, self._rank, slots, self._device)
        return super()._make_bucket(shape, slots)


class _RowBucket(OrderedBucket):
    """The gradients of some parameters: takes whole nodes of this rank's micro-batches, gives its rows of the sums."""

    def __init__(self, shape: BucketShape, ranks: int, rank: int, slots: int, device: torch.device) -> None:
        self._pieces = [list(_pieces(shape.members, ranks, each)) for each in range(ranks)]
        self._sizes = [sum(piece.stop - piece.start for piece in pieces) for pieces in self._pieces]
        self._nodes = torch.zeros(slots, shape.numel, dtype=shape.dtype, device=device)
        self._bytes = self._nodes.untyped_storage().nbytes()
        self._own = self._sizes[rank]
        self.total = torch.zeros(self._own, dtype=shape.dtype, device=device)
        """This rank's rows of the members' sums, one after the other."""
        self._sent = self._received = self.total
        self._work: dist.Work | None = None

    def renew(self) -> None:
        """See ``OrderedBucket.renew``."""
        self.total = self._sent = self._received = torch.zeros_like(self.total)

    def take_memory(self) -> None:
        """Makes room for a step's nodes, which views of ``staging`` then see."""
        self._nodes.untyped_storage().resize_(self._bytes)

    def staging(self, slot: int) -> Tensor:
        return self._nodes[slot]

    def bytes_sent(self, nodes: int) -> int:
        others: int = sum(self._sizes) - self._own
        return nodes * others * self.total.element_size()

    def send(self, layout: NodeLayout, rank: int, group: dist.ProcessGroup) -> None:
        counts = [len(nodes) for nodes in layout.ranks]
        nodes = self._nodes[: counts[rank]]
        parts = [node[piece] for pieces in self._pieces for node in nodes for piece in pieces]
        self._sent = torch.cat(parts) if parts else self.total.new_empty(0)
        self._received = self.total.new_empty(sum(counts) * self._own)
        self._work = dist.all_to_all_single(
            self._received,
            self._sent,
            output_split_sizes=[count * self._own for count in counts],
            input_split_sizes=[counts[rank] * size for size in self._sizes],
            group=group,
            async_op=True,
        )

    def fold_and_gather(self, layout: NodeLayout, group: dist.ProcessGroup) -> None:
        """Waits for [1] and does [2]; there is nothing to gather."""
        assert self._work is not None
        self._work.wait()
        nodes = list(chain.from_iterable(layout.ranks))
        parts = self._received.view(len(nodes), self._own)
        self.total.copy_(fold_in_place(nodes, parts, layout.leaves))

    def finish(self) -> None:
        """Frees the memory of nodes and messages."""
        self._sent = self._received = self.total
        self._work = None
        self.free_memory()

    def free_memory(self) -> None:
        """Frees the memory behind the views of ``staging``, until ``take_memory``."""
        self._nodes.untyped_storage().resize_(0)


def _pieces(members: tuple[tuple[int, ...], ...], ranks: int, rank: int) -> Iterator[slice]:
    """The slices of a rank's rows in the flat members, one after the other."""
    offset = 0
    for shape in members:
        rows, width = rows_of(shape[0], ranks, rank), prod(shape[1:])
        yield slice(offset + rows.start * width, offset + rows.stop * width)
        offset += prod(shape)
