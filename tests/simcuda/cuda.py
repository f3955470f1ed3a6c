"""``torch.cuda`` on the simulated devices, and what was observed on them.

install(library())          before torch is imported
with observed() as seen:    counts what happens
    ...
seen.races, seen.waits      Counter of (what, where)
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
import traceback
from collections import Counter, namedtuple
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

_HERE = str(Path(__file__).parent)
_TOTAL = 1 << 34
_core: Any = None
_observer: Any = None


@dataclass
class Seen:
    """The observations of a run."""

    races: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Accesses that nothing orders, with the place in the program."""
    waits: Counter[tuple[str, str]] = field(default_factory=Counter)
    """Places where the host waited for a device, with the reason."""

    @property
    def launches(self) -> dict[str, int]:
        """How often each operator was launched since ``observed`` began."""
        lines = _core.simcuda_launches(False).decode().splitlines() if _core is not None else []
        return {name: int(number) for number, _, name in (line.partition(" ") for line in lines)}

    @property
    def order(self) -> list[str]:
        """Launches with their streams, in order, where ``observed`` was asked to keep it."""
        return list(_core.simcuda_launches(True).decode().splitlines()) if _core is not None else []

    @property
    def moved(self) -> tuple[int, int]:
        """Bytes to devices, and bytes to the host."""
        return _core.simcuda_moved(True), _core.simcuda_moved(False)


_seen = Seen()


@contextlib.contextmanager
def observed(*, keep_order: bool = False) -> Iterator[Seen]:
    """Counts what happens within; on real devices nothing is."""
    global _seen
    before, _seen = _seen, Seen()
    if _core is not None:
        _core.simcuda_reset(keep_order)
    try:
        yield _seen
    finally:
        _seen = before


def limit_memory(device: int, size: int) -> None:
    """Gives a device so many bytes of memory."""
    _core.simcuda_limit_memory(device, size)


def host_alias(tensor: Any) -> Any:
    """A tensor on the CPU with the memory of a device tensor."""
    import torch

    return torch.ops.simcuda.host_alias(tensor.detach())


def is_simulated() -> bool:
    """True where ``install`` was called."""
    return _core is not None


def install(path: Path) -> None:
    """Loads the devices of a library and puts ``torch.cuda`` on them."""
    global _core, _observer
    if "torch" in sys.modules:
        raise RuntimeError("The simulated CUDA must be installed before torch is imported.")
    _core = ctypes.CDLL(str(path), mode=ctypes.RTLD_GLOBAL)
    for name in ("stream", "memory", "moved", "shortages"):
        getattr(_core, f"simcuda_{name}").restype = ctypes.c_int64
    _core.simcuda_launches.restype = ctypes.c_char_p
    _core.simcuda_set_stream.argtypes = [ctypes.c_int, ctypes.c_int64]
    _core.simcuda_limit_memory.argtypes = [ctypes.c_int, ctypes.c_int64]
    _core.simcuda_register.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    _core.simcuda_unregister.argtypes = [ctypes.c_void_p]
    _observer = ctypes.CFUNCTYPE(None, ctypes.c_char_p, ctypes.c_char_p)(_note)
    import torch

    _core.simcuda_install(_observer)
    assert _core.simcuda_is_in_use(), "torch had looked for CUDA before the simulated one was loaded"
    for name, value in _torch_cuda(_core.simcuda_devices()).items():
        setattr(torch.cuda, name, value)
    torch._C._cuda_getDeviceCount = torch.cuda.device_count
    torch._C._cuda_getCurrentRawStream = lambda device: _core.simcuda_stream(device)
    torch.version.cuda = "13.0 (simulated)"
    # As in a CPU build:
    torch._C._has_cudnn = False
    torch.backends.cudnn.m._init = lambda: False  # type: ignore[attr-defined]  # a module in a class
    _patch_storages()


def _note(kind: bytes, what: bytes) -> None:
    if sys.is_finalizing():
        return
    where = _place()
    (_seen.races if kind == b"race" else _seen.waits)[what.decode(), where] += 1
    if kind == b"wait" and _sync_debug_mode == "error":
        _forbidden.append(f"{what.decode()} in {where}")


_sync_debug_mode = "default"
_forbidden: list[str] = []
"""Waits while they were forbidden."""


def _set_sync_debug_mode(mode: str) -> None:
    """``torch.cuda.set_sync_debug_mode``, which raises here, not where the host waited: nothing can be raised there."""
    global _sync_debug_mode
    found, _sync_debug_mode = _forbidden.copy(), mode
    _forbidden.clear()
    if found:
        raise RuntimeError(f"called a synchronizing CUDA operation: {found[0]}")


def _place() -> str:
    """The innermost lines of Lockstep, or else of whoever called."""
    frames = [each for each in traceback.extract_stack() if not each.filename.startswith(_HERE + "/cuda")]
    own = [each for each in frames if "/lockstep/" in each.filename] or frames
    lines = (f"{each.filename.partition('/src/')[2] or each.filename}:{each.lineno} {each.name}" for each in own)
    return " < ".join([*lines][:-4:-1])


Properties = namedtuple("Properties", "name major minor total_memory multi_processor_count")


