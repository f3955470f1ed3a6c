"""One stage of a pipeline: the modules between two cuts, their forward and backward passes, and their channels.

Activations run from stage to stage, and gradients run back. The model's output refuses ``backward``, since its graph
lies in several processes.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lockstep.core.world import usable_cores
from lockstep.data.batch import MicroBatch
from lockstep.distributed.collectives import drop_process_groups
from lockstep.distributed.process_group import Groups, connect_pair, open_group
from lockstep.distributed.shared_memory import can_share_memory, share_memory
from lockstep.errors import ConfigError
from lockstep.runtime.devices import is_gpu
from lockstep.strategies.absent import AbsentTensor
from lockstep.strategies.pipeline.chain import ChainLink
from lockstep.strategies.pipeline.channels import PipelineChannel, tensors_of
from lockstep.strategies.pipeline.links import LINK_BYTES, GroupLink, SharedMemoryLink
from lockstep.strategies.pipeline.loss_reads import LossReads, StagesRead
from lockstep.strategies.strategy import Compute


def refusing_backward(output: Any, inputs: Any = (), parameters: Iterable[Tensor] = ()) -> Any:
    """The same values; a gradient of any of its tensors raises ``ConfigError``, where one device would have some.

    Args:
        output: of the whole model.
        inputs: of which it was computed, in tuples, lists and dicts.
        parameters: of the model.
    """
    sources = [each for each in (*tensors_of(inputs), *parameters) if each.requires_grad]
    if not torch.is_grad_enabled() or not sources:
        return output
    here = [each for each in sources if not isinstance(each, AbsentTensor)]
    anchors = [torch.empty(0, requires_grad=True), *here]

    def attach(tensor: Tensor) -> Any:
        return _Refusing.apply(tensor, *anchors)  # type: ignore[no-untyped-call]  # torch's stub

    return tree_map_only(Tensor, attach, output)


class _Refusing(torch.autograd.Function):
    """Stands where the graph of the whole model would be."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, *anchors: Tensor) -> Tensor:
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise ConfigError(
            "backward() or torch.autograd.grad was called on the output of a model whose stages run in several "
            "processes, so no process has its graph. Call run.backward(batch, loss_fn), which runs forward and "
            "backward through all stages, or use strategy 'ddp'."
        )


