"""Data parallel in one process: a replica and a thread per device (torch's ``DataParallel``, with the tree's order).

    thread 0, device 0:  k0 k1 k2 k3 =\\
                                       add in the tree's order on device 0 -> update replica 0 -> the others follow
    thread 1, device 1:  k4 k5 k6 k7 =/

Replica 0 is the user's model. On CPUs the replicas share its parameters' memory and have gradients and running buffers
of their own; on GPUs each has a copy that follows it before every step.

Replicas take turns where the model may draw random numbers, since torch has one generator to be keyed; and under
autocast, since torch has one cache of cast weights for all threads: a thread that leaves autocast empties it, and a
weight that another one uses twice is then cast twice, whose gradients add up to other bits. Compiled models take turns
too: the compiler has one set of settings for all threads.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lockstep.data.batch import Batch, MicroBatch
from lockstep.errors import ConfigError
from lockstep.levels import Level
from lockstep.plan import share
from lockstep.randomness import draws_in_forward
from lockstep.strategies.contract import Compute, StepResult
from lockstep.strategies.dp.replica import Replica, copy_model
from lockstep.strategies.replicated import Replicated
from lockstep.tree import Node, TreeStack, nodes_within


@dataclass(frozen=True)
class Computed:
    """What one micro-batch gave beside its gradients."""

    k: int
    loss: Tensor
    weight: Tensor
    running: Tensor | None
    advanced: Tensor


class DataParallel(Replicated):
    """Shares the micro-batches of a step over replicas, one on each device of this process.

    Args:
        devices: of the replicas; the first is the user's model's. One device may occur several times.
        micro_batches: K of the recipe.
        threads: intra-op threads of each replica.
        running_buffers: name patterns of buffers, beside BatchNorm's, that the forward pass changes.
    """

    name = "dp"
    level = Level.BITWISE

    def __init__(
        self,
        devices: Sequence[torch.device],
        micro_batches: int,
        threads: int,
        running_buffers: Sequence[str] = (),
    ) -> None:
        if len(devices) > micro_batches:
            raise ConfigError(
                f"{len(devices)} replicas cannot share micro_batches={micro_batches}: each needs at least one. Use at "
                f"most {micro_batches} devices, or a recipe with more micro-batches."
            )
        super().__init__(devices[0], micro_batches, running_buffers=running_buffers)
        self.devices = tuple(devices)
        self._turn = threading.RLock()
        self._pool = ThreadPoolExecutor(
            len(devices), "lockstep-replica", initializer=torch.set_num_threads, initargs=(threads,)
        )

    def place(self, model: nn.Module) -> nn.Module:
        """Makes the replicas; the user's model is the first."""
        self._alone = draws_in_forward(model) or any("forward" in vars(module) for module in model.modules())
        model = model.to(self.device)
        copies = [copy_model(model, device, self._declared) for device in self.devices[1:]]
        placed = super().place(model)
        self._replicas = [Replica(placed, self.device, self._declared, self._buffers, self._tree)]
        self._replicas += [
            Replica(model, device, self._declared) for model, device in zip(copies, self.devices[1:])
        ]
        return placed

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs the micro-batches on the replicas and adds their gradients. See ``Strategy.backward``."""
        leaves, count = batch.plan.leaves, len(self._replicas)
        shares = [share(leaves, count, number) for number in range(count)]
        self._begin(shares[0], leaves)
        self._takes_turns = self._alone or _casts(compute, self.device)
        for replica, part in zip(self._replicas[1:], shares[1:]):
            replica.follow(self._replicas[0])
            replica.tree.begin(part.start, part.stop, leaves)
            replica.buffers.begin_step()
        futures = [
            self._pool.submit(self._run, replica, [batch.micro_batches[k] for k in part], compute, scale)
            for replica, part in zip(self._replicas, shares)
        ]
        computed = [each for future in _settled(futures) for each in future.result()]
        self._collect(shares, leaves)
        running = TreeStack[Tensor](leaves, lambda left, right: left.add_(right))
        advanced = torch.zeros(self._buffers.counters, dtype=torch.int64, device=self.device)
        for each in computed:
            if each.running is not None:
                running.push_leaf(each.k, each.running.to(self.device))
                advanced += each.advanced.to(self.device)
        losses = [each.loss.to(self.device) for each in computed]
        weights = [each.weight.to(self.device) for each in computed]
        header = self._fill_header(losses, weights, advanced, stop)
        return self._finish(self._reduce(header, running.take()), leaves, nodes=leaves)

    def release(self) -> None:
        """Ends the threads."""
        self._pool.shutdown(wait=False)

    def _run(
        self, replica: Replica, micro_batches: Sequence[MicroBatch], compute: Compute, scale: float
    ) -> list[Computed]:
        """One replica's part of a step, in its thread."""
        if replica.device.type == "cuda":
            torch.cuda.set_device(replica.device)
        return [self._run_one(replica, each, compute, scale) for each in micro_batches]

    def _run_one(self, replica: Replica, micro_batch: MicroBatch, compute: Compute, scale: float) -> Computed:
        replica.buffers.begin_micro_batch()
        try:
            with self._turn if self._takes_turns else nullcontext():
                loss, weight = self._forward(replica, micro_batch, compute)
                replica.require_own(loss, self._model)
                (loss if scale == 1.0 else loss * scale).backward()  # type: ignore[no-untyped-call]  # torch's own stub
        except Exception as error:
            number = self._replicas.index(replica)
            samples = ", ".join(map(str, micro_batch.indices[:8].tolist()))
            error.add_note(f"raised on replica {number}, in micro-batch {micro_batch.k} (samples {samples})")
            raise
        running, advanced = replica.buffers.take() if replica.buffers.numel else (None, torch.zeros(0))
        replica.tree.end_micro_batch()
        return Computed(micro_batch.k, loss.detach(), weight, running, advanced)

    def _forward(self, replica: Replica, micro_batch: MicroBatch, compute: Compute) -> tuple[Tensor, Tensor]:
        """Forward pass and loss. Without turns only what is keyed, inputs and loss, is one replica's at a time."""
        if len(self._replicas) == 1:
            return compute(micro_batch, replica.model)
        with self._turn:
            compute.begin(micro_batch)
            given = tree_map_only(Tensor, lambda t: t.to(replica.device), compute.inputs(micro_batch))
        arguments, named, target = given
        with compute.autocast():
            output = replica.model(*arguments, **named)
        with self._turn:
            compute.resume(micro_batch, "forward")
            return compute.loss(output, target, micro_batch)

    def _collect(self, shares: Sequence[range], leaves: int) -> None:
        """Adds all replicas' tree nodes of each parameter on device 0, for ``_finish``."""
        nodes = [nodes_within(part.start, part.stop, leaves) for part in shares]
        for slots in zip(*(replica.tree.slots for replica in self._replicas)):
            stack = TreeStack[Tensor](leaves, lambda left, right: left.add_(right))
            for slot, own in zip(slots, nodes):
                for node, value in zip(own, slot.stack):
                    stack.push(node, value.to(self.device))
            slots[0].used = sum(slot.used for slot in slots)
            slots[0].stack = list(_whole(stack.take(), leaves))
            for slot in slots[1:]:
                slot.stack = []


def _whole(held: dict[Node, Tensor], leaves: int) -> list[Tensor]:
    assert list(held) == [Node(0, leaves)], "the replicas' shares tile the step"
    return list(held.values())


def _casts(compute: Compute, device: torch.device) -> bool:
    """Whether forward passes run under autocast."""
    with compute.autocast():
        return torch.is_autocast_enabled(device.type)


def _settled(futures: Sequence[Future[list[Computed]]]) -> Sequence[Future[list[Computed]]]:
    """Waits for all, so that no thread is still at work when the first error is raised."""
    for future in futures:
        future.exception()
    return futures
