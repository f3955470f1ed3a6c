"""One stage of a pipeline: the modules between two cuts, and the passes of micro-batches through them."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.data.batch import MicroBatch
from lockstep.errors import ConfigError
from lockstep.strategies.contract import Compute
from lockstep.strategies.pipeline.chain import Link
from lockstep.strategies.pipeline.channel import Channel


class Stage(nn.Module):
    """Some links of the chain; its parameters and buffers have the names of the whole model.

    Args:
        links: of this stage.
    """

    def __init__(self, links: Sequence[Link]) -> None:
        super().__init__()
        self._links = [link.module for link in links]  # a plain list: their names come from the tree below
        for link in links:
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


class Neighbours:
    """The channels of one stage; None at the ends of the pipeline."""

    def __init__(
        self,
        before: tuple[Channel, Channel] | None,
        after: tuple[Channel, Channel] | None,
    ) -> None:
        self.activations_in: Channel | None = before[0] if before else None
        self.gradients_out: Channel | None = before[1] if before else None
        self.activations_out: Channel | None = after[0] if after else None
        self.gradients_in: Channel | None = after[1] if after else None

    def flush(self) -> None:
        """Waits until all that this stage sent has arrived."""
        for channel in (self.activations_out, self.gradients_out):
            if channel is not None:
                channel.flush()


class Passes:
    """The forward and backward passes of a step's micro-batches through one stage.

    Args:
        stage: the modules.
        neighbours: where activations and gradients come from and go to.
        name: of the first module, for errors.
    """

    def __init__(self, stage: Stage, neighbours: Neighbours, name: str) -> None:
        self.stage, self.neighbours = stage, neighbours
        self._name = name
        self._roots: dict[int, list[Tensor]] = {}
        self._inlets: dict[int, _Inlet] = {}
        self._anchor: Tensor | None = None

    @property
    def is_last(self) -> bool:
        """Whether the loss is computed here."""
        return self.neighbours.activations_out is None

    def run(
        self, micro_batch: MicroBatch, kind: Hashable, compute: Compute, received: Callable[[], None]
    ) -> tuple[Any, Any]:
        """The forward pass of a micro-batch; gives the stage's output, and in the last stage the target.

        Args:
            micro_batch: whose turn it is.
            kind: of the micro-batch, see ``Channel``.
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
        with compute.autocast():
            return self.stage(*args, **kwargs), target

    def pass_on(self, k: int, kind: Hashable, output: Any) -> None:
        """Sends the output of a stage that is not the last."""
        channel = self.neighbours.activations_out
        assert channel is not None
        self._roots[k] = [tensor for tensor in _tensors(output) if tensor.requires_grad]
        channel.send(kind, output)

    def end_in(self, k: int, loss: Tensor) -> None:
        """Says what the backward pass of a micro-batch starts from in the last stage."""
        self._roots[k] = [loss]

    def run_back(self, k: int, kind: Hashable, received: Callable[[], None]) -> None:
        """The backward pass of a micro-batch, which adds to the parameters' gradients; see ``run``."""
        roots, source = self._roots.pop(k), self.neighbours.gradients_in
        gradients = source.receive(kind)[1] if source is not None and roots else None
        received()
        if gradients is not None:
            roots = [_Entry.apply(gradients, *roots)]  # type: ignore[no-untyped-call]  # torch's stub
        if roots:
            torch.autograd.backward(roots)
        inlet = self._inlets.pop(k, None)
        if inlet is not None and self.neighbours.gradients_out is not None:
            self.neighbours.gradients_out.send(kind, inlet.take(self._name))

    def evaluate(self, kind: Hashable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A forward pass outside of training, of the model's inputs or of what the stage before sends."""
        if self.neighbours.activations_in is not None:
            description, tensors = self.neighbours.activations_in.receive(kind)
            args, kwargs = (description.value(tensors),), {}
        output = self.stage(*args, **kwargs)
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
        """Lets go of micro-batches whose backward pass an error has prevented."""
        self._roots.clear()
        self._inlets.clear()

    def _received(self, source: Channel, k: int, kind: Hashable) -> Any:
        description, tensors = source.receive(kind)
        trained = [number for number, form in enumerate(description.forms) if form.needs_gradient]
        if trained and torch.is_grad_enabled():
            if self._anchor is None:
                self._anchor = torch.zeros((), device=tensors[0].device, requires_grad=True)
            inlet = self._inlets[k] = _Inlet([tensors[number] for number in trained])
            attached = _Attach.apply(self._anchor, inlet)  # type: ignore[no-untyped-call]  # torch's stub
            for number, tensor in zip(trained, attached):
                tensors[number] = tensor
        return description.value(tensors)


class _Inlet:
    """Where activations of another process enter the graph, and their gradients leave it."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        self.gradients: tuple[Tensor | None, ...] = (None,) * len(tensors)

    def take(self, name: str) -> list[Tensor]:
        if any(gradient is None for gradient in self.gradients):
            raise ConfigError(
                f"The stage that begins with {name!r} gives no gradient back for what the stage before it sent, as if "
                "it were detached or left out. Cut the model elsewhere with pipeline.split, or use strategy 'ddp'."
            )
        return [gradient for gradient in self.gradients if gradient is not None]


class _Attach(torch.autograd.Function):
    """Gives received tensors a place in the graph that is no leaf: the next module may change them in place."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, inlet: _Inlet) -> tuple[Tensor, ...]:
        """The tensors, which now require gradients."""
        ctx.inlet = inlet
        ctx.set_materialize_grads(False)
        tensors, inlet.tensors = tuple(inlet.tensors), []
        return tensors

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, None]:
        """Keeps the gradients, to be sent."""
        ctx.inlet.gradients = gradients
        return None, None


class _Entry(torch.autograd.Function):
    """Where gradients of another process enter the backward pass, as those of one scalar.

    ``torch.autograd.backward`` with gradients given by hand imports sympy: 40 MB and half a second in every process.
    """

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *roots: Tensor) -> Tensor:
        """A scalar that depends on all roots."""
        ctx.gradients = gradients
        return roots[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients that were received."""
        gradients, ctx.gradients = ctx.gradients, None
        return (None, *gradients)


def _tensors(value: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, Tensor)]
