"""The simulated devices find the mistakes that they are made for, and nothing in code that has none."""

import gc
import importlib.util
import itertools
import logging
import os
import re
from types import SimpleNamespace

import pytest
import torch
from tests.simcuda import cuda, nccl
from tests.simcuda.layouts import require
from tests.simcuda.trainings import job_of, open_run, steps_of, train

from lockstep.errors import ConfigError, NonFiniteError, RankError
from lockstep.strategies.layers import move_tensor


def on_another_stream(world, waits, records):
    """Writes on one stream what another reads, and frees memory that it still uses; returns what was seen."""
    with cuda.observed() as seen:
        side = torch.cuda.Stream()
        source = torch.ones(1000, device="cuda")
        with torch.cuda.stream(side):
            if waits:
                side.wait_stream(torch.cuda.default_stream())
            doubled = source * 2
            total = doubled.sum()
        if records:
            source.record_stream(side)
        del source
        torch.zeros(1000, device="cuda")
        if waits:
            torch.cuda.current_stream().wait_stream(side)
        read = total + 1
    assert float(read) == 2001
    return [what for what, _ in seen.races]


def test_a_wait_that_is_left_out_is_a_race(machine):
    (races,) = machine.run(on_another_stream, 1, False, True)
    assert any("mul" in race and "nothing orders them" in race for race in races)
    assert any("add" in race and "nothing orders them" in race for race in races)


def test_memory_that_is_given_out_too_early_is_a_race(machine):
    (races,) = machine.run(on_another_stream, 1, True, False)
    assert len(races) == 1
    assert "record_stream is missing" in races[0]


def test_ordered_streams_are_no_race(machine):
    assert machine.run(on_another_stream, 1, True, True) == [[]]


def copies(world):
    """The waits for copies, blocking and not, and for reading a number."""
    pinned, pageable = torch.ones(8).pin_memory(), torch.ones(8)
    device = torch.empty(8, device="cuda")
    found = {}
    for name, act in {
        "pinned": lambda: device.copy_(pinned, non_blocking=True),
        "pinned, blocking": lambda: device.copy_(pinned),
        "pageable": lambda: device.copy_(pageable, non_blocking=True),
        "to the host": lambda: device.cpu(),
        "item": lambda: float(device[0]),
        "nonzero": lambda: device.nonzero(),
        "an addition": lambda: device.add_(1),
    }.items():
        with cuda.observed() as seen:
            act()
        found[name] = [what for what, _ in seen.waits]
    return found


def test_the_host_waits_for_copies_of_pageable_memory_and_for_numbers(machine):
    assert machine.run(copies, 1) == [
        {
            "pinned": [],
            "pinned, blocking": ["copy to the device, blocking"],
            "pageable": ["copy to the device, pageable"],
            "to the host": ["copy to the host, pageable"],
            "item": ["item"],
            "nonzero": ["aten::nonzero"],
            "an addition": [],
        }
    ]


def not_finite(world):
    """Trains on data of which the samples of one step have no finite loss."""
    run = open_run(world, "single", fingerprint_every=0)
    model, few, loss_fn = job_of("perceptron")
    values, labels = (each.repeat(8, *[1] * (each.dim() - 1)) for each in few.tensors)
    values[16 * 3] = float("nan")
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in run.epochs(1):
        for batch in run.batches(torch.utils.data.TensorDataset(values, labels), shuffle=False):
            run.backward(batch, loss_fn)
            optimizer.step()
            optimizer.zero_grad()


def test_a_loss_that_is_not_finite_is_read_some_steps_later(machine):
    """At step 15 the flags of steps 0 to 7 are read, which have long arrived by then."""
    with pytest.raises(NonFiniteError, match=r"loss of step 3 is nan .*samples 48, .*back 12 steps later"):
        machine.run(not_finite, 1)


@pytest.mark.slow
def test_asynchronous_workers_read_flags_that_lie_on_two_devices(machine):
    options = {"parameter_server": {"mode": "asynchronous"}, "fingerprint_every": 0}
    found = machine.run(train, 3, "perceptron", "parameter_server", options)
    assert all(each.losses for each in found)


def mixed(world):
    """Adds a tensor on the CPU to one on a device."""
    torch.ones(3, device="cuda").add(torch.ones(3))


def test_a_tensor_on_the_cpu_is_refused_on_a_device(machine):
    with pytest.raises(RuntimeError, match="same device, but found at least two devices, cuda:0 and cpu"):
        machine.run(mixed, 1)


