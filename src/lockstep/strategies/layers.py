"""Model parallel in one process: consecutive layers on several devices.

    device 0:  embed  block 0  block 1  |               |  sum of losses
    device 1:                           |  block 2  head |

Activations move where a new device begins, and the output comes back to the first device, where the loss is. The result
does not depend on where the model is cut. Micro-batches run one after the other, so one device computes at a time: what
is gained is room. For devices that compute at the same time use strategy pipeline.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lockstep.config.strategy_options import LayersOptions
from lockstep.numerics.running_buffers import RunningBuffers, RunningBuffersOnDevices
from lockstep.reduce import Reducer
from lockstep.strategies.ddp import Replicated
from lockstep.strategies.pipeline.chain import FunctionLink
from lockstep.strategies.pipeline.channels import TensorSpec
from lockstep.strategies.pipeline.partition import Partition

logger = logging.getLogger(__name__)


class ModelParallel(Replicated):
    """Trains a model whose layers lie on several devices of this process; other processes may hold replicas of it.

    Args:
        devices: of this process, in the order in which layers are given to them. On a CPU all are the same.
        options: where the model is cut.
    """

    name = "layers"

    def __init__(
        self,
        devices: Sequence[torch.device],
        micro_batches: int,
        options: LayersOptions,
        reducer: Reducer | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        super().__init__(devices[0], micro_batches, reducer, group)
        self.devices = tuple(devices)
        self.partition = Partition(self.name, len(devices), options.split, options.balance == "time")

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Puts consecutive layers on the devices. Collective.

        Raises:
            ConfigError: the model is not a chain of enough layers, or cannot be cut where it was asked for.
        """
        if len(self.devices) == 1:
            return super().setup_model(model.to(self.device))
        parts = self.partition.of(model)
        for part, device in zip(parts, self.devices):
            for link in part:
                link.module.to(device)
        for part, device in zip(parts[1:], self.devices[1:]):
            called = [link.module for link in part if not isinstance(link.module, FunctionLink)]
            if called:  # only functions compute where their input is
                called[0].register_forward_pre_hook(partial(_move_inputs, device), with_kwargs=True)
        model.register_forward_hook(partial(_move_output, self.device))
        begins = ", ".join(f"{part[0].name or 'model'} on {device}" for part, device in zip(parts, self.devices))
        logger.info("Layers begin with: %s.", begins)
        return super().setup_model(model)

    def _move(self, model: nn.Module) -> nn.Module:
        return model  # its layers are where they belong

    def _find_buffers(self, model: nn.Module) -> RunningBuffers:
        return RunningBuffersOnDevices(model, self.running_buffers)


def _move_inputs(device: torch.device, module: nn.Module, arguments: Any, named: Any) -> Any:
    return _moved(arguments, device), _moved(named, device)


def _move_output(device: torch.device, module: nn.Module, arguments: Any, output: Any) -> Any:
    return _moved(output, device)


def _moved(values: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, partial(move_tensor, device), values)


def move_tensor(device: torch.device, tensor: Tensor) -> Tensor:
    """The tensor on a device, with the strides and the alignment that it has: kernels are chosen by them."""
    if tensor.device == device or _is_usual(tensor):
        return tensor.to(device, non_blocking=True)
    moved: Tensor = _Move.apply(tensor, device)  # type: ignore[no-untyped-call]  # torch's stub
    return moved


def _is_usual(tensor: Tensor) -> bool:
    """Returns whether a tensor is packed and aligned as one in memory of its own, or of a kind that has none here."""
    is_ordinary = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_conj()
    if not is_ordinary or torch._C._are_functorch_transforms_active() or torch.compiler.is_compiling():
        return True
    spec = TensorSpec.of(tensor)
    return spec.is_packed and not spec.offset


class _Move(torch.autograd.Function):
    """``tensor.to(device)`` with strides and alignment kept, which it keeps only where there are no gaps."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, device: torch.device) -> Tensor:
        ctx.device = tensor.device
        return TensorSpec.of(tensor).copied(tensor, device)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return move_tensor(ctx.device, gradients[0]), None
