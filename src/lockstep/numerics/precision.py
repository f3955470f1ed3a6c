"""Number formats of a run: which type the forward pass computes in, and how small gradients are kept from vanishing."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.backends import opt_einsum

from lockstep.config.options import RunOptions
from lockstep.config.strategy_options import PRECISIONS
from lockstep.errors import GO_ON_AT_LEVEL_B, ConfigError, nearest
from lockstep.numerics.compilation import fix_graphs, require_repeatable
from lockstep.numerics.randomness import OwnHook
from lockstep.runtime.devices import memory_shortages

logger = logging.getLogger(__name__)

_FEW_NUMBERS = 1024


class Precision:
    """One of ``fp32``, ``tf32`` (CUDA), ``bf16`` and ``fp16``; parameters and optimizer state stay in float32.

    ``bf16`` and ``fp16`` run the forward pass under ``torch.autocast``; ``fp16`` also scales the loss
    (Micikevicius et al. 2018), with torch's own GradScaler, on CPU and CUDA.

    Args:
        name: the format.
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
        self.restored_settings: dict[str, str] = {}
        """See ``torch_settings``; those of the checkpoint that a run resumes from."""
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
        for name, parameter in model.named_parameters() if self.scaler is not None else ():
            if parameter.requires_grad and (parameter.is_complex() or parameter.dtype == torch.float16):
                raise ConfigError(
                    f"precision fp16 scales the loss, and torch cannot divide the gradient of {name!r} by the scale "
                    f"again, as it is {str(parameter.dtype).removeprefix('torch.')}. Use precision bf16 or fp32, or "
                    "make the parameter float32 (a complex one as two real ones)."
                )
        if self._device.type != "cpu":
            return
        has_bf16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()  # torch asks it before it compiles for oneDNN
        if self.name == "fp16" or (self.name == "bf16" and not has_bf16):
            for module in model.modules():
                if isinstance(module, nn.LSTM):
                    _without_onednn(module)

    def configure_backend(self) -> None:
        """Makes arithmetic repeatable, sets whether CUDA may use TF32, and notes what bits depend on.

        Attention in evaluation takes the same path as in training: torch's other one is not taken where modules have
        hooks, which fsdp needs and one device does not.
        """
        torch.backends.mha.set_fastpath_enabled(False)
        if self._device.type == "cuda":
            self._configure_cuda()
        elif self._adds_in_parallel() and not torch.are_deterministic_algorithms_enabled():
            _add_in_order("warn")  # also of what would be refused on a GPU, and has a fixed order here
        self._settings = _settings(self._device, self.is_deterministic)

    def _adds_in_parallel(self) -> bool:
        """True where threads of a CPU would add up the gradient of ``table[rows]``, each as it comes to it."""
        return self._device.type == "cpu" and self.is_deterministic and torch.get_num_threads() > 1

    def _configure_cuda(self) -> None:
        self._shortages = memory_shortages()
        torch.backends.cuda.matmul.allow_tf32 = self.name == "tf32"
        torch.backends.cudnn.allow_tf32 = self.name == "tf32"
        wanted = "tf32" if self.name == "tf32" else "ieee"
        of_cudnn = [getattr(torch.backends.cudnn, name, None) for name in ("conv", "rnn")]
        places: list[Any] = [torch.backends.cuda.matmul, *of_cudnn]
        for place in places:  # torch's newer names for it, which a script may have set
            if getattr(place, "fp32_precision", "none") not in ("none", wanted):
                place.fp32_precision = wanted
        torch.backends.cudnn.benchmark = False
        if not self.is_deterministic:
            torch.set_deterministic_debug_mode("default")
        elif not torch.are_deterministic_algorithms_enabled():
            _add_in_order("error")
        fix_graphs()

    def require_repeatable(self, name: str, compiled: object) -> None:
        """Raises ``ConfigError`` where a module or function was compiled in a way whose bits differ between runs."""
        if isinstance(compiled, nn.Module) or hasattr(compiled, "get_compiler_config"):
            on_gpu = self._device.type == "cuda"
            require_repeatable(name, compiled, on_gpu=on_gpu, is_deterministic=self.is_deterministic)

    def require_settings(self) -> None:
        """Raises ``ConfigError`` where user code has changed a setting of torch on which bits depend.

        Those that it may change are compared once with what a checkpoint has.
        """
        before, self.restored_settings = dict(self.restored_settings), {}
        if self._adds_in_parallel():
            before.pop(_DETERMINISTIC, None)  # earlier versions did not set it
        for name, value in torch_settings().items() if before else ():
            if before.get(name, value) != value:
                raise ConfigError(
                    f"{name} was {before[name]} at the checkpoint, and is {value} now. Bits depend on it, so they "
                    f"would not continue. Set it before the loop as it was; or {GO_ON_AT_LEVEL_B}"
                )
        now = _settings(self._device, self.is_deterministic)
        if now == self._settings:
            return
        name = next(each for each in now if now[each] != self._settings[each])
        raise ConfigError(
            f"{name} was {self._settings[name]} after lockstep.init, and is {now[name]} now. Bits depend on it, and "
            f"neither the run's recipe nor its checkpoints would know. {_REMEDIES[name]}"
        )

    def tell_shortages(self) -> None:
        """Warns where an operator found too little memory on a GPU, and the run went on."""
        if self._device.type == "cuda" and (now := memory_shortages()) > self._shortages:
            self._shortages = now
            logger.warning(
                "A GPU of this process had too little memory for some operator, which was computed differently: cuDNN "
                "then takes another algorithm for a convolution, with other bits. This run may differ from one with "
                "more memory, by rounding. Use smaller micro-batches (more micro_batches), or more devices."
            )