def first_uses(world):
    """Uses two communicators of the same ranks for the first time, in two orders."""
    from lockstep.distributed.process_group import open_process_group

    nccl.FIRST_USE_SECONDS = 0.5
    torch.cuda.set_device(world.local_rank)
    with open_process_group(world, backend="cpu:gloo,cuda:nccl", timeout=20):
        groups = [torch.distributed.new_group([0, 1]) for _ in range(2)]
        values = torch.ones(1, device="cuda")
        for group in groups if world.rank == 0 else groups[::-1]:
            torch.distributed.all_reduce(values, group=group)
        return float(values)


def test_a_first_use_in_two_orders_is_a_deadlock(machine):
    with pytest.raises(RuntimeError, match="is used first here, and not by its other ranks: deadlock"):
        machine.run(first_uses, 2)


@pytest.mark.parametrize("layout", ["ddp 2", "fsdp 2", "data x layers"])
def test_a_layout_is_equal_to_one_device(trained, layout):
    (reference,) = trained("single", "convolutions")
    require([reference], reference, "single")
    require(trained(layout, "convolutions"), reference, layout)


@pytest.mark.parametrize(
    "mistake", ["no wait", "no pinned memory", pytest.param("no record_stream", marks=pytest.mark.slow)]
)
def test_mistakes_in_streams_and_copies_are_found(machine, mistake):
    found = machine.run(train, 2, "perceptron", "ddp", {}, False, mistake)
    seen = [each.waits if mistake == "no pinned memory" else each.races for each in found]
    assert all(seen)


class Pictures(torch.utils.data.Dataset):
    """Samples that are too large to be sent by value, with labels that are not."""

    def __len__(self):
        return 48

    def __getitem__(self, index):
        return torch.full((1, 80, 80), index / 48.0), index % 5


def reading(world, workers, refuses=False):
    """Trains on what workers read; returns the fingerprint, the waits, and what was page-locked and let go of."""
    runtime = torch.cuda.cudart()
    locked, unlocked = [], []

    def register(address, size, flags):
        if refuses:
            return 1
        locked.append(address)
        return runtime.cudaHostRegister(address, size, flags)

    def unregister(address):
        unlocked.append(address)
        return runtime.cudaHostUnregister(address)

    torch.cuda.cudart = lambda: SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    torch.manual_seed(0)
    run = open_run(world, "single", fingerprint_every=0)
    model, data = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(6400, 5)), Pictures()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs(4):
        with cuda.observed() as seen:
            for batch in run.batches(data, workers=workers):
                assert all(value.is_pinned() for part in batch.micro_batches for value in part.data)
                run.backward(batch, torch.nn.functional.cross_entropy)
                optimizer.step()
                optimizer.zero_grad()
                del batch
        # The first rehearsal puts samples together in memory of its own.
        assert epoch == 0 or not any("copy to the device" in what for what, _ in seen.waits)
    found = run.fingerprint()
    run.close()
    gc.collect()
    return found, len(set(locked)), sorted(locked) == sorted(unlocked)


@pytest.mark.slow
def test_batches_are_copied_to_a_gpu_out_of_the_memory_that_workers_write(machine):
    ((expected, *nothing),) = machine.run(reading, 1, 0)
    assert nothing == [0, True]
    ((found, locked, all_unlocked),) = machine.run(reading, 1, 2)
    assert (found, all_unlocked) == (expected, True)
    assert 2 <= locked <= 34, "two workers have 17 buffers each"
    ((found, *nothing),) = machine.run(reading, 1, 2, True)
    assert (found, nothing) == (expected, [0, True])


@pytest.mark.parametrize(
    "mistake",
    [
        pytest.param("no wait for a gather", marks=pytest.mark.slow),
        "no record_stream",
        pytest.param("no wait between streams", marks=pytest.mark.slow),
    ],
)
def test_mistakes_in_the_streams_of_fsdp_are_found(machine, mistake):
    found = machine.run(train, 2, "decoder", "fsdp", {"micro_batches": 4}, False, mistake)
    assert all(each.races for each in found)


@pytest.mark.slow
def test_fsdp_gathers_the_next_block_while_one_computes(machine):
    """At the beginning of a micro-batch the first block is asked for with what belongs to none, and the second before
    the first computes; the last block of the forward pass is kept."""
    found = machine.run(train, 2, "decoder", "fsdp", {"micro_batches": 2}, True)
    for each in found:
        launches = [name.split()[0] for name in each.order if "all_gather" in name or name.endswith(" 0")]
        gathers = [at for at, name in enumerate(launches) if "all_gather" in name]
        computed = [after - before - 1 for before, after in itertools.pairwise(gathers)]
        begin = computed.index(0)
        assert computed[begin + 1] < 10 < computed[begin + 2]  # the embedding, and both blocks with the loss
        assert not each.races


