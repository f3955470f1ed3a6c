"""Portable bits: a run ends in the same bits on every x86-64 CPU with AVX2, whoever made it.

oneDNN, MKL and ATen choose their code by the CPU. The variables `PORTABLE_VARIABLES` hold them to code that every such
CPU runs. A few operators differ even then: square root and inverse trigonometric functions of MKL's vector library, and
oneDNN's LSTM. `make_portable` puts other code in their place. ``make portable`` compares about 400 operators on
emulated CPUs (docs/portable.md).
"""

from __future__ import annotations

import os
import platform
import warnings
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.config.options import RunOptions
from lockstep.core.fingerprint import has_mkl
from lockstep.core.world import PORTABLE_VARIABLES, World
from lockstep.errors import ConfigError

_WIDE = (torch.float32, torch.float64)
"""The types that MKL's vector library computes; torch's own code computes the others."""


def make_portable(options: RunOptions, world: World, device: torch.device) -> bool:
    """Replaces the operators whose bits depend on the CPU, if that is asked for; else torch has its own again.

    Args:
        options: of the run; ``portable="auto"`` asks for it where nothing stands against it.
        world: this process; a launcher may have been asked for portable bits, and have set the variables.
        device: of the run.

    Returns:
        True if the bits of this run are portable.

    Raises:
        ConfigError: ``portable=True``, and the CPU, torch or the environment of this process cannot give such bits.
    """
    asked = options.portable or world.is_portable
    obstacle = ""
    if asked:
        environment = os.environ if world.is_portable else _environment_at_start()
        obstacle = _obstacle(options, device, environment)
    if obstacle and asked != "auto":
        raise ConfigError(f"portable=True {obstacle}")
    if obstacle or not asked:
        _replace_operators.cache_clear()  # of a run before this one
        return False
    _replace_operators()
    return True


def _obstacle(options: RunOptions, device: torch.device, environment: Mapping[str, str]) -> str:
    """The obstacle to portable bits in this process, and the remedy; empty if there is none."""
    machine, level = platform.machine(), torch.backends.cpu.get_cpu_capability()
    if device.type != "cpu":
        return f"is for CPUs, and this run is on {device}. Train with --devices cpu:N, or without it."
    if options.compile:
        return "and compile=True exclude each other: torch.compile writes code for the CPU that it runs on."
    if machine != "x86_64" or level not in ("AVX2", "AVX512"):
        return f"needs an x86-64 CPU with AVX2, and this one is {machine} with {level}. Train without it."
    if not has_mkl() or not hasattr(torch.library, "get_kernel"):
        return (
            f"needs a torch that is built with MKL, from version 2.9 on, and this is {torch.__version__}. Install the "
            "wheel from PyPI, or train without it."
        )
    if any(environment.get(name, "").upper() != value.upper() for name, value in PORTABLE_VARIABLES.items()):
        words = " ".join(f"{name}={value}" for name, value in PORTABLE_VARIABLES.items())
        return (
            "needs variables in the environment before torch is imported. Start the script with lockstep run "
            f"--portable, or put this before the command: {words}"
        )
    return ""


@cache
def _replace_operators() -> Any:
    """Replaces torch's code for as long as the returned library lives."""
    library: Any = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # of torch: a kernel is replaced
        for name, compute in _FUNCTIONS.items():
            _replace_function(library, name, compute)
        _replace_square_root_as_power(library)
        _replace_lstm(library)
    return library


def _environment_at_start() -> dict[str, str]:
    """The environment that this process, or the one it was forked from, was started with."""
    try:
        entries = Path("/proc/self/environ").read_bytes().split(b"\0")
    except OSError:  # no /proc
        return dict(os.environ)
    pairs = (os.fsdecode(entry).partition("=") for entry in entries)
    return {name: value for name, _, value in pairs}


def _square_root(values: Tensor, out: Tensor) -> Tensor:
    """The square root, which IEEE 754 defines to the last bit; NumPy uses the CPU's instruction."""
    with np.errstate(invalid="ignore"):
        np.sqrt(values.detach().numpy(), out=out.detach().numpy())
    return out