def _torch_cuda(count: int) -> dict[str, Any]:
    """The functions and classes that take the place of torch.cuda's."""
    import torch

    kind = torch._C._get_accelerator().type

    def index(device: Any = None) -> int:
        if device is None:
            return int(_core.simcuda_device())
        number = device if isinstance(device, int) else torch.device(device).index
        return int(_core.simcuda_device()) if number is None else number

    class Stream(torch.Stream):
        def __new__(cls, device: Any = None, priority: int = 0, **given: Any) -> Any:
            if "stream_id" in given:
                return super().__new__(cls, **given)
            return super().__new__(cls, device=torch.device(kind, index(device)), priority=priority)

        @property
        def cuda_stream(self) -> int:
            return self.stream_id

    class Event(torch.Event):
        def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Any:
            return super().__new__(cls, device=torch.device(kind, index()), enable_timing=enable_timing)

    class Selected:
        """``torch.cuda.device``."""

        def __init__(self, device: Any) -> None:
            self.idx = index(device) if device is not None else -1

        def __enter__(self) -> None:
            self.before = index()
            if self.idx >= 0:
                _core.simcuda_set_device(self.idx)

        def __exit__(self, *_: object) -> None:
            _core.simcuda_set_device(self.before)

    class OnStream:
        """``torch.cuda.stream``."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream

        def __enter__(self) -> None:
            if self.stream is not None:
                number = self.stream.device_index
                self.before = index(), _core.simcuda_stream(number)
                _core.simcuda_set_device(number)
                _core.simcuda_set_stream(number, self.stream.stream_id)

        def __exit__(self, *_: object) -> None:
            if self.stream is not None:
                _core.simcuda_set_stream(self.stream.device_index, self.before[1])
                _core.simcuda_set_device(self.before[0])

    def stream(device: Any, number: int) -> Any:
        return Stream(stream_id=number, device_index=index(device), device_type=1)

    def set_device(device: Any) -> None:
        if index(device) >= count:
            raise RuntimeError("CUDA error: invalid device ordinal")
        _core.simcuda_set_device(index(device))

    def held(device: Any = None) -> int:
        return int(_core.simcuda_memory(index(device), False))

    def peak(device: Any = None) -> int:
        return int(_core.simcuda_memory(index(device), True))

    generators = tuple(torch.ops.simcuda.default_generator(each) for each in range(count))

    def manual_seed_all(seed: int) -> None:
        for each in generators:
            each.manual_seed(seed)

    return {
        "Stream": Stream,
        "Event": Event,
        "StreamContext": OnStream,
        "stream": OnStream,
        "device": Selected,
        "is_available": lambda: count > 0,
        "device_count": lambda: count,
        "is_initialized": lambda: True,
        "init": lambda: None,
        "_lazy_init": lambda: None,
        "_is_compiled": lambda: True,
        "_is_in_bad_fork": lambda: False,
        "current_device": index,
        "set_device": set_device,
        "current_stream": lambda device=None: stream(device, _core.simcuda_stream(index(device))),
        "default_stream": lambda device=None: stream(device, 0),
        "set_stream": lambda given: _core.simcuda_set_stream(given.device_index, given.stream_id),
        "synchronize": lambda device=None: torch.accelerator.synchronize(torch.device(kind, index(device))),
        "get_device_name": lambda device=None: "Simulated CUDA",
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_properties": lambda device=None: Properties("Simulated CUDA", 9, 0, _TOTAL, 132),
        "mem_get_info": lambda device=None: (_TOTAL - held(device), _TOTAL),
        "memory_allocated": held,
        "memory_stats": lambda device=None: {"num_ooms": 0 if index(device) else _core.simcuda_shortages()},
        "memory_reserved": held,
        "max_memory_allocated": peak,
        "max_memory_reserved": peak,
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": lambda: None,
        "default_generators": generators,
        "manual_seed": lambda seed: generators[index()].manual_seed(seed),
        "manual_seed_all": manual_seed_all,
        "get_rng_state": lambda device=None: generators[index(device)].get_state(),
        "set_rng_state": lambda state, device=None: generators[index(device)].set_state(state),
        "is_bf16_supported": lambda including_emulation=True: True,
        "cudart": lambda: SimpleNamespace(
            cudaHostRegister=lambda address, size, flags: _core.simcuda_register(address, size),
            cudaHostUnregister=lambda address: _core.simcuda_unregister(address),
        ),
        "is_current_stream_capturing": lambda: False,
        "set_sync_debug_mode": _set_sync_debug_mode,
    }


def _patch_storages() -> None:
    """Storages reach the memory of CUDA past the dispatcher."""
    import torch
    import torch.cuda.amp.common

    torch.cuda.amp.common.amp_definitely_not_available = lambda: False
    resize, copy = torch.UntypedStorage.resize_, torch.UntypedStorage.clone

    def bytes_of(storage: Any) -> Any:
        return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)

    def resize_(storage: Any, size: int) -> Any:
        if storage.device.type == "cpu":
            return resize(storage, size)
        torch.ops.simcuda.resize_storage(bytes_of(storage), size)
        return storage

    def clone(storage: Any) -> Any:
        return copy(storage) if storage.device.type == "cpu" else bytes_of(storage).clone().untyped_storage()

    torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]  # see above
    torch.UntypedStorage.clone = clone  # type: ignore[method-assign]  # see above