class Stage(nn.Module):
    """Some links of the chain of a model; its parameters and buffers have the names of that model."""

    def __init__(self, links: Sequence[ChainLink], model: nn.Module) -> None:
        super().__init__()
        self._links = [link.module for link in links]  # a plain list: their names come from the tree below
        # A parameter that several modules share is named after the first in the model, not after the first that runs.
        place = {module: number for number, module in enumerate(model.modules())}
        for link in sorted(links, key=lambda link: place.get(link.module, len(place))):
            _put(self, link.name.split("."), link.module)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the links one after the other."""
        value = self._links[0](*args, **kwargs)
        for module in self._links[1:]:
            value = module(value)
        return value


def _put(tree: nn.Module, path: list[str], module: nn.Module) -> None:
    """Registers a module under its path in the whole model, with empty modules on the way."""
    for name in path[:-1]:
        if name not in tree._modules:
            tree._modules[name] = nn.Module()
        inner = tree._modules[name]
        assert inner is not None
        tree = inner
    tree._modules[path[-1]] = module


@dataclass
class Neighbours:
    """The channels of one stage; None at the ends of the pipeline."""

    activations_in: PipelineChannel | None = None
    gradients_out: PipelineChannel | None = None
    activations_out: PipelineChannel | None = None
    gradients_in: PipelineChannel | None = None

    def flush(self) -> None:
        """Waits until all that this stage sent has arrived."""
        for channel in (self.activations_out, self.gradients_out):
            if channel is not None:
                channel.flush()


class Passes:
    """The forward and backward passes of a step's micro-batches through one stage.

    Args:
        name: of the module that it begins with.
        others: the modules of other processes' stages, by name, which cannot read what this one sets.
    """

    def __init__(self, stage: Stage, neighbours: Neighbours, name: str, others: Mapping[str, nn.Module]) -> None:
        self.stage, self.neighbours, self.name, self.others = stage, neighbours, name, others
        self.readers: Sequence[Callable[..., Any]] = ()
        """The functions that are given the model's outputs in an evaluation."""
        self._evaluated: set[Hashable] = set()
        self._roots: dict[int, list[Tensor]] = {}
        self._inlets: dict[int, _Inlet] = {}
        self._overlapping: list[tuple[Tensor, int]] = []
        self._anchor: Tensor | None = None
        self._others: tuple[tuple[Any, ...], dict[str, Any]] = (), {}

    @property
    def is_last(self) -> bool:
        """True if the loss is computed here."""
        return self.neighbours.activations_out is None

    def run(
        self, micro_batch: MicroBatch, kind: Hashable, compute: Compute, received: Callable[[], None]
    ) -> tuple[Any, Any]:
        """The forward pass of a micro-batch; gives the stage's output, and in the last stage the target.

        Args:
            compute: gives the model's input and the target.
            received: called when the input is there, before the stage computes.
        """
        source, target = self.neighbours.activations_in, None
        args: tuple[Any, ...] = ()
        kwargs: dict[str, Any] = {}
        if source is None or self.is_last:
            args, kwargs, target = compute.inputs(micro_batch)
        if source is not None:
            args, kwargs = (self._received(source, micro_batch.k, kind),), {}
        received()
        self._others = tree_map_only(Tensor, _other_values, (args, kwargs)) if compute.disturbs else ((), {})
        with compute.autocast():
            output = self.stage(*args, **kwargs)
        self._require_unwritten()
        return output, target

    def disturb(self, micro_batch: MicroBatch, compute: Compute) -> None:
        """Runs a forward pass on other values, as that of another micro-batch comes before a backward pass."""
        resume = compute.pause(micro_batch)
        compute.begin(replace(micro_batch, k=micro_batch.k + 1))
        args, kwargs = self._others
        with suppress(Exception), compute.autocast():  # the values may be none that the stage can be given
            self.stage(*args, **kwargs)
        resume()

    def pass_on(self, k: int, kind: Hashable, output: Any) -> None:
        """Sends the output of a stage that is not the last."""
        channel = self.neighbours.activations_out
        assert channel is not None
        channel.send(kind, output)
        self._roots[k] = [tensor for tensor in tensors_of(output) if tensor.requires_grad]

    def end_in(self, k: int, loss: Tensor) -> None:
        """Sets the loss from which the backward pass of a micro-batch starts in the last stage."""
        self._roots[k] = [loss]

    def run_back(self, k: int, kind: Hashable, received: Callable[[], None]) -> None:
        """The backward pass of a micro-batch, which adds to the parameters' gradients; see ``run``."""
        roots, source = self._roots.pop(k), self.neighbours.gradients_in
        gradients: list[Tensor] | None = None
        if source is not None and roots:
            description, gradients = source.receive(kind)
            if len(gradients) != len(roots):  # the stages that follow detach, or do not use, some of them
                everyone = description.value(gradients)
                roots = [root for root, gradient in zip(roots, everyone) if gradient is not None]
        received()
        if gradients and roots:
            roots = [_Entry.apply(gradients, *roots)]  # type: ignore[no-untyped-call]  # torch's stub
        if roots:
            torch.autograd.backward(roots)
        inlet = self._inlets.pop(k, None)
        if inlet is not None and self.neighbours.gradients_out is not None:
            self.neighbours.gradients_out.send(kind, inlet.take())

    def evaluate(self, kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pass outside of training, of the model's inputs or of what the stage before sends."""
        if self.neighbours.activations_in is not None:
            args, kwargs = (self._received(self.neighbours.activations_in, 0, kind),), {}
        watched = kind, *(getattr(each, "__code__", type(each)) for each in self.readers)
        reads: list[StagesRead | LossReads] = []
        if watched not in self._evaluated:
            of_outputs = () if self.is_last else self.readers
            reads = [StagesRead(self.others), *(LossReads(each, "metric, or keep=,") for each in of_outputs)]
        self._evaluated.add(watched)
        output = self.stage(*args, **kwargs)
        self._require_unwritten()
        for each in reads:
            each.require_unchanged(self.name)
        if self.neighbours.activations_out is not None:
            self.neighbours.activations_out.send(kind, output)
        return output

    def expect(self, kind: Hashable, k: int, *, forward: bool) -> None:
        """Makes room for what the next pass will receive."""
        if forward and self.neighbours.activations_in is not None:
            self.neighbours.activations_in.expect(kind)
        if not forward and self.neighbours.gradients_in is not None and self._roots.get(k):
            self.neighbours.gradients_in.expect(kind)

    def forget(self) -> None:
        """Drops micro-batches whose backward pass an error has prevented."""
        self._roots.clear()
        self._inlets.clear()

    def _received(self, source: PipelineChannel, k: int, kind: Hashable) -> Any:
        description, tensors = source.receive(kind)
        trained = [number for number, spec in enumerate(description.specs) if spec.needs_gradient]
        if trained and torch.is_grad_enabled():
            if self._anchor is None:
                self._anchor = torch.zeros((), device=tensors[0].device, requires_grad=True)
            inlet = self._inlets[k] = _Inlet([tensors[number] for number in trained])
            attached = _Attach.apply(self._anchor, inlet)  # type: ignore[no-untyped-call]  # torch's stub
            for number, tensor in zip(trained, attached):
                tensors[number] = tensor
        self._overlapping = [(tensors[place], tensors[place]._version) for place in description.overlapping]
        return description.value(tensors)

    def _require_unwritten(self) -> None:
        """Raises ``ConfigError`` where the stage wrote into one of several views, which are copies here."""
        written = any(tensor._version != version for tensor, version in self._overlapping)
        self._overlapping = []
        if written:
            raise ConfigError(
                f"The stage that begins with {self.name!r} changes a tensor in place that it is given together with a "
                "view of it, and between processes the two are copies, so the other one would stay as it was. Change a "
                "copy, give one of the two and take the view of it there, or cut the model elsewhere with "
                "pipeline.split."
            )


def _other_values(tensor: Tensor) -> Tensor:
    """Values of the same kind: those of a tensor in the opposite order, smaller ones where they are not whole."""
    turned = tensor.detach().flip(tuple(range(tensor.dim())))
    turned = turned * 0.5 if turned.is_floating_point() or turned.is_complex() else turned
    return turned.requires_grad_(tensor.requires_grad)


class _Inlet:
    """The entry of another process's activations into the graph, and the exit of their gradients."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.gradients: tuple[Tensor | None, ...] = (None,) * len(tensors)

    def take(self) -> Any:
        """The gradients, each a tensor of its own; None for what was detached or not used."""
        found = [None if gradient is None else gradient.detach() for gradient in self.gradients]
        return found[0] if len(found) == 1 and found[0] is not None else found


class _Attach(torch.autograd.Function):
    """Gives received tensors a place in the graph that is not a leaf: the next module may change them in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inlet: _Inlet) -> tuple[Tensor, ...]:
        ctx.inlet = inlet
        ctx.set_materialize_grads(False)
        tensors, inlet.tensors = tuple(inlet.tensors), []
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        ctx.inlet.gradients = gradients
        return None, None


