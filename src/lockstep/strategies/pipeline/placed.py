"""What the user calls under ``pipeline``: the stages of all ranks as one model."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from lockstep.strategies.pipeline.channel import Channel
from lockstep.strategies.pipeline.no_backward import refusing_backward
from lockstep.strategies.pipeline.stage import Passes


def kind_of(value: Any) -> tuple[object, ...]:
    """What decides the shapes inside a model: those of its input."""
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
        answers: dict[int, Channel],
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
