"""Functions that ranks of the proof kit run. Each is called with the rank's ``World`` first."""

from __future__ import annotations

import gc
import itertools
import logging
import os
import platform
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy
import torch
import torch.distributed as dist
from PIL import Image
from tests.simcuda.trainings import MISTAKES, Trained, fed, job_of, open_run, saving, steps_of, train

from lockstep.core.summation_tree import merges_after_leaf, push_leaf
from lockstep.data import ImageFolder, RandomResizedCrop
from lockstep.numerics.compilation import fix_graphs
from lockstep.numerics.precision import all_finite
from lockstep.profile.timeline import DeviceTrace
from lockstep.profile.trace import TraceSpan

_NCCL = {"NCCL_SOCKET_IFNAME": "lo", "NCCL_IB_DISABLE": "1", "NCCL_DEBUG": "WARN"}
"""Variables of NCCL that nobody has set: the loopback interface, and its reasons where it refuses."""
_SPIN_CYCLES = 1 << 42
_SHARED_BYTES = 8 << 30
"""Three loops read ahead 16 batches of 154 MB each at most; two of them stand still."""


def _share(shared: dict[str, str]) -> None:
    """Lets ranks share cards over the loopback interface."""
    os.environ.update(shared)
    for name, value in _NCCL.items():
        os.environ.setdefault(name, value)


def train_with(world: Any, shared: dict[str, str], *arguments: Any) -> Trained:
    """``train`` of ``tests.simcuda.trainings`` on shared cards."""
    _share(shared)
    return train(world, *arguments)


def saving_with(world: Any, shared: dict[str, str], *arguments: Any) -> Any:
    """``saving`` of ``tests.simcuda.trainings`` on shared cards."""
    _share(shared)
    return saving(world, *arguments)


def fed_with(world: Any, shared: dict[str, str], *arguments: Any) -> str:
    """The fingerprint of ``fed`` of ``tests.simcuda.trainings`` on shared cards."""
    _share(shared)
    return fed(world, *arguments)[0]


def versions(world: Any) -> dict[str, str]:
    """Versions and the device."""
    properties = torch.cuda.get_device_properties(0)
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "CUDA": str(torch.version.cuda),
        "cuDNN": str(torch.backends.cudnn.version()),
        "device": torch.cuda.get_device_name(0),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(0))),
        "multiprocessors": str(properties.multi_processor_count),
        "memory": f"{properties.total_memory >> 20} MB",
        "cards": str(torch.cuda.device_count()),
        "cores": str(os.cpu_count()),
    }
    if Path("/dev/shm").exists():
        found["/dev/shm"] = f"{shutil.disk_usage('/dev/shm').free >> 20} MB free"
    try:
        found["NCCL"] = ".".join(map(str, torch.cuda.nccl.version()))
    except (AttributeError, RuntimeError):
        found["NCCL"] = "none"
    try:
        import triton

        found["Triton"] = triton.__version__
    except ImportError:
        found["Triton"] = "none"
    return found


def connect(world: Any, shared: dict[str, str]) -> float:
    """The sum of the ranks' numbers, over NCCL."""
    from lockstep.distributed.process_group import open_process_group
    from lockstep.runtime.devices import choose_device

    _share(shared)
    device = choose_device(world)
    if world.world_size == 1:
        dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
        value = torch.full((1,), float(world.rank), device=device)
        dist.all_reduce(value)
        dist.destroy_process_group()
        return float(value)
    with open_process_group(world, backend="cpu:gloo,cuda:nccl", timeout=60):
        value = torch.full((1,), float(world.rank), device=device)
        dist.all_reduce(value)
        return float(value)


