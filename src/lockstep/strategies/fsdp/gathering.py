"""Decides when parameters are whole: gathered before a module uses them, and again when backward needs them.

    forward    module begins: its block is gathered       module ends: its block is freed
    backward   a saved parameter is asked for: its block is gathered, those before it are sent and freed

Nothing is added to the graph of autograd, so gradients are summed in the order of a model on one device: saved tensors
are packed (``torch.autograd.graph.saved_tensors_hooks``), and unpacking a parameter gathers its block.

The order in which a micro-batch needed its blocks foretells that of the next. On CUDA, the next block is gathered while
one computes, on a stream of its own, where gradients are sent too. A block that is needed again at once is kept, as the
last one of the forward pass.

    compute    forward 0            forward 1            forward 2 ...
    exchange   gather 1             gather 2             gather 3

Ranks need not use the same blocks in the same order. Every collective is preceded by one in which each rank says what
it wants next, and all serve what any rank wants:

    rank 0    gather experts.0 ->  serves 0, then 3  -> ... -> nothing more
    rank 1    gather experts.3 ->  serves 0, then 3  -> ... -> exchange experts.3 -> nothing more
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves, tree_map_only

from lockstep.config.strategy_options import FsdpOptions
from lockstep.distributed.rank_exchange import RankExchange
from lockstep.errors import ConfigError
from lockstep.numerics.compilation import compiled_around
from lockstep.numerics.initial_values import InitialValues
from lockstep.numerics.randomness import OwnHook, in_backward
from lockstep.runtime.devices import current_stream, new_stream, on_stream
from lockstep.strategies.absent import Absence
from lockstep.strategies.fsdp.exchange import ShardedBlock, ShardedParameter, large_blocks
from lockstep.strategies.sharding import rows_of, unseen
from lockstep.strategies.strategy import ELSEWHERE, IN_STEP, OUTSIDE, apart

_TYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
_NOTHING = -1
_KEPT = 2
"""Blocks that are whole at once in backward: one operation may use parameters of two."""


class Gathering:
    """The blocks of a model, and the hooks that gather them.

    Args:
        model: on its device, with whole parameters; afterwards without.
        exchange: between the ranks that hold rows.
        host: where numbers that hosts read are exchanged.
        options: when parameters are freed, and what they are gathered in.
        whole: parameters that one rank holds, the one that has least of them so far.
        initial_values: of parameters that have no values yet.
    """

    def __init__(
        self,
        model: nn.Module,
        exchange: RankExchange,
        device: torch.device,
        host: torch.device,
        options: FsdpOptions,
        whole: Collection[str],
        initial_values: InitialValues | None,
    ) -> None:
        self._exchange, self._host = exchange, host
        self._keep = not options.reshard_after_forward
        """True if blocks are freed after the backward pass only."""
        self._keep_for_step = not options.reshard_after_backward
        """True if they are freed after the step only."""
        self._dtype = _TYPES.get(options.mixed_precision)
        modules = large_blocks(model)
        ranks = exchange.ranks
        loads = [0] * ranks
        self.absence = absence = Absence("fsdp", "no process holds it whole")
        self.parameters: list[ShardedParameter] = []
        members: dict[str, list[ShardedParameter]] = {name: [] for name in [*modules, ""]}
        for name, parameter in model.named_parameters():
            rows = [rows_of(parameter.shape[0], ranks, rank) for rank in range(ranks)]
            if name in whole:
                owner = loads.index(min(loads))
                loads[owner] += parameter.numel()
                rows = [slice(0, parameter.shape[0] if rank == owner else 0) for rank in range(ranks)]
            if initial_values is not None and initial_values.knows(parameter):
                initial_values.fill([(name, parameter)], device)
            else:
                parameter.data = parameter.detach().clone()  # in memory of its own, which is given back
            each = ShardedParameter(name, parameter, rows, exchange.rank, absence, self._dtype, options.cpu_offload)
            each.free()
            self.parameters.append(each)
            members[next((block for block in modules if name.startswith(f"{block}.")), "")].append(each)
        self.blocks = [ShardedBlock(name, own, exchange, device) for name, own in members.items()]
        *blocks, self._rest = self.blocks
        self._numbers = {block: number for number, block in enumerate(self.blocks)}
        self._by_address: dict[int, ShardedBlock] = {}
        self._recent: list[ShardedBlock] = []
        self._order = _Order()
        self._stream = new_stream(device)
        """On which blocks are gathered and gradients sent; None for the only one."""
        self._gathered: dict[ShardedBlock, torch.cuda.Event] = {}
        self._device = device
        self._entered: list[tuple[ShardedBlock, saved_tensors_hooks | None]] = []
        self._where = OUTSIDE
        self._is_refused = False
        for block, module in zip(blocks, modules.values()):
            self._watch(module, block)
            for inner in _inner_entrances(module):
                self._watch(inner, block, is_inner=True)
        compiled = compiled_around(model)
        rest = {each.whole for each in self._rest.parameters}
        users = [module for module in model.modules() if rest.intersection(module._parameters.values())]
        for module in dict.fromkeys([model, *(compiled.get(module, module) for module in users)]):
            self._watch(module, self._rest)

    @property
    def bytes_sent(self) -> int:
        """Bytes of parameters and gradients that this rank has sent."""
        return sum(block.bytes_sent for block in self.blocks)

    def begin_step(self, leaves: int) -> None:
        """Starts a step of ``leaves`` micro-batches."""
        self.absence.is_computing = True
        self.free()
        self._where = IN_STEP
        for block in self.blocks:
            block.begin_step(leaves)

    def begin_micro_batch(self) -> None:
        """Starts a micro-batch of this rank, and with it a round of all."""
        self._order.begin()
        for block in self.blocks:
            block.begin_micro_batch()

    def end_micro_batch(self, counts: bool) -> None:
        """Sends the gradients that were not sent yet, and adds up those of the round. Collective.

        Args:
            counts: False where this rank's micro-batch was a spare one.
        """
        for block in self.blocks:
            if block.has_gradients:
                self._request(send=block)
        self._request()
        self._order.end()
        if self._stream is not None:
            current_stream(self._device).wait_stream(self._stream)
        for block in self.blocks:
            block.end_micro_batch(counts)
        if not self._keep_for_step:
            self.free()

    def take(self) -> dict[str, Tensor]:
        """Ends the step, and gives the sums of its gradients, of this rank's rows by name of the parameter."""
        self.absence.is_computing = False
        self._where = OUTSIDE
        self.free()
        return {name: total for block in self.blocks for name, total in block.take().items()}

    def require_no_calls(self) -> None:
        """Raises ``ConfigError`` on every rank where some call the model while others gather its state. Collective."""
        with self._being(ELSEWHERE):
            self._request()

    @contextmanager
    def joined_calls(self) -> Iterator[None]:
        """See ``Strategy.joined_calls``."""
        with self._being(IN_STEP):
            yield
            self._request()
        self.free()

    @contextmanager
    def _being(self, where: int) -> Iterator[None]:
        self._where = where
        try:
            yield
        finally:
            self._where = OUTSIDE

    def free(self) -> None:
        """Frees all whole parameters: they are gathered again when they are used."""
        for block in self.blocks:
            block.free()
        self._by_address.clear()
        self._recent.clear()

    def _watch(self, module: nn.Module, block: ShardedBlock, *, is_inner: bool = False) -> None:
        def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
            self._entered.append((block, self._packing(block)))
            self.need(block)
            if self._dtype is None or is_inner:
                return None
            cast = {"dtype": self._dtype}
            given: tuple[Any, Any] = tree_map_only(
                Tensor, lambda each: each.to(**cast) if each.is_floating_point() else each, (args, kwargs)
            )
            return given

        covers: list[saved_tensors_hooks | None] = []

        def cover(module: nn.Module, args: Any) -> None:
            covers.append(self._packing(block))

        def uncover(module: nn.Module, args: Any, output: Any) -> None:
            if covers and (context := covers.pop()) is not None:
                context.__exit__()

        def leave(module: nn.Module, args: Any, output: Any) -> Any:
            aliases = not is_inner and any(self._is_of_parameter(each) for each in tree_leaves(output))
            apart = tree_map_only(Tensor, self._apart, output) if aliases else None
            self._leave(block)
            return apart

        # torch's checkpoint(module), which was there before, begins to save tensors in a hook of its own between these.
        module.register_forward_pre_hook(OwnHook(enter), prepend=True, with_kwargs=True)
        module.register_forward_pre_hook(OwnHook(cover))
        module.register_forward_hook(OwnHook(uncover), prepend=True, always_call=True)
        module.register_forward_hook(OwnHook(leave), always_call=True)

    def _packing(self, block: ShardedBlock) -> saved_tensors_hooks | None:
        """Begins to pack parameters that are saved for backward, unless the innermost hooks do; None then."""
        if not torch.is_grad_enabled():
            return None
        outer = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if outer is not None and isinstance(outer[0], _Pack) and outer[0].blocks is self._by_address:
            return None
        if (reason := torch._C._autograd._saved_tensors_hooks_get_disabled_error_message()) is not None:
            raise ConfigError(
                f"Strategy 'fsdp' frees parameters between forward and backward with saved_tensors_hooks, and "
                f"they are disabled around {block.name or 'the model'!r} ({reason}), as torch.func.grad and "
                "disable_saved_tensors_hooks do. Use strategy 'ddp', or leave that out."
            )
        context = saved_tensors_hooks(_Pack(self._by_address, outer), partial(_unpack, self.need, outer))
        context.__enter__()
        return context

    def _leave(self, block: ShardedBlock) -> None:
        _, context = self._entered.pop()
        if context is not None:
            context.__exit__()
        if in_backward():
            return
        still_used = self._keep or block is self._rest or any(block is each for each, _ in self._entered)
        if not still_used and self._following is block:
            self._forget(block)
            block.set_aside()
        elif not still_used:
            self._free(block)
        is_outside = self._where == OUTSIDE
        if not self._entered and (is_outside or not torch.is_grad_enabled()):
            # Within a step, ranks may call the model more often than others. After a refusal nobody would answer.
            # Outside, the loop may change parameters, gradients and the optimizer next, which is done to the rows.
            if is_outside and not self._is_refused:
                self._request()
            self.free()

    def need(self, block: ShardedBlock) -> None:
        """Makes a block whole, if it is not. In backward, gradients of the blocks before it are sent first."""
        if block.is_whole:
            return
        ready = None  # its gradients go with the request for this block, those of others before it
        if in_backward():
            if self._where == OUTSIDE:
                Variable._execution_engine.queue_callback(self.free)
            for each in self._recent:
                if each.has_gradients:
                    if ready is not None:
                        self._request(send=ready)
                    ready = each
            while len(self._recent) >= _KEPT and not self._keep:
                self._free(self._recent.pop(0))
            if block is not self._rest:
                self._recent.append(block)
        self._order.needs(self._numbers[block])
        ahead = self._following
        if self._stream is None or (ahead is not None and (ahead.is_whole or ahead.is_aside)):
            ahead = None
        if ready is not None or ahead is not None or not block.is_aside:
            self._request(send=ready, gather=None if block.is_aside else block, ahead=ahead)
        if (event := self._gathered.pop(block, None)) is not None:
            current_stream(self._device).wait_event(event)  # what is computed from now on needs the values
        if block.is_aside:
            block.take_back()
        for parameter in block.parameters:
            if parameter.whole.numel():
                self._by_address[parameter.whole.untyped_storage().data_ptr()] = block

    @property
    def _following(self) -> ShardedBlock | None:
        """The block that is likely to be needed next; None where writes are watched, for which blocks are freed."""
        number = self._order.following
        return None if number is None or self._rest.written is not None else self.blocks[number]

    def _gather(self, block: ShardedBlock, *, keep: bool) -> None:
        """Gathers a block; ``keep``: it was this rank that asked for it, and not only others."""
        block.gather(keep=keep)
        if self._stream is not None and keep:
            self._gathered[block] = self._stream.record_event()

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """Exchanges on their own stream, after all that has been computed until now."""
        if self._stream is not None:
            # Memory of this stream that was freed is given out again after this wait, so what used it has ended.
            self._stream.wait_stream(current_stream(self._device))
        with on_stream(self._stream):
            yield

    def _apart(self, output: Tensor) -> Tensor:
        """A copy of an output that is a view of a parameter, which may be freed next."""
        return output.clone() if self._is_of_parameter(output) else output

    def _is_of_parameter(self, value: Any) -> bool:
        return isinstance(value, Tensor) and _address(value) in self._by_address

    def _free(self, block: ShardedBlock) -> None:
        self._forget(block)
        block.free()

    def _forget(self, block: ShardedBlock) -> None:
        for each in block.parameters if block.is_whole else ():
            self._by_address.pop(each.whole.untyped_storage().data_ptr(), None)

    def _request(
        self,
        send: ShardedBlock | None = None,
        gather: ShardedBlock | None = None,
        ahead: ShardedBlock | None = None,
    ) -> None:
        """Asks all ranks for collectives, and serves what they ask for until this rank has what it wanted.

        With nothing to ask for, until no rank wants any more.

        Args:
            send: a block whose gradients are ready.
            gather: a block that is needed next.
            ahead: the one that is likely to be needed after it.

        Raises:
            ConfigError: some ranks call the model outside of ``run.backward``, and others are elsewhere.
        """
        wanted = [_NOTHING if block is None else self._numbers[block] for block in (send, gather, ahead)]
        with unseen():
            mine = torch.tensor([*wanted, self._where], device=self._host)
            is_served = False
            while not is_served:
                sends, gathers, aheads, places = self._exchange.all_gather(mine).t().tolist()
                self._is_refused = len(set(places)) > 1
                if self._is_refused:
                    raise apart("fsdp", places)
                with self._on_own_stream():
                    for number in sorted({*sends} - {_NOTHING}):
                        self.blocks[number].exchange()
                    for number in sorted({*gathers} - {_NOTHING}):
                        self._gather(self.blocks[number], keep=self.blocks[number] is gather)
                    for number in sorted({*aheads} - {*gathers, _NOTHING}):
                        self._gather(self.blocks[number], keep=self.blocks[number] is ahead)
                        if self.blocks[number] is ahead:
                            ahead.set_aside()
                is_served = {*wanted} != {_NOTHING} or {*sends, *gathers, *aheads} == {_NOTHING}