def settings(world):
    """How a run has set torch up for CUDA: deterministic, memory filled before it is written, compiler imported."""
    import sys

    from tests.simcuda.trainings import open_run

    from lockstep.core.fingerprint import device_model

    torch.backends.fp32_precision = "tf32"
    open_run(world, "single").close()
    operators = torch.backends.cuda.matmul, torch.backends.cudnn.conv, torch.backends.cudnn.rnn
    assert [each.fp32_precision for each in operators] == ["ieee"] * 3
    filled = torch.utils.deterministic.fill_uninitialized_memory
    os.environ["NVIDIA_TF32_OVERRIDE"] = "0"
    name = device_model(torch.device("cuda", 0))
    assert re.search(r"\(132 multiprocessors\) CUDA 13\.0 .*cuBLAS .+ cuDNN .*NVIDIA_TF32_OVERRIDE=0$", name)
    imported = "torch._inductor" in sys.modules
    import torch._inductor.config as compiler

    return torch.are_deterministic_algorithms_enabled(), filled, imported, compiler.deterministic


def settings_of_loaded_compiler(world):
    """True where the compiler, imported before the runs, chooses kernels by rules that do not look at their speed."""
    import torch._inductor.config as compiler

    found = []
    for deterministic in (True, False):
        open_run(world, "single", deterministic=deterministic).close()
        found.append(compiler.deterministic)
    return found


def changed_settings(world, change):
    """The message on a setting that user code changes between two steps."""
    try:
        for _ in steps_of(open_run(world, "single"), "perceptron", 1):
            if change == "benchmark":
                torch.backends.cudnn.benchmark = True
            elif change == "deterministic":
                torch.use_deterministic_algorithms(False)
            elif change == "tf32":
                torch.set_float32_matmul_precision("high")
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "said"),
    [
        pytest.param(
            "benchmark",
            "torch.backends.cudnn.benchmark was False after lockstep.init, and is True now",
            marks=pytest.mark.slow,
        ),
        (
            "deterministic",
            r"torch.get_deterministic_debug_mode\(\) was 2 .* lockstep.init\(deterministic=False\)",
        ),
        ("tf32", r"may use TF32 was \(False, False\) .* is \(True, False\) now.*precision='tf32'"),
    ],
)
def test_settings_that_change_the_bits_are_refused_after_init(machine, change, said):
    (found,) = machine.run(changed_settings, 1, change)
    assert re.search(said, found), found


def short_of_memory(world):
    """The warnings of a run in which an operator finds no memory and goes on in another way."""
    said = []
    logging.getLogger("lockstep.numerics.precision").addFilter(lambda record: said.append(record.getMessage()) or True)
    run = open_run(world, "single")
    for _ in steps_of(run, "perceptron", 2):
        cuda.limit_memory(0, 1 << 20)
        try:
            torch.empty(1 << 28, device="cuda")
        except torch.OutOfMemoryError:
            cuda.limit_memory(0, 1 << 34)
    run.fingerprint()
    return [each for each in said if "had too little memory" in each]


def test_a_gpu_that_was_short_of_memory_is_told_since_cudnn_goes_on_in_another_way(machine):
    (said,) = machine.run(short_of_memory, 1)
    assert said


@pytest.mark.slow
def test_memory_is_not_filled_and_the_compiler_not_imported_for_deterministic_kernels(machine):
    assert machine.run(settings, 1) == [(True, False, False, True)]


@pytest.mark.slow
def test_the_compiler_chooses_no_kernel_by_its_speed(machine):
    """set_deterministic_debug_mode leaves this switch as it is: matrices were padded where that was faster."""
    assert machine.run(settings_of_loaded_compiler, 1) == [[True, False]]


def norm_launches(world):
    """The launches for the squares of a gradient's rows, and whether rows have the bits of the whole."""
    from lockstep.core.summation_tree import row_squares

    gradient = torch.randn(6, 5, 3, generator=torch.Generator().manual_seed(0)).cuda()
    with cuda.observed() as seen:
        whole = row_squares(gradient)
        launched = set(seen.launches)
    return launched, torch.equal(row_squares(gradient[2:4]).cpu(), whole[2:4].cpu())


def test_squares_of_rows_are_added_one_by_one_on_a_device(machine):
    ((launched, equal),) = machine.run(norm_launches, 1)
    assert equal
    assert not [name for name in launched if "sum" in name or "dot" in name or "mm" in name]