def without_waits(world: Any, shared: dict[str, str], strategy: str, options: dict[str, Any], plant: str = "") -> bool:
    """Trains 20 steps, reading of batches included, in which a wait of the host for the device raises.

    Args:
        world: this rank.
        shared: variables of the ranks.
        strategy: of the run.
        options: of ``lockstep.init``.
        plant: a mistake of ``tests.simcuda.trainings.MISTAKES``.

    Returns:
        Whether a wait that was made on purpose raised.
    """
    _share(shared)
    if plant:
        MISTAKES[plant]()
    torch.manual_seed(0)
    run = open_run(world, strategy, fingerprint_every=0, **options)
    model, few, loss_fn = job_of("convolutions")
    data = torch.utils.data.TensorDataset(*(each.repeat(8, *[1] * (each.dim() - 1)) for each in few.tensors))
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    finds = _finds_a_wait()
    for _ in run.epochs(1):
        for step, batch in enumerate(run.batches(data)):
            run.backward(batch, loss_fn)
            run.clip_gradients(0.5)
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.set_sync_debug_mode("error" if 2 <= step < 22 else "default")
    run.close()
    return finds


def _finds_a_wait() -> bool:
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.ones((), device="cuda").item()
        torch.cuda.set_sync_debug_mode("default")  # where simulated devices raise
    except RuntimeError:
        return True
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return False


def _enable_sanitizer() -> None:
    """Turns torch's CUDA sanitizer on, in this process and thread.

    By itself it takes a collective for a kernel of the current stream that comes after the call. It runs on a stream of
    NCCL's, which has begun to wait for the current one in the call: so it is noted before, as one that writes its first
    argument.
    """
    from torch.cuda import _sanitizer

    class Sanitizer(_sanitizer.CUDASanitizerDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.namespace != "c10d":
                return super().__torch_dispatch__(func, types, args, kwargs)  # type: ignore[no-untyped-call]  # torch
            accesses, output = _sanitizer.ArgumentHandler(), _sanitizer.ArgumentHandler()
            accesses.parse_inputs(func._schema, args, kwargs or {}, is_factory=False)
            output.parse_inputs(func._schema, args[:1], {}, is_factory=False)
            written = accesses.dataptrs_written | output.dataptrs_read
            errors = self.event_handler._handle_kernel_launch(
                torch.cuda.current_stream().cuda_stream,
                accesses.dataptrs_read - written,
                written,
                set(),
                func._schema,
                accesses.tensor_aliases,
            )
            if errors:
                raise _sanitizer.CUDASanitizerErrors(errors)  # type: ignore[no-untyped-call]  # torch's stub
            return func(*args, **kwargs or {})

    Sanitizer().__enter__()  # type: ignore[no-untyped-call]  # torch's stub


def finds_a_race(world: Any) -> bool:
    """True if the sanitizer raises where a stream writes what another has just written, and nothing orders them."""
    from torch.cuda._sanitizer import CUDASanitizerErrors

    _enable_sanitizer()
    values = torch.zeros(1 << 10, device="cuda")
    try:
        with torch.cuda.stream(torch.cuda.Stream()):
            values.add_(1)
        values.mul_(2)
    except CUDASanitizerErrors:
        return True
    return False


def sanitized(world: Any, shared: dict[str, str], *arguments: Any) -> dict[tuple[str, str], int]:
    """``train`` of ``tests.simcuda.trainings`` under torch's sanitizer, which raises; the races on simulated devices.

    It is turned on here: by its variable it would look for devices in the process that forks the ranks.
    """
    _share(shared)
    _enable_sanitizer()
    return train(world, *arguments).races


def kernel_sums(world: Any, device: str = "cuda", leave_out: tuple[torch.dtype, ...] = ()) -> list[str]:
    """Sums by the fused kernel whose bits are not those of additions one by one; all nodes lie on one device.

    Args:
        world: this rank.
        device: of the nodes.
        leave_out: number types.

    Raises:
        ImportError: there is no Triton.
    """
    from lockstep.core.summation_tree import fold, merges_after_nodes
    from lockstep.reduce.fused import add_shard
    from lockstep.reduce.reducer import NodeLayout

    generator, numbers, differ = torch.Generator().manual_seed(0), 4097, []
    kinds = {torch.float32, torch.float64, torch.float16, torch.bfloat16}.difference(leave_out)
    for kind, ranks in itertools.product(sorted(kinds, key=str), (1, 2, 3, 8)):
        for leaves in (ranks, 2 * ranks + 1):
            nodes = list(itertools.chain.from_iterable(NodeLayout.of(leaves, ranks).ranks))
            sizes = 10.0 ** torch.randint(-2, 3, (len(nodes), 4104), generator=generator)
            values = (torch.randn(sizes.shape, generator=generator) * sizes).to(device, kind)
            # Every row begins at a multiple of 16 bytes, as the kernel is told.
            copied, found = values.clone(), torch.zeros(ranks, sizes.shape[1], dtype=kind, device=device)
            expected = fold(zip(nodes, copied), leaves, lambda left, right: left.add_(right))
            table = torch.tensor([row.data_ptr() for rows in (values, found) for row in rows]).to(device)
            add_shard(table, merges_after_nodes(nodes, leaves), ranks, (0, numbers), kind)
            if any(not torch.equal(row[:numbers], expected[:numbers]) for row in found):
                differ.append(f"{leaves} leaves on {ranks} ranks in {kind}")
    return differ


class Rows(torch.utils.data.Dataset[tuple[torch.Tensor, Any]]):
    """Samples that processes collate, as they do photos, in both loops.

    A TensorDataset, or a Subset of one, Lockstep reads in the process that trains, whatever workers it is given.

    Args:
        images: what there is.
        samples: of an epoch.
    """

    def __init__(self, images: torch.Tensor, samples: int) -> None:
        self._images, self._samples = images, samples

    def __getitem__(self, index: int | list[int]) -> tuple[torch.Tensor, Any]:
        """One sample, or the batch of several."""
        if isinstance(index, list):
            places = torch.tensor(index)
            return self._images[places % len(self._images)], places % 1000
        return self._images[index % len(self._images)], index % 1000

    def __len__(self) -> int:
        return self._samples


def read_by_workers(world: Any, workers: int) -> str:
    """The fingerprint of a training on pictures, in whose steps, after the first ones, a wait of the host raises.

    With workers, copies to the device read the memory that the workers write: they must neither wait nor come too late.
    """
    torch.manual_seed(0)
    run = open_run(world, "single", fingerprint_every=0, micro_batches=2)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(3 * 64 * 64, 10))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    data = Rows(torch.randn(64, 3, 64, 64, generator=torch.Generator().manual_seed(1)), 16 * 60)
    for _ in run.epochs(1):
        for step, batch in enumerate(run.batches(data, workers=workers)):
            run.backward(batch, lambda output, target: torch.nn.functional.cross_entropy(output, target % 10))
            optimizer.step()
            optimizer.zero_grad()
            torch.cuda.set_sync_debug_mode("error" if 33 <= step < 57 else "default")
    found = run.fingerprint()
    run.close()
    return found