class _Order:
    """The order in which a micro-batch needs blocks, by number, which foretells that of the next."""

    def __init__(self) -> None:
        self._before: list[int] = []
        self._now: list[int] | None = None
        """Of this micro-batch; None outside of one."""
        self._is_same = True

    def begin(self) -> None:
        self._now, self._is_same = [], True

    def end(self) -> None:
        self._before, self._now = self._now or [], None

    def needs(self, number: int) -> None:
        if self._now is not None:
            place = len(self._now)
            self._is_same &= place < len(self._before) and self._before[place] == number
            self._now.append(number)

    @property
    def following(self) -> int | None:
        """The block that is needed next if this micro-batch continues as the one before; None if that is not known."""
        if self._now is None or not self._is_same:
            return None
        return self._before[len(self._now)] if len(self._now) < len(self._before) else None


def _inner_entrances(block: nn.Module) -> list[nn.Module]:
    """Modules of a block, with parameters, that its code may call in backward, or under hooks on saved tensors."""
    if type(block).__module__.startswith("torch.nn."):
        return []
    compiled = compiled_around(block)
    entrances = dict.fromkeys(compiled.get(each, each) for each in block.modules() if each._parameters)
    return [each for each in entrances if each is not block]


def _address(tensor: Tensor) -> int:
    """Where the memory of a tensor is, also of one that torch.func has wrapped; 0 where there is none."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        tensor = torch._C._functorch.get_unwrapped(tensor)
    # A tangent may have zeros for memory.
    if tensor.layout is not torch.strided or not tensor.numel() or tensor._is_zerotensor():
        return 0
    return tensor.untyped_storage().data_ptr()


class _Pack:
    """Saves a parameter with its block; hands other tensors on to the hooks around these.

    Hooks of the user get parameters too, as copies: what they keep must have values until backward.
    """

    def __init__(self, blocks: Mapping[int, ShardedBlock], outer: Sequence[Any] | None) -> None:
        self.blocks, self._outer = blocks, outer
        self._is_users = outer is not None and outer[0].__module__ != "torch.utils.checkpoint"

    def __call__(self, tensor: Tensor) -> tuple[str, Any, Any]:
        block = self.blocks.get(_address(tensor))
        if block is not None and torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise ConfigError(
                f"A transform of torch.func saves a parameter of {block.name or 'the model'!r}, which strategy 'fsdp' "
                "frees before backward. Use strategy 'ddp'."
            )
        if block is not None and not self._is_users:
            return "parameter", tensor.detach(), block
        if block is not None:
            tensor = tensor.detach().clone()
        if self._outer is not None:
            return "outer", self._outer[0](tensor), None
        return "tensor", tensor, tensor._version


def _unpack(need: Callable[[ShardedBlock], None], outer: Sequence[Any], packed: tuple[str, Any, Any]) -> Tensor:
    """Gives back what ``_Pack`` saved."""
    kind, saved, more = packed
    if kind == "parameter":
        need(more)
        if torch.is_grad_enabled() and torch._C._autograd._top_saved_tensors_default_hooks(False) is None:
            saved = saved.clone()  # a second derivative keeps it, and nothing gathers it then
    elif kind == "outer":
        saved = outer[1](saved)
    elif saved._version != more:  # torch checks this only where there are no hooks
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"tensor of shape {list(saved.shape)} is at version {saved._version}; expected version {more} instead."
        )
    found: Tensor = saved
    return found
