"""Pipeline parallel: stages of the model in different processes, micro-batches one behind the other.

        rank 0, stage 0   F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- | update of stage 0
        rank 1, stage 1   .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --       | update of stage 1

A rank holds the parameters, gradients and optimizer state of its stages only. Each stage adds the gradients of its
micro-batches in the tree, by the same hooks as ``single``. With a data axis, each stage is reduced over its replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lockstep.config.strategy_options import Level, PipelineOptions
from lockstep.core.plan import Share
from lockstep.core.summation_tree import fold_rows
from lockstep.data.batch import Batch, MicroBatch
from lockstep.distributed.collectives import all_gather_rows, all_reduce_max
from lockstep.distributed.process_group import Groups
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.reduce import Reducer
from lockstep.strategies.pipeline.channels import PipelineChannel
from lockstep.strategies.pipeline.partition import Partition
from lockstep.strategies.pipeline.schedule import Action, order_of
from lockstep.strategies.pipeline.stage import (
    Passes,
    PipelineChannels,
    Stage,
    another_group,
    refusing_backward,
)
from lockstep.strategies.pipeline.totals import Losses, StageState, Totals
from lockstep.strategies.sharding import explain_missing_parameters
from lockstep.strategies.strategy import Compute, StepResult, Strategy


def kind_of(value: Any) -> tuple[object, ...]:
    """Returns what determines the shapes inside a model: those of its input."""
    leaves, structure = tree_flatten(value)
    shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return str(structure), *shapes


class PlacedPipeline(nn.Module):
    """Runs all stages in order, for evaluation; holds the parameters of this rank's stages only.

    Every rank of the pipeline must call it with the same inputs, and gets the output. One micro-batch is in the
    pipeline at a time.

    Args:
        passes: this rank's stages by number.
        answers: channels for the output, by place in the pipeline.
        whole: a context in which the stages have whole parameters; where they are shared out, the ranks that share
            them must call the model together too.
    """

    def __init__(
        self,
        passes: dict[int, Passes],
        answers: dict[int, PipelineChannel],
        whole: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        for number, each in passes.items():
            self.add_module(f"stage{number}", each.stage)
        self._passes, self._answers, self._whole = passes, answers, whole

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the whole model, whose backward is refused. Collective over the ranks of the pipeline."""
        kind = (self.training, *kind_of((args, kwargs)))
        output = None
        with self._whole(), torch.no_grad():
            for each in self._passes.values():
                output = each.evaluate(kind, args, kwargs)
        channels = list(self._answers.values())
        if any(each.is_last for each in self._passes.values()):
            for channel in channels:
                channel.send(kind, output)
        else:
            description, tensors = channels[0].receive(kind)
            output = description.value(tensors)
        for each in self._passes.values():
            each.neighbours.flush()
        for channel in channels:
            channel.flush()
        return refusing_backward(output)


@dataclass(frozen=True)
class _Pass:
    """One action of the schedule, with what it is done on."""

    action: Action
    micro_batch: MicroBatch
    kind: tuple[object, ...]
    received: Callable[[], None]
    """To be called when the pass has its input."""