# Epochs are longer than what is timed, so that no loop pays for the begin of one within.
def _resnet(batch: int) -> tuple[torch.nn.Module, Any]:
    from lockstep.models import resnet50

    return resnet50(num_classes=1000), Rows(torch.randn(8 * batch, 3, 224, 224), 128 * batch)


def _perceptron(batch: int) -> tuple[torch.nn.Module, Any]:
    layers = [torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 256), torch.nn.ReLU()]
    samples = 128 * batch
    data = torch.utils.data.TensorDataset(torch.randn(samples, 64), torch.arange(samples) % 10)
    return torch.nn.Sequential(*layers, torch.nn.Linear(256, 10)), data


@contextmanager
def _deterministic(on: bool) -> Iterator[None]:
    """Lets operators and graphs take kernels that add in no fixed order, as torch does by itself, or forbids it."""
    before = torch.get_deterministic_debug_mode()
    torch.set_deterministic_debug_mode("error" if on else "default")
    fix_graphs()
    try:
        yield
    finally:
        torch.set_deterministic_debug_mode(before)
        fix_graphs()


def step_times(
    world: Any, model: str, batch: int, micro_batches: int, compiled: str, steps: int = 30, first: int = 50
) -> tuple[float, float, float]:
    """Seconds of a step of Lockstep, of a plain loop, and of one that is deterministic as Lockstep is.

    Data is read anew in each step, at first into memory that is still to be page-locked. Medians of three.

    Args:
        world: this rank.
        model: its name.
        batch: samples of a step.
        micro_batches: K.
        compiled: "" for no compiler, "blocks" with ``compile=True``, or "whole" by hand. The plain loops compile the
            whole.
        steps: of a turn.
        first: steps of the first turn, which is not counted.
    """
    own_loop, data = _lockstep_loop(world, model, batch, micro_batches, compiled)
    loops = [(own_loop, True)]
    loops += [(_plain_loop(model, data, batch, bool(compiled)), deterministic) for deterministic in (False, True)]
    found: list[list[float]] = [[] for _ in loops]
    for turn in range(4):  # the first is not counted
        for (loop, deterministic), times in zip(loops, found):
            with _deterministic(deterministic):
                torch.cuda.synchronize()
                began = time.perf_counter()
                count = steps if turn else first
                for _ in range(count):
                    loop()
                torch.cuda.synchronize()
            if turn:
                times.append((time.perf_counter() - began) / count)
    own, plain, deterministic = (sorted(times)[1] for times in found)
    return own, plain, deterministic


