"""The ordered all-reduce as a communication hook, for those who keep torch's DistributedDataParallel.

    model = torch.nn.parallel.DistributedDataParallel(model)
    model.register_comm_hook(OrderedHookState(), ordered_hook)

    bucket 0   all_to_all ----> fold, all_gather ---->
    bucket 1         all_to_all ----> fold, all_gather ---->      backward continues meanwhile
    last             all_to_all, and all that is left is folded and gathered: backward is over

The ranks' gradients are added as the tree over ranks has it and divided once, so for a given number of ranks the bits
depend on neither backend nor topology: level A for a fixed world. With one micro-batch per rank they are those of
Lockstep's own ``ddp`` (K = W). A world of another size gives other bits here, because there is no K.

Nothing is chained with ``Future.then``: on gloo such a callback runs when the data arrives, so two ranks could issue
the second collectives in different orders and wait for each other for ever. Here a hook call moves earlier buckets on,
in bucket order, and the second collectives have a process group of their own. On CUDA every rank issues all of them in
one order, and they share the group of the first.

There is no ``from __future__ import annotations`` here: DDP compares the hook's annotations with the classes.
"""

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import GradBucket

from lockstep.distributed.process_group import open_group
from lockstep.errors import ConfigError
from lockstep.reduce.ordered import OrderedBucket
from lockstep.reduce.reducer import BucketShape, NodeLayout
from lockstep.runtime.devices import is_gpu, new_stream, on_stream


class OrderedHookState:
    """The state of ``ordered_hook`` between its calls. Creating it is collective: every rank must.

    Args:
        group: the ranks over which the model is replicated, as given to DistributedDataParallel; all by default.
    """

    def __init__(self, group: dist.ProcessGroup | None = None) -> None:
        group = dist.group.WORLD if group is None and dist.is_initialized() else group
        if group is None:
            raise ConfigError(
                "OrderedHookState needs a process group: call torch.distributed.init_process_group first."
            )
        self.group = group
        self._rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        self._layout = NodeLayout.of(ranks, ranks)
        self._gather_group = open_group(dist.get_process_group_ranks(self.group))
        self._exchanges: dict[int, _Exchange] = {}
        self._sent: list[_Exchange] = []
        self._gathering: list[_Exchange] = []
        self._side_streams: dict[torch.device, torch.cuda.Stream | None] = {}

    def begin(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Sends a bucket's shards on their way. Collective, in bucket order."""
        number, buffer = bucket.index(), bucket.buffer()
        if number == 0:
            self._sent, self._gathering = [], []
        exchange = self._exchanges.get(number)
        if exchange is None or not exchange.fits(buffer):
            exchange = self._exchanges[number] = _Exchange(buffer, self._layout.leaves)
        self._sent.append(exchange)
        return exchange.begin(buffer, self._layout, self._rank, self.group)

    def advance(self, *, everything: bool) -> None:
        """Moves on the buckets whose data has arrived, the oldest first; or all of them, to their end."""
        device = self._sent[0].device if self._sent else torch.device("cpu")
        if is_gpu(device):
            if device not in self._side_streams:
                self._side_streams[device] = new_stream(device)
            with on_stream(self._side_streams[device]):  # folding does not wait for backward's own kernels
                self._advance(everything=True)  # nothing waits but the stream
        else:
            self._advance(everything=everything)

    def _advance(self, *, everything: bool) -> None:
        while self._sent and (everything or self._sent[0].has_arrived()):
            exchange = self._sent.pop(0)
            group = self.group if is_gpu(exchange.device) else self._gather_group
            exchange.fold_and_gather(self._layout, group)
            self._gathering.append(exchange)
        while self._gathering and (everything or self._gathering[0].has_arrived()):
            self._gathering.pop(0).complete()


def ordered_hook(state: OrderedHookState, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    """The average of a bucket over the ranks, added in the tree's order. Called by DistributedDataParallel.

    Overlaps with backward. Memory layouts (``channels_last``) do not matter: the flat buffer is summed.
    """
    if not isinstance(state, OrderedHookState):
        raise ConfigError(
            f"ordered_hook was registered with a {type(state).__name__} as its state. "
            "Use ddp_model.register_comm_hook(OrderedHookState(), ordered_hook)."
        )
    future = state.begin(bucket)
    state.advance(everything=bucket.is_last())
    return future


class _Exchange(OrderedBucket):
    """The memory of one bucket of DDP and where its exchange stands."""

    def __init__(self, buffer: Tensor, ranks: int) -> None:
        super().__init__(BucketShape(buffer.numel(), buffer.dtype), ranks, 1, buffer.device)
        self.device = buffer.device
        self._divisor = torch.tensor(float(ranks), device=buffer.device)

    def fits(self, buffer: Tensor) -> bool:
        """Returns whether the memory is right for this bucket; DDP re-buckets after the first step."""
        own = self.total
        return (own.numel(), own.dtype, own.device) == (buffer.numel(), buffer.dtype, buffer.device)

    def begin(
        self, buffer: Tensor, layout: NodeLayout, rank: int, group: dist.ProcessGroup
    ) -> torch.futures.Future[Tensor]:
        self._buffer = buffer
        self._future: torch.futures.Future[Tensor] = torch.futures.Future(
            devices=[self.device] if is_gpu(self.device) else None
        )
        self.staging(0).copy_(buffer)
        self.send(layout, rank, group)
        return self._future

    def complete(self) -> None:
        """Divides once, and hands the bucket back to DDP."""
        self.finish()
        torch.div(self.total, self._divisor, out=self._buffer)
        self._future.set_result(self._buffer)