def _add_in_order(mode: str) -> None:
    """Lets operators add up in a fixed order; ``mode`` says what becomes of those that have none.

    It is the same switch as torch.use_deterministic_algorithms, which imports the compiler to set its own
    (``fix_graphs``); and with it torch would also fill memory that is written anyway.
    """
    torch.set_deterministic_debug_mode(mode)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]  # of its class
    fix_graphs()


_DETERMINISTIC = "torch.are_deterministic_algorithms_enabled()"
_TF32 = "whether matmul and cuDNN may use TF32"
_FAST_PATH = "torch.backends.mha.get_fastpath_enabled()"
_REMEDIES = {
    _FAST_PATH: (
        "Leave torch.backends.mha.set_fastpath_enabled out: torch takes that path only in modules without hooks, so "
        "the numbers of an evaluation would depend on the strategy."
    ),
    "torch.get_num_threads()": (
        "Leave torch.set_num_threads out, and give lockstep.init(threads=...) a number that does not depend on the "
        "number of processes."
    ),
    "torch.backends.cudnn.benchmark": (
        "Leave it out: it chooses algorithms by their speed, so the next run may use different ones. Or give "
        "lockstep.init(deterministic=False)."
    ),
    **dict.fromkeys(
        (_DETERMINISTIC, "torch.get_deterministic_debug_mode()"),
        "Leave torch.use_deterministic_algorithms out, or give lockstep.init(deterministic=False).",
    ),
    _TF32: (
        "Leave torch.set_float32_matmul_precision, allow_tf32 and fp32_precision out, and give "
        "lockstep.init(precision='tf32')."
    ),
}


def _settings(device: torch.device, is_deterministic: bool) -> dict[str, Any]:
    """The settings on which the bits of a device depend, by what users know them by."""
    found: dict[str, Any] = {_FAST_PATH: torch.backends.mha.get_fastpath_enabled()}
    if device.type != "cuda":
        found["torch.get_num_threads()"] = threads = torch.get_num_threads()
        is_asked = device.type == "cpu" and is_deterministic and threads > 1
        return found | ({_DETERMINISTIC: torch.are_deterministic_algorithms_enabled()} if is_asked else {})
    if is_deterministic:
        found["torch.backends.cudnn.benchmark"] = torch.backends.cudnn.benchmark
        found["torch.get_deterministic_debug_mode()"] = torch.get_deterministic_debug_mode()
    try:
        found[_TF32] = (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)
    except RuntimeError:  # torch's newer names for it have been set beside the older ones
        found[_TF32] = "set under torch's new names"
    return found


def torch_settings() -> dict[str, str]:
    """Settings of torch on which bits depend, and which a script may choose, as texts by what users know them by."""
    backends, denormal = torch.backends, torch.tensor(1e-40)
    found = {
        "torch.get_default_dtype()": torch.get_default_dtype(),
        "torch.get_float32_matmul_precision()": torch.get_float32_matmul_precision(),
        _DETERMINISTIC: torch.are_deterministic_algorithms_enabled(),
        "torch.set_flush_denormal": bool(denormal * 1 == 0),
        "torch.backends.mkldnn.enabled": backends.mkldnn.enabled,
        "torch.backends.opt_einsum.enabled": opt_einsum.enabled,
        "torch.backends.opt_einsum.strategy": opt_einsum.strategy,
        "torch.backends.cudnn.enabled": backends.cudnn.enabled,
    }
    for name in ("allow_fp16_reduced_precision_reduction", "allow_bf16_reduced_precision_reduction"):
        found[f"torch.backends.cuda.matmul.{name}"] = getattr(backends.cuda.matmul, name)
    for name in ("flash", "mem_efficient", "math", "cudnn"):
        found[f"torch.backends.cuda.{name}_sdp_enabled()"] = getattr(backends.cuda, f"{name}_sdp_enabled")()
    return {name: str(value) for name, value in found.items()}


def dtype_named(name: str) -> torch.dtype:
    """The dtype of a name such as "torch.float32"."""
    found = getattr(torch, name.removeprefix("torch."))
    assert isinstance(found, torch.dtype)
    return found


def all_finite(tensors: Iterable[Tensor], device: torch.device) -> Tensor:
    """Tells whether every entry of all tensors is finite, as a 0-dim bool on ``device``; does not wait for it.

    From the extremes, which are NaN where an entry is. A sum may overflow though every entry is finite, and does so or
    not by how the entries are spread over processes.
    """
    groups: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
            groups.setdefault((real.dtype, real.device), []).append(real)
    extremes = [_extremes(group).to(device, torch.float64) for group in groups.values()]
    if not extremes:
        return torch.ones((), dtype=torch.bool, device=device)
    largest: Tensor = torch.linalg.vector_norm(torch.cat(extremes), math.inf)
    return largest < math.inf  # which NaN is not


def _extremes(group: list[Tensor]) -> Tensor:
    """Numbers one of which is NaN or infinite if an entry of the tensors is; the tensors share type and device."""
    if group[0].is_cpu:
        return torch.stack([extreme for tensor in group for extreme in torch.aminmax(tensor)])
    if len(group) == 1 and group[0].dim() == 1 and len(group[0]) <= _FEW_NUMBERS:
        return group[0]
    # A few launches for all of them; several times slower than aminmax on a CPU
    return torch.stack(list(torch._foreach_norm(group, math.inf)))


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