class Pipeline(Strategy):
    """Trains the stages of one model on the ranks of a pipeline, and replicas of the pipeline along a data axis.

    Args:
        device: this rank's device.
        micro_batches: K of the recipe.
        groups: of a mesh with an axis ``pipeline``, and maybe ``data``.
        reducers: one for each stage of this rank, over the data axis; none if that has one holder.
        options: schedule and cuts.
        running_buffers: name patterns of buffers, beside BatchNorm's, that the forward pass changes.
    """

    name = "pipeline"
    replicated = False
    axis = "data"
    """The axis of the mesh over which micro-batches are shared out."""

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        groups: Groups,
        reducers: Sequence[Reducer],
        options: PipelineOptions,
        running_buffers: Sequence[str] = (),
    ) -> None:
        self.device, self._micro_batches = device, micro_batches
        self.share = Share(holders=groups.size(self.axis), holder=groups.coordinate(self.axis))
        self.level = reducers[0].level if reducers else Level.BITWISE
        self._per_rank = options.stages_of_a_rank
        self._channels = PipelineChannels(groups, device, around=self._per_rank > 1)
        stages = self._channels.length * self._per_rank
        self.partition = Partition("pipeline", stages, options.split, options.balance == "time")
        self._groups, self._reducers, self._options = groups, reducers, options
        self._declared = running_buffers
        self._last_ranks = [
            rank
            for rank in range(groups.mesh.ranks)
            if groups.mesh.coordinate("pipeline", rank) == self._channels.length - 1
        ]

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Keeps this rank's stages of the model, on the device, and empties the others. Collective."""
        RunningBuffers.names(model, self._declared)  # a pattern must match somewhere, if not in every stage
        channels, parts = self._channels, self.partition.of(model)
        names = [part[-1].name for part in parts]
        mine = range(channels.place, len(parts), channels.length)
        modules = [[link.module for link in part] for part in parts]
        self._state = self._make_state(model, modules, mine)
        self._passes: dict[int, Passes] = {}
        self._totals: dict[int, Totals] = {}
        answers = channels.answers(names[-1])
        self._losses = Losses(
            *(self.share, self._micro_batches, self.device, list(answers.values())),
            is_last=channels.place == channels.length - 1,
        )
        for local, number in enumerate(mine):
            stage = Stage(parts[number]).to(self.device)
            self._passes[number] = Passes(stage, channels.neighbours(number, names), parts[number][0].name)
            self._totals[number] = self._make_totals(stage, local)
        self._state.keep([each.stage for each in self._passes.values()])
        self._trainable = {n: p for totals in self._totals.values() for n, p in totals.trainable.items()}
        return PlacedPipeline(self._passes, answers, self._whole_stages)

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this rank's part of the schedule and reduces. See ``Strategy.backward``."""
        mine, leaves = self.share.of(batch.plan.leaves), batch.plan.leaves
        order = order_of(
            self._options.schedule, self._channels.place, self._channels.length, self._per_rank, len(mine)
        )
        for number, totals in self._totals.items():
            totals.begin(mine, leaves)
            self._passes[number].forget()
        self._losses.begin(len(mine))
        kinds = [(True, *kind_of(each.data)) for each in batch.micro_batches]
        begun: set[int] = set()
        for action, following in zip(order, (*order[1:], None)):
            micro_batch, kind = batch.micro_batches[action.place], kinds[action.place]
            received = partial(self._expect, following, batch.micro_batches, kinds)
            if action.forward and action.place not in begun:
                begun.add(action.place)
                compute.begin(micro_batch)
            else:
                compute.resume(micro_batch, "forward" if action.forward else "backward")
            if action.forward:
                self._forward(_Pass(action, micro_batch, kind, received), compute, scale)
            else:
                self._passes[action.stage].run_back(micro_batch.k, kind, received)
                self._totals[action.stage].end_backward()
                if action.stage == min(self._passes):
                    for call in self.events.micro_batch_end:
                        call(micro_batch)
        return self._finish(leaves, stop)

    def gather(self, row: Tensor) -> Tensor:
        """The rows of the ranks with the last stage, shape (holders, n). Collective over the world."""
        return all_gather_rows(row, self._groups.world)[self._last_ranks]

    def release(self) -> None:
        """See ``Strategy.release``."""
        self._groups.release()
        self._channels.release()
        for reducer in self._reducers:
            reducer.release()

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """The parameters of this rank's stages that require a gradient."""
        return self._trainable

    def squares(self) -> Tensor:
        """See ``Strategy.squares``: each stage's, added to the others' zeros."""
        found = self._state.squares(self._trainable, self.device)
        dist.all_reduce(found, group=self._channels.group)
        return found

    def all_reduce_max(self, flags: Tensor) -> Tensor:
        """The largest of each entry over the stages. Collective."""
        return all_reduce_max(flags, self._channels.group)

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Strategy.state``: each tensor from the rank of its stage."""
        return self._state.state(self.device)

    def own_rows(self) -> Mapping[str, Tensor]:
        """The tensors of this rank's stages, from the first of their replicas."""
        return self._state.own_rows(self._groups.coordinate(self.axis))

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies the values into this rank's stages."""
        self._state.load(state)

    def gather_full(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.gather_full``: what the stage's rank holds, given to all."""
        return self._state.give(name, part, dtype, self.device)

    def local_shard(self, name: str, whole: Tensor) -> Tensor | None:
        """The tensor itself where the parameter's stage is, None elsewhere."""
        return whole if self._state.is_mine(name) else None

    @property
    def bytes_sent(self) -> int:
        """See ``Strategy.bytes_sent``: activations, their gradients, and those of parameters over the data axis."""
        return self._channels.bytes_sent + sum(reducer.bytes_sent for reducer in self._reducers)

    def _make_state(self, model: nn.Module, parts: Sequence[Sequence[nn.Module]], mine: range) -> StageState:
        return StageState(model, parts, mine, self._channels)

    def _make_totals(
        self, stage: Stage, local: int, held: Mapping[str, nn.Parameter] | None = None
    ) -> Totals:
        """The totals of this rank's stage number ``local``."""
        reducer = self._reducers[local] if self._reducers else None
        k, size = self._micro_batches, self._losses.size
        return Totals(stage, reducer, self.share, k, self._declared, self.device, size, held)

    @contextmanager
    def _whole_stages(self) -> Iterator[None]:
        """A context in which this rank's stages have whole parameters."""
        yield

    def _expect(
        self, action: Action | None, micro_batches: Sequence[MicroBatch], kinds: list[tuple[object, ...]]
    ) -> None:
        if action is not None:
            k = micro_batches[action.place].k
            self._passes[action.stage].expect(kinds[action.place], k, forward=action.forward)

    def _forward(self, turn: _Pass, compute: Compute, scale: float) -> None:
        place, k = turn.action.place, turn.micro_batch.k
        passes, totals = self._passes[turn.action.stage], self._totals[turn.action.stage]
        totals.begin_forward()
        output, target = passes.run(turn.micro_batch, turn.kind, compute, turn.received)
        totals.end_forward(k)
        if not passes.is_last:
            passes.pass_on(k, turn.kind, output)
            return
        with explain_missing_parameters(self.name):
            loss, weight = compute.loss(output, target, turn.micro_batch)
            self._losses.put(place, loss, weight)
        passes.end_in(k, loss if scale == 1.0 else loss * scale)
        self._losses.tell(place)

    def _finish(self, leaves: int, stop: int) -> StepResult:
        row = self._losses.told()
        for waits in self.events.exchange_begin:
            waits()
        rows, *_ = [totals.reduce(row) for totals in self._totals.values()]
        for ends in self.events.exchange_end:
            ends()
        losses, weight = self._losses.of_all(rows, leaves)
        parts = [part for totals in self._totals.values() for part in totals.finish(weight.float())]
        sums = torch.stack([losses.sum().float(), *(part.float() for part in parts)])
        flags = torch.stack([(~sums.isfinite().all()).long(), torch.tensor(stop, device=self.device)])
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._groups.world)
        for passes in self._passes.values():
            passes.neighbours.flush()
        self._losses.flush()
        return StepResult(fold_rows(losses) / weight, losses, flags[1], flags[0] == 0)


def open_pipeline(
    kind: type[Pipeline],
    options: PipelineOptions,
    groups: Groups,
    device: torch.device,
    micro_batches: int,
    running_buffers: Sequence[str],
    make_reducer: Callable[[dist.ProcessGroup], Reducer],
) -> Pipeline:
    """The strategy for a mesh with more than one rank along ``pipeline``, and maybe along ``kind.axis``. Collective."""
    holders = groups.along(kind.axis)
    reducers = []
    if holders is not None:
        # Stages finish in another order on every holder, so each has a group of its own.
        lines = [holders, *(another_group(groups, kind.axis) for _ in range(1, options.stages_of_a_rank))]
        reducers = [make_reducer(line) for line in lines]
    return kind(device, micro_batches, groups, reducers, options, running_buffers)