def workers_for(name: str) -> int:
    """Processes that read the data of a model: photos take longer to collate than a step.

    None where ``/dev/shm``, through which they hand over batches, is too small.
    """
    small = Path("/dev/shm").exists() and shutil.disk_usage("/dev/shm").free < _SHARED_BYTES
    return min(8, os.cpu_count() or 1) if name == "resnet50" and not small else 0


def _lockstep_loop(world: Any, name: str, batch: int, micro_batches: int, compiled: str) -> Any:
    run = open_run(
        world,
        "single",
        global_batch=batch,
        micro_batches=micro_batches,
        precision="bf16",
        channels_last=name == "resnet50",
        compile=compiled == "blocks",
        fingerprint_every=0,
    )
    net, data = _resnet(batch) if name == "resnet50" else _perceptron(batch)
    net = torch.compile(net) if compiled == "whole" else net
    net, optimizer = run.prepare(net, torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9))
    loss_fn = torch.nn.CrossEntropyLoss()

    def steps() -> Any:
        for _ in run.epochs(100_000):
            for each in run.batches(data, workers=workers_for(name)):
                run.backward(each, loss_fn)
                optimizer.step()
                optimizer.zero_grad()
                yield

    going = steps()
    return (lambda: next(going)), data


def _plain_loop(name: str, data: Any, batch: int, compiled: bool) -> Any:
    device = torch.device("cuda", torch.cuda.current_device())
    net, _ = _resnet(1) if name == "resnet50" else _perceptron(1)
    layout = torch.channels_last if name == "resnet50" else torch.preserve_format
    net = net.to(device, memory_format=layout) if name == "resnet50" else net.to(device)
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    net = torch.compile(net) if compiled else net
    loss_fn = torch.nn.CrossEntropyLoss()
    workers = workers_for(name)
    # One epoch without end, and a batch in one call: neither new epochs nor collating hold up this loop.
    drawn = torch.utils.data.RandomSampler(data, replacement=True, num_samples=10**6 * batch)
    batches = torch.utils.data.BatchSampler(drawn, batch, drop_last=True)
    loader = torch.utils.data.DataLoader(data, batch_size=None, sampler=batches, pin_memory=True, num_workers=workers)

    def steps() -> Any:
        for inputs, labels in loader:
            inputs = inputs.to(device, non_blocking=True, memory_format=layout)
            labels = labels.to(device, non_blocking=True)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                loss = loss_fn(net(inputs), labels)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            yield

    going = steps()
    return lambda: next(going)


def idle_shares(world: Any, model: str, batch: int, steps: int = 20, first: int = 8) -> tuple[float, float]:
    """The share of the time of steps in which the device runs nothing: of a plain loop, and of Lockstep's."""
    own_loop, data = _lockstep_loop(world, model, batch, 1, "")
    found = []
    for loop, deterministic in ((_plain_loop(model, data, batch, False), False), (own_loop, True)):
        with _deterministic(deterministic):
            for _ in range(first):
                loop()
            torch.cuda.synchronize()
            trace = DeviceTrace()
            trace.start()
            for _ in range(steps):
                loop()
            torch.cuda.synchronize()
            found.append(idle_share(trace.stop(unix=0)))
    return found[0], found[1]


