"""torch.compile with the same graphs on every layout: one for each shape, whatever a process has seen before.

By itself the compiler learns: the second shape of an input makes a graph for all shapes, the ninth ends in code that is
not compiled, and a module may run the graph of another one that has no hooks. On a GPU it takes some kernels because
they were faster when it tried them. Which graph and kernels run, and so which bits come out, then depends on what else
ran in the process, and on the clock. In a run these are switched off.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.errors import ConfigError, LockstepError

_COMPILER = "torch._dynamo"
_SETTINGS = {
    "automatic_dynamic_shapes": False,
    "specialize_float": True,
    "fail_on_recompile_limit_hit": True,
    "skip_nnmodule_hook_guards": False,
}
_KERNELS = "torch._inductor.config"


class DispatchMode(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's stub
    """A ``TorchDispatchMode`` for which torch does not import its compiler, only to keep it out of here."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False


def fix_graphs() -> None:
    """Sets the compiler, where this process has loaded it, so that a graph depends only on its code and inputs.

    Where torch is to be deterministic, so is the choice of kernels, as ``torch.use_deterministic_algorithms`` has it:
    without that switch of the compiler's own, matrices are padded and sums are split where this was faster when it was
    tried. torch turns the switch on by itself after the first graph of a process.
    """
    config = getattr(sys.modules.get(_COMPILER), "config", None)
    if config is not None:
        for name, value in _SETTINGS.items():
            setattr(config, name, value)
    is_deterministic = torch.are_deterministic_algorithms_enabled()
    kernels: Any = sys.modules.get(_KERNELS)
    if kernels is None and is_deterministic:
        os.environ["TORCHINDUCTOR_DETERMINISTIC"] = "1"  # read when the compiler is loaded
    elif hasattr(kernels, "deterministic"):
        kernels.deterministic = is_deterministic
    elif kernels is not None and is_deterministic:  # torch 2.8 and 2.9 have no such switch
        kernels.shape_padding = kernels.dynamic_scale_rblock = False


def uncompiled() -> AbstractContextManager[object]:
    """A context in which compiled modules run as they are written, so that no graphs are made."""
    return torch.compiler.set_stance("force_eager") if _COMPILER in sys.modules else nullcontext()


def explain_compiler(error: Exception) -> None:
    """Raises ``ConfigError`` in place of the compiler's error about too many graphs, and an error of ours for itself.

    The compiler wraps what is raised while it traces, and says that its own code has failed.
    """
    compiler: Any = sys.modules.get(_COMPILER)
    if compiler is None:
        return
    if isinstance(error, compiler.exc.InternalTorchDynamoError) and isinstance(error.__context__, LockstepError):
        raise error.__context__ from None
    if not isinstance(error, compiler.exc.FailOnRecompileLimitHit):
        return
    raise ConfigError(
        "One compiled graph is kept for each shape of input, each number that the code uses and each mode, and more "
        f"came than torch keeps of one function ({compiler.config.recompile_limit}). Pad the samples to a few fixed "
        "lengths, give numbers that change as tensors, set torch._dynamo.config.recompile_limit to more, or do not "
        "compile."
    ) from error


def is_compiled(module: nn.Module) -> bool:
    """Returns whether a module was compiled: by ``CompiledForward``, torch.compile or its method ``compile``."""
    by_user = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return by_user or isinstance(vars(module).get("forward"), CompiledForward)


def compiled_around(model: nn.Module) -> dict[nn.Module, nn.Module]:
    """The outermost compiled module around each module that is in one, itself included."""
    found: dict[nn.Module, nn.Module] = {}
    for module in model.modules():  # outer ones come first
        for inner in module.modules() if is_compiled(module) else ():
            found.setdefault(inner, module)
    return found


def require_repeatable(name: str, compiled: object, *, on_gpu: bool, is_deterministic: bool = True) -> None:
    """Raises ``ConfigError`` where torch.compile was told to use what gives other bits in another layout or run.

    Args:
        name: of what was compiled, for the message.
        compiled: a module or function; nothing is required of one that torch.compile has not made.
        is_deterministic: whether the run promises bits.
    """
    by_method = getattr(compiled, "_compiled_call_impl", None)
    by_run = vars(compiled).get("forward") if isinstance(compiled, nn.Module) else None
    told = getattr(by_method or by_run or compiled, "get_compiler_config", None)
    settings = (told() if callable(told) else None) or {}
    if on_gpu and settings.get("triton.cudagraphs"):
        raise ConfigError(
            f"{name} was compiled with CUDA graphs, as mode='reduce-overhead' and mode='max-autotune' do. They write "
            "the gradients of a micro-batch over those of the one before, which are still to be added. Leave the mode "
            "out."
        )
    if is_deterministic and (chosen := next((each for each in _BY_SPEED if settings.get(each)), None)):
        raise ConfigError(
            f"{name} was compiled with {chosen}, as mode='max-autotune' does: kernels are chosen by their speed, and "
            "others in another process have other bits. Leave the mode out, or give "
            "lockstep.init(deterministic=False)."
        )


_BY_SPEED = ("max_autotune", "max_autotune_gemm", "coordinate_descent_tuning")


class CompiledForward:
    """A module's forward, compiled. A copy of the module, as a replica of strategy dp is one, compiles its own.

    Args:
        forward: of the module.
        modules: how many may share its code; torch's limit of graphs, which is one of a code, holds for each.
    """

    def __init__(self, forward: Callable[..., Any], modules: int = 1) -> None:
        self._forward, self._modules = forward, modules
        self._static = torch.compile(forward, dynamic=False)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the graph for these shapes; ``ConfigError`` where there are more than torch keeps."""
        fix_graphs()
        config = torch._dynamo.config
        limit = config.recompile_limit * self._modules
        total = max(config.accumulated_recompile_limit, limit)
        try:
            with config.patch(recompile_limit=limit, accumulated_recompile_limit=total):
                return self._static(*args, **kwargs)
        except Exception as error:
            explain_compiler(error)
            raise

    def get_compiler_config(self) -> Any:
        """The settings of the compiler, as functions have them that torch.compile gives."""
        return self._static.get_compiler_config()  # type: ignore[attr-defined]  # torch sets it on a function

    def __deepcopy__(self, memo: dict[int, Any]) -> CompiledForward:
        return CompiledForward(copy.deepcopy(self._forward, memo), self._modules)