def normalising(world):
    """The waits of the host where a synchronised BatchNorm computes, forward and backward."""
    from lockstep.numerics.sync_batch_norm import convert_sync_batch_norm

    norm = convert_sync_batch_norm(torch.nn.BatchNorm1d(3)).cuda()
    values = torch.arange(12.0).view(4, 3).cuda().requires_grad_()
    with cuda.observed() as seen:
        norm(values).square().sum().backward()
    return dict(seen.waits)


def test_the_host_does_not_wait_in_a_synchronised_batch_norm(machine):
    assert machine.run(normalising, 1) == [{}]


def computing(world):
    """The waits of the host in losses, by what they return, and in normalising photos; not in the first call."""
    from lockstep.data import Normalize
    from lockstep.run.step import sum_and_weight, with_exact_mean

    output, target = torch.randn(4, 5).cuda(), torch.arange(4).cuda()
    photos, normalize = torch.zeros(4, 3, 2, 2, dtype=torch.uint8).cuda(), Normalize([0.5] * 3, [0.25] * 3)
    weights = torch.ones(5).cuda()
    functions = {
        "a mean": torch.nn.functional.cross_entropy,
        "a number a sample": lambda output, target: output.sum(1),
        "a sum and a count": lambda output, target: (output.sum(), len(target)),
        "class weights": with_exact_mean(torch.nn.CrossEntropyLoss(weights, ignore_index=2)),
        "photos": lambda output, target: normalize(photos).mean(),
    }
    found = {}
    for name, function in functions.items():
        function(output, target)
        with cuda.observed() as seen:
            sum_and_weight(function(output, target), 4)
        found[name] = dict(seen.waits)
    return found


def test_the_host_does_not_wait_in_a_loss_or_for_photos(machine):
    (found,) = machine.run(computing, 1)
    assert found == {name: {} for name in found}


def unsent(world):
    """Trains with fsdp where the sums of some gradients are lost."""
    from lockstep.strategies.fsdp.gathering import Gathering

    Gathering.take = lambda gathering: {}
    train(world, "perceptron", "fsdp", {})


def test_a_parameter_that_was_used_and_has_no_gradient_is_an_error(machine):
    with pytest.raises(RankError, match=r"'0\.weight' was used in this step, and no gradient of it was"):
        machine.run(unsent, 2)


def test_dp_copies_a_micro_batch_straight_to_the_device_of_its_replica(machine):
    (found,) = machine.run(train, 1, "perceptron", "dp", {"dp": {"replicas": 2}}, True)
    for device in ("cuda:0", "cuda:1"):
        assert any(name.startswith(f"copy_ to the device on {device}") for name in found.order)


