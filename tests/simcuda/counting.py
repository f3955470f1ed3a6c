"""Counts what a training step launches on simulated devices, what it sends, and the memory it takes."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from tests.simcuda.cuda import observed
from tests.simcuda.nccl import sent_bytes
from tests.simcuda.trainings import open_run
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import TensorDataset

from lockstep.core.world import World
from lockstep.models import resnet50

WARMUP, STEPS = 4, 3
"""Steps before counting begins, and those that are counted."""
ROWS = 2
"""Samples of a process in a step."""


@dataclass
class Counted:
    """Counts of one rank in ``STEPS`` steps."""

    launches: Counter[str] = field(default_factory=Counter)
    """Launches of each operator and copy, without those of other processes."""
    order: list[str] = field(default_factory=list)
    """The launches of the last step with their streams."""
    sent: int = 0
    """Bytes that collectives give to other ranks."""
    peak: int = 0
    """Bytes of device memory at the most, within the steps, above those that are held between steps."""
    held: int = 0
    """Bytes of device memory between steps."""
    parameters: int = 0
    """Bytes of the parameters, and of one gradient of all of them."""


def plain(world: World) -> Counted:
    """A loop of torch on one device."""
    model, data, device = _job(world)
    model.to(device)
    return _loop(model, model, data, device)


def ddp(world: World) -> Counted:
    """A loop of torch with DistributedDataParallel, whose buckets are averaged by the simulated all-reduce."""
    _open(world)
    model, data, device = _job(world)
    model.to(device)
    wrapped = DistributedDataParallel(model, device_ids=[device.index], init_sync=False, gradient_as_bucket_view=True)
    wrapped.register_comm_hook(None, _average)
    found = _loop(wrapped, model, data, device)
    dist.destroy_process_group()
    return found


def lockstep(world: World) -> Counted:
    """A loop of Lockstep with as many micro-batches as ranks."""
    model, data, _ = _job(world)
    size = world.world_size
    run = open_run(world, "ddp" if size > 1 else "single", global_batch=ROWS * size, micro_batches=size)
    made: torch.optim.Optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, foreach=True)
    parameters = list(model.parameters())
    model, optimizer = run.prepare(model, made)
    found = Counted(parameters=_bytes(parameters))
    for number, batch in enumerate(run.batches(data)):

        def step(batch: object = batch) -> None:
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()

        _count(found, step, number)
        if number == WARMUP + STEPS - 1:
            break
    run.close()
    return found


def _job(world: World) -> tuple[nn.Module, TensorDataset, torch.device]:
    torch.manual_seed(0)
    rows = ROWS * world.world_size * (WARMUP + STEPS + 1)
    data = TensorDataset(torch.randn(rows, 3, 32, 32), torch.arange(rows) % 5)
    return resnet50(num_classes=5), data, torch.device("cuda", world.local_rank)


def _loop(model: nn.Module, inner: nn.Module, data: TensorDataset, device: torch.device) -> Counted:
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.01, momentum=0.9, foreach=True)
    found = Counted(parameters=_bytes(list(inner.parameters())))
    batches = [
        tuple(each[at * ROWS : (at + 1) * ROWS].pin_memory() for each in data.tensors) for at in range(WARMUP + STEPS)
    ]
    for number, (images, labels) in enumerate(batches):

        def step(images: Tensor = images, labels: Tensor = labels) -> None:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's stub
            optimizer.step()
            optimizer.zero_grad()

        _count(found, step, number)
    return found


def _count(found: Counted, step: Callable[[], None], number: int) -> None:
    if number < WARMUP:
        step()
        return
    found.held = torch.cuda.memory_allocated()
    before = sent_bytes()
    with observed(keep_order=True) as seen:
        step()
        found.launches.update(seen.launches)
        found.order = seen.order
        found.peak = max(found.peak, torch.cuda.max_memory_allocated() - found.held)
    found.sent += sent_bytes() - before


def _average(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """DDP's own way: divides a bucket by the number of ranks, and sums it in the background."""
    buffer = bucket.buffer()
    buffer.div_(dist.get_world_size())
    work = dist.all_reduce(buffer, async_op=True)
    future: torch.futures.Future[Tensor] = torch.futures.Future()
    work.wait()
    future.set_result(buffer)
    return future


def _open(world: World) -> None:
    assert world.rendezvous
    os.environ["LOCKSTEP_RENDEZVOUS"] = world.rendezvous
    torch.cuda.set_device(world.local_rank)
    dist.init_process_group("nccl", init_method=world.rendezvous, rank=world.rank, world_size=world.world_size)


def _bytes(parameters: list[nn.Parameter]) -> int:
    return sum(each.numel() * each.element_size() for each in parameters)