def idle_share(spans: Sequence[TraceSpan]) -> float:
    """The share of the time from the first span to the end of the last in which there is none.

    Raises:
        ValueError: there are none at all.
    """
    if not spans:
        raise ValueError("the profiler of the device saw nothing run")
    spans = sorted(spans, key=lambda span: span.began)
    begin = busy_until = spans[0].began
    idle = 0
    for span in spans:
        idle += max(0, span.began - busy_until)
        busy_until = max(busy_until, span.ended)
    return idle / max(1, busy_until - begin)


def photo_rate(world: Any, photos: int, copies: int, batch: int, workers: int, seconds: float) -> tuple[float, int]:
    """Photos of 500 x 375 that reach the device in a second, cut to 224 x 224 and mirrored; bytes of one file.

    Each photo is there under several names, so that an epoch has more batches than workers read ahead.
    """
    with tempfile.TemporaryDirectory(prefix="lockstep-photos-") as folder:
        size = _write_photos(Path(folder), photos, copies)
        run = open_run(world, "single", global_batch=batch, micro_batches=1)
        unused = torch.nn.Linear(1, 1)
        run.prepare(unused, torch.optim.SGD(unused.parameters(), lr=0.1))
        data = ImageFolder(folder, transform=RandomResizedCrop(224))
        steps = (each for _ in run.epochs(100_000) for each in run.batches(data, workers=workers))
        for _ in range(2 * workers):  # they begin together; later they end one after the other
            next(steps)
        count, began = 0, time.perf_counter()
        while time.perf_counter() - began < seconds:
            count += sum(len(part.data[0]) for part in next(steps).micro_batches)
        torch.cuda.synchronize()
        rate = count / (time.perf_counter() - began)
        steps.close()
        run.close()
    return rate, size


def _write_photos(folder: Path, photos: int, copies: int) -> int:
    """Writes JPEGs of two classes that are as hard to decode as photos; returns the mean size of a file in bytes."""
    generator = numpy.random.default_rng(0)
    sizes = []
    for number in range(photos):
        coarse = generator.integers(256, size=(24, 32, 3), dtype=numpy.uint8)
        smooth = numpy.asarray(Image.fromarray(coarse).resize((500, 375), Image.Resampling.BICUBIC), numpy.int16)
        noisy = numpy.clip(smooth + generator.normal(0, 8, smooth.shape), 0, 255).astype(numpy.uint8)
        path = folder / f"class{number % 2}" / f"{number}.jpg"
        path.parent.mkdir(exist_ok=True)
        Image.fromarray(noisy).save(path, "JPEG", quality=90)
        for copy in range(1, copies):
            os.link(path, path.with_stem(f"{number}-{copy}"))
        sizes.append(path.stat().st_size)
    return sum(sizes) // len(sizes)


def gradients_together(world: Any) -> tuple[bool, bool]:
    """Tells whether many tensors divided at once have the bits of a CPU, and whether a NaN in one of them is seen."""
    generator = torch.Generator().manual_seed(1)
    host = [torch.randn(1 + 37 * n, generator=generator) for n in range(200)]
    cuda, same, seen = torch.device("cuda", 0), True, True
    for number in (3.0, 7.0, 4096.0, 50257.0):
        tensors = [tensor.to(cuda) for tensor in host]
        torch._foreach_div_(tensors, torch.tensor(number, device=cuda))
        same &= all(torch.equal(found.cpu(), tensor / number) for found, tensor in zip(tensors, host))
    for entry in (float("nan"), float("inf"), -float("inf")):
        tensors = [tensor.to(cuda) for tensor in host]
        seen &= bool(all_finite(tensors, cuda))
        tensors[150][5000] = entry
        seen &= not bool(all_finite(tensors, cuda))
    return same, seen


