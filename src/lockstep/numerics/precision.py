"""Number formats of a run: which type the forward pass computes in, and how small gradients are kept from vanishing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import nn

from lockstep.config.options import RunOptions
from lockstep.config.strategy_options import PRECISIONS
from lockstep.errors import ConfigError, nearest
from lockstep.numerics.randomness import OwnHook


class Precision:
    """One of ``fp32``, ``tf32`` (CUDA), ``bf16`` and ``fp16``; parameters and optimizer state stay in float32.

    ``bf16`` and ``fp16`` run the forward pass under ``torch.autocast``; ``fp16`` also scales the loss
    (Micikevicius et al. 2018), with torch's own GradScaler, on CPU and CUDA.

    Args:
        name: the format.
        device: of the run.
        micro_batch_size: samples whose losses are added up before a backward pass.
        scaling: arguments of ``GradScaler``; ``init_scale`` is chosen by ``micro_batch_size`` where it is None.
    """

    def __init__(self, name: str, device: torch.device, micro_batch_size: int = 1, **scaling: Any) -> None:
        if name not in PRECISIONS:
            raise ConfigError(f"precision {name!r} is not known.{nearest(name, PRECISIONS)}")
        if name == "tf32" and device.type != "cuda":
            raise ConfigError("precision 'tf32' exists on CUDA devices only; on a CPU use 'fp32' or 'bf16'.")
        self.name = name
        self.skipped_steps = 0
        """Of the whole run: steps that were skipped because a scaled gradient was not finite."""
        self.is_deterministic = True
        """False lets operators of CUDA run that add in no fixed order."""
        self._device = device
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(name)
        self.forward: Callable[[], AbstractContextManager[object]] = (
            nullcontext if dtype is None else partial(torch.autocast, device.type, dtype=dtype)
        )
        """Gives the context of the forward pass and the loss."""
        self.scaler: torch.amp.GradScaler | None = None
        if name == "fp16":
            # The backward pass starts from a sum of losses, not a mean: begin that much lower than torch's 2^16.
            scale = 2.0 ** (16 - (micro_batch_size - 1).bit_length())
            given = {key: value for key, value in scaling.items() if value is not None}
            self.scaler = torch.amp.GradScaler(device.type, **{"init_scale": scale, **given})
            self.scaler.scale(torch.zeros((), device=device))  # torch makes the scale on first use

    @classmethod
    def of(cls, options: RunOptions, device: torch.device) -> Precision:
        """The precision of a run on its device."""
        scaling = {
            "init_scale": options.loss_scale,
            "growth_factor": options.loss_scale_growth_factor,
            "backoff_factor": options.loss_scale_backoff_factor,
            "growth_interval": options.loss_scale_growth_interval,
        }
        made = cls(options.precision, device, options.shape.micro_batch_size, **scaling)
        made.is_deterministic = options.deterministic
        return made

    def prepare(self, model: nn.Module) -> None:
        """Lets every layer of a model run in this number format; ``ConfigError`` names a parameter that cannot.

        oneDNN cannot train an LSTM in float16 on a CPU, nor in bfloat16 on one without AVX-512 ("could not create a
        primitive descriptor"), so torch's own implementation computes it there.
        """
        if self.scaler is not None:
            _require_unscaled_types(model)
        if self._device.type != "cpu":
            return
        has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # torch asks it before it compiles for oneDNN
        if self.name == "fp16" or (self.name == "bf16" and not has_bf16):
            for module in model.modules():
                if isinstance(module, nn.LSTM):
                    _without_onednn(module)

    def configure_backend(self) -> None:
        """Makes CUDA arithmetic repeatable and sets whether it may use TF32. Does nothing on a CPU."""
        if self._device.type != "cuda":
            return
        torch.backends.cuda.matmul.allow_tf32 = self.name == "tf32"
        torch.backends.cudnn.allow_tf32 = self.name == "tf32"
        torch.backends.cudnn.benchmark = False
        if not self.is_deterministic:
            torch.set_deterministic_debug_mode("default")
        elif not torch.are_deterministic_algorithms_enabled():
            # The same switch as torch.use_deterministic_algorithms, which imports the compiler; and with it torch would
            # also fill memory that is written anyway.
            torch.set_deterministic_debug_mode("error")
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # of its class


def _require_unscaled_types(model: nn.Module) -> None:
    """Refuses gradients of number types that torch's GradScaler does not divide by the loss scale."""
    for name, parameter in model.named_parameters():
        if parameter.requires_grad and (parameter.is_complex() or parameter.dtype == torch.float16):
            raise ConfigError(
                f"precision fp16 scales the loss, and torch cannot divide the gradient of {name!r} by the scale again, "
                f"as it is {str(parameter.dtype).removeprefix('torch.')}. Use precision bf16 or fp32, or make the "
                "parameter float32 (a complex one as two real ones)."
            )


def _without_onednn(module: nn.Module) -> None:
    """Switches oneDNN off while the module's forward runs."""
    was_enabled: list[bool] = []

    def enter(*_: object) -> None:
        was_enabled.append(bool(torch.backends.mkldnn.enabled))
        torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property of the module

    def leave(*_: object) -> None:
        if was_enabled:
            torch.backends.mkldnn.enabled = was_enabled.pop()  # type: ignore[assignment]  # a property of the module

    module.register_forward_pre_hook(OwnHook(enter), prepend=True)
    module.register_forward_hook(OwnHook(leave), always_call=True)
