"""NCCL's collectives for tensors on simulated devices: they run over gloo, in the order that streams would give them.

Each communicator has a stream of its own, which waits for the caller's; ``wait`` of the returned work lets the caller's
stream wait for it, and the host for nothing. The first use of a communicator waits for all of its ranks, and that of a
pair for both: ranks that first use two of them in different orders do not get any further, and after
``FIRST_USE_SECONDS`` it is said which one hangs.
"""

from __future__ import annotations

import datetime
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from tests.simcuda.cuda import host_alias
from torch import Tensor
from torch.distributed import distributed_c10d as c10d

FIRST_USE_SECONDS = 20.0
_streams: dict[tuple[str, int], torch.cuda.Stream] = {}
_opened: set[str] = set()
_sent = 0


def sent_bytes() -> int:
    """Bytes that this rank's collectives have given to other ranks, as rings send them."""
    return _sent


def install() -> None:
    """Puts the collectives on simulated devices."""
    backend = dist.init_process_group

    def init_process_group(name: str | None = None, *args: Any, **named: Any) -> None:
        eager = named.pop("device_id", None)
        backend("gloo" if name and "nccl" in name else name, *args, **named)
        if eager is not None:
            _stream("", None, eager)

    for module in (dist, c10d):
        module.init_process_group = init_process_group  # type: ignore[attr-defined]  # in torch's place
        module.is_nccl_available = lambda: True  # type: ignore[attr-defined]  # in torch's place
        for name in (
            "all_gather_into_tensor",
            "all_gather_single",
            "all_to_all_single",
            "reduce_scatter_tensor",
        ):
            if hasattr(dist, name):
                setattr(module, name, _from_input(name, getattr(c10d, name, None) or getattr(dist, name)))
        for name in ("all_reduce", "broadcast"):
            setattr(module, name, _in_place(name, getattr(c10d, name)))
    send, receive = c10d.isend, c10d.irecv
    for module in (dist, c10d):
        made = {
            "isend": _sending(send),
            "irecv": _receiving(receive),
            "send": lambda *args, **named: dist.isend(*args, **named).wait(),
            "recv": lambda *args, **named: dist.irecv(*args, **named).wait(),
        }
        for name, function in made.items():
            setattr(module, name, function)


def _group_name(group: Any) -> str:
    return str((group if group is not None else dist.group.WORLD).group_name)


def _stream(pair: str, group: Any, device: torch.device) -> torch.cuda.Stream:
    """The stream of a communicator; waits for all of its ranks when it is used first, as ncclCommInitRank does."""
    name = f"{_group_name(group)}{pair}"
    if name not in _opened:
        _opened.add(name)
        ranks = 2 if pair else dist.get_world_size(group)
        store = c10d._get_default_store()
        if store.add(f"simcuda/{name}/arrived", 1) == ranks:
            store.set(f"simcuda/{name}/complete", "yes")
        try:
            store.wait([f"simcuda/{name}/complete"], datetime.timedelta(seconds=FIRST_USE_SECONDS))
        except Exception as error:
            raise RuntimeError(
                f"NCCL communicator {name!r} is used first here, and not by its other ranks: deadlock"
            ) from error
    number = device.index if device.index is not None else torch.cuda.current_device()
    if (name, number) not in _streams:
        _streams[name, number] = torch.cuda.Stream(number)  # type: ignore[no-untyped-call]  # torch's stub
    return _streams[name, number]


class Work:
    """What an asynchronous collective returns."""

    def __init__(
        self, stream: torch.cuda.Stream, device: torch.device, finish: Callable[[], None] = lambda: None
    ) -> None:
        self._stream, self._device, self._finish = stream, device, finish

    def wait(self, timeout: object = None) -> bool:
        """Lets the current stream wait for the collective."""
        self._finish()
        torch.cuda.current_stream(self._device).wait_stream(self._stream)
        return True

    def is_completed(self) -> bool:
        """True: work runs at once."""
        return True


def _collective(
    name: str, group: Any, reads: Tensor, writes: Tensor, async_op: bool, run: Callable[[], object]
) -> Work | None:
    stream = _stream("", group, writes.device)
    stream.wait_stream(torch.cuda.current_stream(writes.device))
    _count(name, group, reads)
    note = torch.ops.simcuda.note_access
    note(reads.detach(), False, stream.stream_id, f"nccl:{name}", True)
    run()
    note(writes.detach(), True, stream.stream_id, f"nccl:{name}", False)
    work = Work(stream, writes.device)
    if async_op:
        return work
    work.wait()
    return None


def _count(name: str, group: Any, reads: Tensor) -> None:
    """A ring of W ranks sends (W - 1) / W of a sum's bytes twice, of other collectives once.

    What a rank puts into an all-gather is 1 / W of it, and goes to all others.
    """
    global _sent
    ranks, size = dist.get_world_size(group), reads.numel() * reads.element_size()
    gathers = name.startswith("all_gather")
    _sent += size * (ranks - 1) * (2 if name == "all_reduce" else 1) // (1 if gathers else ranks)


def _from_input(name: str, over_gloo: Callable[..., Any]) -> Callable[..., Any]:
    def collective(
        output: Tensor, input: Tensor, *args: Any, group: Any = None, async_op: bool = False, **named: Any
    ) -> Any:
        if not output.is_cuda:
            return over_gloo(output, input, *args, group=group, async_op=async_op, **named)
        to, from_ = host_alias(output), host_alias(input)
        return _collective(
            name, group, input, output, async_op, lambda: over_gloo(to, from_, *args, group=group, **named)
        )

    return collective


def _in_place(name: str, over_gloo: Callable[..., Any]) -> Callable[..., Any]:
    def collective(
        tensor: Tensor, what: Any = None, group: Any = None, async_op: bool = False, **named: Any
    ) -> Any:
        arguments: Sequence[Any] = () if what is None else (what,)
        if "op" in named:
            arguments = (named.pop("op"),)
        if not tensor.is_cuda:
            return over_gloo(tensor, *arguments, group=group, async_op=async_op, **named)
        alias = host_alias(tensor)
        return _collective(
            name, group, tensor, tensor, async_op, lambda: over_gloo(alias, *arguments, group=group, **named)
        )

    return collective


def _pair(peer: int) -> str:
    return "/{}:{}".format(*sorted((peer, dist.get_rank())))


_under_way: deque[tuple[Any, Tensor]] = deque()


def _sending(over_gloo: Callable[..., Any]) -> Callable[..., Any]:
    def isend(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        if not tensor.is_cuda:
            return over_gloo(tensor, dst, group, tag)
        stream = _stream(_pair(dst), group, tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        torch.ops.simcuda.note_access(tensor.detach(), False, stream.stream_id, "nccl:send", True)
        global _sent
        _sent += tensor.numel() * tensor.element_size()
        sent = host_alias(tensor).clone()
        _under_way.append((over_gloo(sent, dst, group, tag), sent))
        while _under_way and _under_way[0][0].is_completed():
            _under_way.popleft()
        return Work(stream, tensor.device)

    return isend


def _receiving(over_gloo: Callable[..., Any]) -> Callable[..., Any]:
    def irecv(tensor: Tensor, src: int, group: Any = None, tag: int = 0) -> Any:
        if not tensor.is_cuda:
            return over_gloo(tensor, src, group, tag)
        stream = _stream(_pair(src), group, tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        work = over_gloo(received, src, group, tag)

        def finish() -> None:
            work.wait()
            host_alias(tensor).copy_(received)
            torch.ops.simcuda.note_access(tensor.detach(), True, stream.stream_id, "nccl:recv", True)

        return Work(stream, tensor.device, finish)

    return irecv