class _Entry(torch.autograd.Function):
    """The entry of another process's gradients into the backward pass, as those of one scalar.

    ``torch.autograd.backward`` with gradients given by hand imports sympy: 40 MB and half a second in every process.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *roots: Tensor) -> Tensor:
        ctx.gradients = gradients
        return torch.zeros((), device=roots[0].device)  # real, also where they are complex

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        gradients, ctx.gradients = ctx.gradients, None
        return (None, *gradients)


_ON, _BACK, _ANSWER = range(3)
"""Tags: activations and gradients between neighbours; outputs of the last rank to all."""


Use = tuple[int, int, int]
"""Tag, sender and receiver of a link, by their places in the pipeline."""


class PipelineChannels:
    """The groups that the ranks of one pipeline talk over: on CUDA one for each channel, of its two ranks.

    Args:
        groups: of the mesh, with an axis ``pipeline``.
        around: whether a rank holds several stages, so that the last rank talks to the first.
        timeout: seconds a rank waits for another in shared memory.
        shared: whether CPU ranks of one host may use shared memory.
    """

    def __init__(self, groups: Groups, device: torch.device, *, around: bool, timeout: float, shared: bool) -> None:
        line = self.group = groups.line("pipeline")
        self.place, self.length = groups.coordinate("pipeline"), groups.size("pipeline")
        self.ranks: list[int] = dist.get_process_group_ranks(line)
        self._device = device
        self._groups: dict[Use, dist.ProcessGroup] = {}
        self._channels: list[PipelineChannel] = []
        self._by_group: list[GroupLink] = []
        self._opened: dict[Use, GroupLink | SharedMemoryLink] = {}
        """Channels of several stages may share one."""
        self._uses = list(uses_of_links(self.length, around=around))
        self._timeout = timeout
        self._memory: memoryview | None = None
        """Of all links, where the ranks can share it."""
        if shared and can_share_memory(line, device):
            self._memory = memoryview(share_memory(len(self._uses) * LINK_BYTES, line))
        if is_gpu(device):
            self._open(groups)

    def _open(self, groups: Groups) -> None:
        """Opens a group for every channel of every pipeline, and uses it, in one order on all ranks.

        NCCL connects two ranks at their first exchange, and blocks both until the other is there. A schedule uses its
        channels in another order on each rank, so that two ranks would wait for each other for ever. What goes through
        one group may also be run one after another, so no two channels share one.
        """
        everyone = dist.get_process_group_ranks(groups.world)
        lines = [[everyone[rank] for rank in line] for line in groups.mesh.lines("pipeline")]
        for use in self._uses:
            for line in lines:
                _, source, target = use
                group = open_group([line[source], line[target]])
                if line == self.ranks and self.place in (source, target):
                    self._groups[use] = group
                    connect_pair(line[source], line[target], group, self._device)

    def neighbours(self, stage: int, names: list[str]) -> Neighbours:
        """The channels of a stage of this rank."""
        here, found = self.place, Neighbours()
        if stage > 0:
            before, name = (here - 1) % self.length, names[stage - 1]
            found.activations_in = self._channel((_ON, before, here), name)
            found.gradients_out = self._channel((_BACK, here, before), name)
        if stage < len(names) - 1:
            after, name = (here + 1) % self.length, names[stage]
            found.activations_out = self._channel((_ON, here, after), name)
            found.gradients_in = self._channel((_BACK, after, here), name)
        return found

    def answers(self, name: str) -> dict[int, PipelineChannel]:
        """For the output of the whole model: to every other rank on the last one, from the last one on the others."""
        last = self.length - 1
        if self.place == last:
            return {place: self._channel((_ANSWER, last, place), name) for place in range(last)}
        return {last: self._channel((_ANSWER, last, self.place), name)}

    @property
    def bytes_sent(self) -> int:
        """By this rank, over all channels."""
        return sum(channel.bytes_sent for channel in self._channels)

    def release(self) -> None:
        """Releases the groups, here and in all channels."""
        drop_process_groups(self, *self._by_group)
        self._groups.clear()

    def _channel(self, use: Use, name: str) -> PipelineChannel:
        if use not in self._opened:
            self._opened[use] = self._open_link(use)
        channel = PipelineChannel(self._opened[use], self._device, name)
        self._channels.append(channel)
        return channel

    def _open_link(self, use: Use) -> GroupLink | SharedMemoryLink:
        tag, source, target = use
        peer = self.ranks[target if source == self.place else source]
        by_group = GroupLink(self._groups.get(use, self.group), peer, tag)
        self._by_group.append(by_group)
        if self._memory is None:
            return by_group
        begin = self._uses.index(use) * LINK_BYTES
        memory = self._memory[begin : begin + LINK_BYTES]
        stay_awake = dist.get_world_size() * torch.get_num_threads() <= usable_cores()
        return SharedMemoryLink(memory, by_group, peer, self._timeout, stay_awake=stay_awake)


def uses_of_links(length: int, *, around: bool) -> Iterator[Use]:
    """The uses of links between the ranks of a pipeline, in the order in which they are opened.

    Args:
        around: whether the last rank sends to the first.
    """
    last = length - 1
    neighbours = [(place, place + 1) for place in range(last)]
    if around and last:
        neighbours.append((last, 0))
    yield from ((_ON, source, target) for source, target in neighbours)
    yield from ((_BACK, target, source) for source, target in neighbours)
    yield from ((_ANSWER, last, place) for place in range(last))