def _by_arc_tangent(sides: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor, Tensor], Tensor]:
    """An inverse function as the angle between two sides, which torch's own code computes."""

    def compute(values: Tensor, out: Tensor) -> Tensor:
        return out.copy_(torch.atan2(*sides(values.double())))

    return compute


_FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sqrt": _square_root,
    "asin": _by_arc_tangent(lambda x: (x, _cathetus(x))),
    "acos": _by_arc_tangent(lambda x: (_cathetus(x), x)),
    "atan": _by_arc_tangent(lambda x: (x, torch.ones_like(x))),
}
"""A function that fills ``out``, of the type and shape of ``values``."""


def _cathetus(hypotenuse: Tensor) -> Tensor:
    product = (1 - hypotenuse) * (1 + hypotenuse)
    return _square_root(product, torch.empty_like(product))


def _replace(library: Any, form: str, compute: Callable[..., Any]) -> None:
    """Replaces a kernel by a function, and takes torch's where that gives ``NotImplemented``."""
    kernel = torch.library.get_kernel(f"aten::{form}", "CPU")

    def function(keys: Any, *given: Any, **named: Any) -> Any:
        found = compute(*given, **named)
        return kernel.call_boxed(keys, *given, **named) if found is NotImplemented else found

    library.impl(form, function, "CPU", with_keyset=True)


def _replace_function(library: Any, name: str, compute: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Replaces the three forms of a function of one tensor for floats; other types go to torch's kernel."""
    write = torch.library.get_kernel(f"aten::{name}.out", "CPU")

    def function(values: Tensor) -> Any:
        if not _is_wide(values):
            return NotImplemented
        values = _as_float(values)
        return compute(values, torch.empty_like(values))

    def in_place(values: Tensor) -> Any:
        return values.copy_(compute(values, torch.empty_like(values))) if values.dtype in _WIDE else NotImplemented

    def into(keys: Any, values: Tensor, *, out: Tensor) -> Any:
        given = _as_float(values) if _is_wide(values) else None
        # Before all else: out may be values itself.
        found = None if given is None else compute(given, torch.empty_like(given))
        write.call_boxed(keys, values, out=out)  # checks its type, and gives it its shape
        return out if found is None else out.copy_(found)

    _replace(library, name, function)
    _replace(library, f"{name}_", in_place)
    library.impl(f"{name}.out", into, "CPU", with_keyset=True)


def _is_wide(values: Tensor) -> bool:
    return values.dtype in _WIDE or not (values.is_floating_point() or values.is_complex())


def _as_float(values: Tensor) -> Tensor:
    return values if values.is_floating_point() else values.to(torch.get_default_dtype())


def _replace_square_root_as_power(library: Any) -> None:
    """``x ** 0.5`` is the square root to torch."""

    def function(values: Tensor, exponent: Any, **into: Any) -> Any:
        return torch.sqrt(values, **into) if exponent == 0.5 and _is_wide(values) else NotImplemented

    def in_place(values: Tensor, exponent: Any) -> Any:
        return values.sqrt_() if exponent == 0.5 and values.dtype in _WIDE else NotImplemented

    _replace(library, "pow.Tensor_Scalar", function)
    _replace(library, "pow.Tensor_Scalar_out", function)
    _replace(library, "pow_.Scalar", in_place)


def _replace_lstm(library: Any) -> None:
    """Lets torch's own LSTM compute, in place of oneDNN's."""

    def without_onednn(operator: Any) -> Callable[..., Any]:
        def lstm(*arguments: Any) -> Any:
            was_enabled = torch.backends.mkldnn.enabled
            torch.backends.mkldnn.enabled = False  # type: ignore[assignment]  # a property of the module
            try:
                return operator.decompose(*arguments)
            finally:
                torch.backends.mkldnn.enabled = was_enabled

        return lstm

    for form in ("input", "data"):
        lstm = without_onednn(getattr(torch.ops.aten.lstm, form))
        for key in ("CPU", "AutogradCPU"):
            library.impl(f"lstm.{form}", lstm, key)