def fused(world, everywhere):
    """Trains with the fused kernel turned on, for which these devices have no memory; what came out, and the log."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lockstep.reduce").addHandler(handler)
    os.environ["LOCKSTEP_FUSED_REDUCTION"] = "1" if everywhere or world.rank else "0"
    return train(world, "perceptron", "ddp", {}).fingerprint, lines


@pytest.mark.parametrize("everywhere", [pytest.param(True, marks=pytest.mark.slow), False])
def test_gradients_are_summed_by_collectives_where_the_fused_kernel_is_not_possible(machine, trained, everywhere):
    first, second = machine.run(fused, 2, everywhere)
    (reference,) = trained("single", "perceptron")
    assert first[0] == second[0] == reference.fingerprint
    assert len(first[1]) == 1
    assert first[1][0].startswith("Gradients are summed by collectives, not by the fused kernel: ")
    assert second[1] == []


def fused_streams(world, waits):
    """Sums buckets by the fused reducer, with an operator in the place of its kernel; returns the races."""
    import torch.distributed as dist

    from lockstep.distributed.process_group import open_process_group
    from lockstep.reduce import BucketShape, NodeLayout, fused

    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)

    class Memory:
        def __init__(self, size):
            self.own, self.addresses = torch.zeros(size, dtype=torch.uint8, device=device), [0, 0]

        def barrier(self):
            pass

    def add_shard(table, *given):
        next(turns)._outgoing.add_(table[0] * 0)

    fused.add_shard = add_shard
    if not waits:
        torch.cuda.Stream.wait_event = lambda stream, event: None
    shapes = [BucketShape(numel, torch.float32) for numel in (5, 100, 3000)]
    with cuda.observed() as seen, open_process_group(world, backend="cpu:gloo,cuda:nccl", timeout=20):
        reducer = fused.FusedReducer(dist.group.WORLD, device, Memory)
        reducer.allocate(shapes, 1, 5)
        turns = itertools.cycle(reducer._buckets)
        for leaves in (4, 5, 4):
            reducer.begin(leaves)
            for bucket in range(len(shapes)):
                for slot in range(len(NodeLayout.of(leaves, 2).ranks[world.rank])):
                    reducer.staging(bucket, slot).fill_(1.0)
                reducer.start(bucket)
            reducer.finish(torch.zeros(1, dtype=torch.float64, device=device))
            for bucket in range(len(shapes)):
                reducer.total(bucket).mul_(2.0)
                reducer.renew(bucket)
        return sorted(what for what, _ in seen.races), sorted(what for what, _ in seen.waits)


@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="Triton is not installed")
def test_the_fused_reducer_orders_its_streams(machine):
    for races, waits in machine.run(fused_streams, 2, True):
        assert races == []
        assert waits == []
    assert all(races for races, _ in machine.run(fused_streams, 2, False))


class Pooled(torch.nn.Sequential):
    """Pools to 2 x 2, which adds in no fixed order on CUDA."""

    def __init__(self):
        layers = (
            torch.nn.Conv2d(1, 2, 3),
            torch.nn.AdaptiveAvgPool2d(2),
            torch.nn.Flatten(),
            torch.nn.Linear(8, 5),
        )
        super().__init__(*layers)


def pooling(world, deterministic):
    """One step of a model whose gradient has no fixed order; returns the level."""
    from tests.simcuda.trainings import job_of, open_run

    run = open_run(world, "single", deterministic=deterministic)
    _, data, loss_fn = job_of("convolutions")
    own = Pooled()
    _, optimizer = run.prepare(own, torch.optim.SGD(own.parameters(), lr=0.1))
    for batch in run.batches(data):
        run.backward(batch, loss_fn)
        optimizer.step()
    run.close()
    return run.strategy.level.name


def test_an_operator_without_a_fixed_order_is_named_with_its_layer_and_what_to_do(machine):
    with pytest.raises(ConfigError) as caught:
        machine.run(pooling, 1, True)
    for words in (
        "adaptive_avg_pool2d_backward_cuda",
        "'1' (AdaptiveAvgPool2d)",
        "nn.AvgPool2d",
        "deterministic=False",
    ):
        assert words in str(caught.value)
    assert machine.run(pooling, 1, False) == ["STATISTICAL"]


def views_moved(world):
    """For each view: is it on the other device with equal values, strides, alignment and derivatives?"""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    held = torch.arange(60.0, device=first).requires_grad_()
    rows = held.view(6, 10)
    views = [rows[:, 3:], rows[3], held[1:41].view(4, 10), rows.t(), rows[2:3].expand(4, 10), rows]
    found = []
    for view in views:
        moved = move_tensor(second, view)
        gradients = torch.autograd.grad((moved**3).sum(), held, create_graph=True)
        gradients += torch.autograd.grad((gradients[0] ** 2).sum(), held)
        expected = torch.autograd.grad((view**3).sum(), held, create_graph=True)
        expected += torch.autograd.grad((expected[0] ** 2).sum(), held)
        found.append(
            moved.device == second
            and torch.equal(moved.cpu(), view.cpu())
            and moved.stride() == view.stride()
            and moved.data_ptr() % 64 == view.data_ptr() % 64
            and all(torch.equal(one.cpu(), other.cpu()) for one, other in zip(gradients, expected))
        )
    return found


def test_what_moves_between_the_devices_of_layers_keeps_its_strides_and_alignment(machine):
    assert machine.run(views_moved, 1) == [[True] * 6]


def values_without_a_place(world):
    """Conjugates and tensors under ``torch.func``, whose memory cannot be asked for, on the other device."""
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    rows = torch.arange(12.0, device=first).view(3, 4)
    turned = torch.complex(rows, rows + 1).conj()
    scaled = torch.func.vmap(lambda row: 2 * move_tensor(second, row[1:]))(rows)
    _, tangent = torch.func.jvp(lambda each: move_tensor(second, each[:, 1:]) ** 2, (rows,), (rows,))
    return (
        torch.equal(move_tensor(second, turned[:, 1:]).cpu(), turned[:, 1:].cpu())
        and torch.equal(scaled.cpu(), 2 * rows[:, 1:].cpu())
        and torch.equal(tangent.cpu(), (2 * rows * rows)[:, 1:].cpu())
    )


def test_conjugates_and_tensors_under_torch_func_move_between_the_devices_of_layers(machine):
    assert machine.run(values_without_a_place, 1) == [True]
