"""NCCL's collectives for tensors on simulated devices: they run over gloo, in the order that streams would give them.

Each communicator has a stream of its own, which waits for the caller's; ``wait`` of the returned work lets the caller's
stream wait for it, and the host for nothing. The first use of a communicator waits for all of its ranks, and that of a
pair for both: ranks that first use two of them in different orders do not get any further, and after
``FIRST_USE_SECONDS`` it is said which one hangs. So do ranks that open groups in different orders.

A group with a ``device_id`` has its communicator at once, and its ranks send to each other over that one. Where it is
the default group that has one, each further group is split from it, as in torch 2.8 to 2.13: all ranks of the world
take part, those that are not in the group too, but the members of a group without NCCL do not.
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
_opened: list[str] = []
_eager: set[str] = set()
_groups = 0
_sent = 0


def sent_bytes() -> int:
    """Bytes that this rank's collectives have given to other ranks, as rings send them."""
    return _sent


def communicators() -> tuple[str, ...]:
    """The communicators of this rank, in the order in which they were made: the group, and for a pair its ranks."""
    return tuple(_opened)


def install() -> None:
    """Puts the collectives on simulated devices."""
    for module in (dist, c10d):
        module.init_process_group = _opening(c10d.init_process_group)  # type: ignore[attr-defined]  # in torch's place
        module.new_group = _opening_another(c10d.new_group)  # type: ignore[attr-defined]  # in torch's place
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


def _opening(over_gloo: Callable[..., None]) -> Callable[..., None]:
    def init_process_group(name: str | None = None, *args: Any, **named: Any) -> None:
        device = named.pop("device_id", None)
        over_gloo("gloo" if name and "nccl" in name else name, *args, **named)
        if device is not None:
            _open_now(None, device)

    return init_process_group


def _opening_another(over_gloo: Callable[..., Any]) -> Callable[..., Any]:
    def new_group(
        ranks: list[int] | None = None,
        timeout: Any = None,
        backend: str | None = None,
        *args: Any,
        **named: Any,
    ) -> Any:
        global _groups
        device = named.pop("device_id", None)
        members = sorted(ranks) if ranks is not None else [*range(dist.get_world_size())]
        has_nccl, splits = backend is None or "nccl" in backend, _group_name(None) in _eager
        if named.get("use_local_synchronization"):
            if dist.get_rank() not in members:
                return over_gloo(ranks, timeout, None, *args, **named)
        else:
            _groups += 1
            _require_order(_groups, members)
        group = over_gloo(ranks, timeout, "gloo" if backend and has_nccl else backend, *args, **named)
        is_member = dist.get_rank() in members
        if splits and (has_nccl or not is_member):
            _meet(f"split {_groups}", dist.get_world_size())
        if is_member and has_nccl and (splits or device is not None):
            _open_now(group, device or torch.device("cuda", torch.cuda.current_device()))
        return group

    return new_group


def _open_now(group: Any, device: torch.device) -> None:
    _eager.add(_group_name(group))
    _stream("", group, device)


def _require_order(number: int, members: list[int]) -> None:
    """Raises where another rank opens other members as its group of this number."""
    store, text = c10d._get_default_store(), str(members)
    first = store.compare_set(f"simcuda/group {number}", "", text).decode()
    if first != text:
        raise RuntimeError(f"Group {number} is opened here with ranks {text}, and elsewhere with {first}: deadlock")


def _meet(name: str, ranks: int) -> None:
    """Waits until so many ranks have come, as the host does where NCCL makes a communicator."""
    store = c10d._get_default_store()
    if store.add(f"simcuda/{name}/arrived", 1) == ranks:
        store.set(f"simcuda/{name}/complete", "yes")
    try:
        store.wait([f"simcuda/{name}/complete"], datetime.timedelta(seconds=FIRST_USE_SECONDS))
    except Exception as error:
        raise RuntimeError(
            f"NCCL communicator {name!r} is used first here, and not by its other ranks: deadlock"
        ) from error


def _group_name(group: Any) -> str:
    return str((group if group is not None else dist.group.WORLD).group_name)


def _stream(pair: str, group: Any, device: torch.device) -> torch.cuda.Stream:
    """The stream of a communicator; waits for all of its ranks when it is used first, as ncclCommInitRank does."""
    name = f"{_group_name(group)}{pair}"
    if name not in _opened:
        _opened.append(name)
        _meet(name, 2 if pair else dist.get_world_size(group))
    number = device.index if device.index is not None else torch.cuda.current_device()
    if (name, number) not in _streams:
        _streams[name, number] = torch.cuda.Stream(number)  # type: ignore[no-untyped-call]  # torch's stub
    return _streams[name, number]


class Work:
    """The handle that an asynchronous collective returns."""

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
    def collective(tensor: Tensor, what: Any = None, group: Any = None, async_op: bool = False, **named: Any) -> Any:
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


def _pair(group: Any, peer: int) -> str:
    """The part of a communicator's name that is of two ranks, if they do not send over that of the group."""
    return "" if _group_name(group) in _eager else "/{}:{}".format(*sorted((peer, dist.get_rank())))


_under_way: deque[tuple[Any, Tensor]] = deque()


def _sending(over_gloo: Callable[..., Any]) -> Callable[..., Any]:
    def isend(tensor: Tensor, dst: int, group: Any = None, tag: int = 0) -> Any:
        if not tensor.is_cuda:
            return over_gloo(tensor, dst, group, tag)
        stream = _stream(_pair(group, dst), group, tensor.device)
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
        stream = _stream(_pair(group, src), group, tensor.device)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        received = torch.empty(tensor.shape, dtype=tensor.dtype)
        work = over_gloo(received, src, group, tag)

        def finish() -> None:
            work.wait()
            host_alias(tensor).copy_(received)
            torch.ops.simcuda.note_access(tensor.detach(), True, stream.stream_id, "nccl:recv", True)

        return Work(stream, tensor.device, finish)

    return irecv