def fold_speed(world: Any, numbers: int, leaves: int = 8) -> float:
    """GB/s that are read and written where the gradients of so many micro-batches are added in the tree's order."""
    rows = torch.ones(leaves, numbers, device="cuda")
    merges = merges_after_leaf(0, leaves, leaves)

    def fold() -> None:
        stack: list[torch.Tensor] = []
        for row, count in zip(rows, merges):
            push_leaf(stack, row, count)

    fold()
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(10):
        fold()
    torch.cuda.synchronize()
    return 10 * 3 * (leaves - 1) * rows[0].nbytes / (time.perf_counter() - began) / 1e9


def sum_speeds(
    world: Any, shared: dict[str, str], numbers: int, buckets: int = 8, steps: int = 10
) -> tuple[float, float | None, bool, str]:
    """GB/s that a rank sends by collectives and by the fused kernel, whether both gave the same bits, and the log.

    Args:
        world: this rank.
        shared: variables of the ranks.
        numbers: float32 numbers of a bucket.
        buckets: of a step.
        steps: that are timed.
    """
    from lockstep.distributed.process_group import connect, open_process_group
    from lockstep.reduce import BucketShape, OrderedReducer, open_reducer
    from lockstep.runtime.devices import choose_device

    _share(shared)
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]  # a list is enough
    logging.getLogger("lockstep.reduce").addHandler(handler)
    device = choose_device(world)
    with open_process_group(world, backend="cpu:gloo,cuda:nccl", timeout=60):
        group = dist.group.WORLD
        assert group is not None
        connect(group, device)
        ranks = world.world_size
        collectives = OrderedReducer(group, group, device)
        chosen = open_reducer("ordered", group, device, 60.0, may_fuse=True)
        shapes = [BucketShape(numbers, torch.float32)] * buckets
        values = torch.randn(numbers, generator=torch.Generator().manual_seed(world.rank)).to(device)
        speeds, totals = [], []
        for reducer in [collectives, chosen][: 1 if type(chosen) is OrderedReducer else 2]:
            reducer.allocate(shapes, 1, ranks)
            header = torch.zeros(1, dtype=torch.float64, device=device)

            def step(reducer: Any = reducer, header: torch.Tensor = header) -> None:
                reducer.begin(ranks)
                for bucket in range(buckets):
                    reducer.staging(bucket, 0).copy_(values)
                    reducer.start(bucket)
                reducer.finish(header)

            step()
            dist.barrier()
            torch.cuda.synchronize()
            sent, began = reducer.bytes_sent, time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            speeds.append((reducer.bytes_sent - sent) / (time.perf_counter() - began) / 1e9)
            totals.append(reducer.total(buckets - 1).clone())
        equal = all(torch.equal(totals[0], each) for each in totals)
        return speeds[0], speeds[1] if len(speeds) > 1 else None, equal, " ".join(lines)


def used_memory(world: Any) -> int:
    """Bytes that are in use on all cards, with those of this process."""
    used = 0
    for card in range(torch.cuda.device_count()):
        torch.zeros(1, device=torch.device("cuda", card))
        free, total = torch.cuda.mem_get_info(card)
        used += total - free
    return used


def fails(world: Any, shared: dict[str, str], how: str) -> None:
    """Ends a training in some way: killed, spins, fills or asserts."""
    from tests.simcuda import cuda

    _share(shared)
    run = open_run(world, "ddp" if world.world_size > 1 else "single", timeout=30.0)
    for batch in steps_of(run, "perceptron", 9):
        if batch.plan.step < 1 or world.rank + 1 < world.world_size:
            continue
        if how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "spins":
            torch.cuda._sleep(_SPIN_CYCLES)
        elif how == "fills":
            if cuda.is_simulated():
                cuda.limit_memory(0, 1 << 20)
            kept = []
            while True:
                kept.append(torch.empty(1 << 28, device="cuda"))
        else:
            torch.zeros(3, device="cuda")[torch.tensor([5], device="cuda")].sum().item()


def left_memory(world: Any, shared: dict[str, str], *arguments: Any) -> int:
    """Bytes of device memory that a training leaves allocated."""
    _share(shared)
    before = torch.cuda.memory_allocated()
    train(world, *arguments)
    gc.collect()
    getattr(torch._C, "_cuda_clearCublasWorkspaces", lambda: None)()  # up to 32 MB for each stream, kept for the next
    return torch.cuda.memory_allocated() - before
