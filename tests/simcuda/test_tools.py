"""Saving, timelines, measurements and reports on simulated devices."""

import gc
import json
import logging
import os
from pathlib import Path

import pytest
import torch
from tests.simcuda import cuda, nccl
from tests.simcuda.layouts import functions_of
from tests.simcuda.trainings import (
    fed,
    job_of,
    open_run,
    rehearse_no_more,
    saving,
    steps_of,
    train,
    trained_for,
)
from torch import nn

from lockstep.data import ImageArrays, Normalize
from lockstep.errors import ConfigError

pytestmark = pytest.mark.slow


LAYOUT_AFTER_LAYOUT = {
    "fp32": [(2, "ddp", {}), (3, "fsdp", {}), (2, "pipeline", {}), (3, "parameter_server", {})],
    "fp16": [
        (1, "dp", {"dp": {"replicas": 2}}),
        (4, "hybrid", {"mesh": "data=2,pipeline=2"}),
        (1, "layers", {"layers": {"devices": 3}}),
        (2, "hybrid", {"mesh": "data=2,layers=2"}),
    ],
    "bf16": [
        (4, "fsdp", {}),
        (4, "hybrid", {"mesh": "fsdp=2,pipeline=2"}),
        (4, "ddp", {}),
        (1, "single", {}),
    ],
}


@pytest.mark.parametrize("precision", LAYOUT_AFTER_LAYOUT)
def test_a_run_is_saved_and_resumed_in_another_layout(machine, tmp_path, precision):
    recipe, steps = {"precision": precision}, (2, 4, 6, 8)
    ((expected, _),) = machine.run(saving, 1, "single", recipe, 8, str(tmp_path / "whole"), "")
    for stop, (ranks, strategy, options) in zip(steps, LAYOUT_AFTER_LAYOUT[precision]):
        options = {**options, **recipe}
        found = machine.run(saving, ranks, strategy, options, stop, str(tmp_path / "parts"), "auto")
        assert [races for _, races in found] == [{}] * ranks
    assert {fingerprint for fingerprint, _ in found} == {expected}


class Shifted(nn.Linear):
    """Adds what the loop has put in the place of a tensor on the CPU."""

    def __init__(self):
        super().__init__(16, 5)
        self.shift, self.history, self.is_set = torch.zeros(5), [torch.zeros(5)], False

    def forward(self, x):
        y = super().forward(x)
        return y + self.shift + self.history[-1] if self.is_set else y


def keeping(world, folder, stop):
    """Trains two epochs to a step, with tensors of the device in attributes of a module; returns the fingerprint."""
    run = open_run(world, "ddp", directory=folder, resume="auto")
    _, data, loss_fn = job_of("perceptron")
    torch.manual_seed(0)
    model = Shifted()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.epochs(2):
        for batch in run.batches(data):
            run.backward(batch, loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            model.shift, model.is_set = model.bias.detach().clone(), True
            model.history.append(model.weight.detach().mean(1))
            if run.position.step + 1 == stop:
                run.save(wait=True)
                run.close()
                return ""
    return run.fingerprint()


def test_tensors_of_the_device_in_attributes_are_there_again_in_the_resumed_run(machine, tmp_path):
    (whole,) = machine.run(keeping, 1, str(tmp_path / "whole"), 0)
    machine.run(keeping, 2, str(tmp_path / "parts"), 2)
    assert machine.run(keeping, 2, str(tmp_path / "parts"), 0) == [whole] * 2


FROM_1_TO_4 = [(1, "single"), (2, "ddp"), (3, "pipeline"), (4, "fsdp")]


def drawn(world, strategy, folder):
    """Trains with a timeline; returns the races."""
    with cuda.observed() as seen:
        trained_for(world, strategy, {"profile": "2:3", "directory": folder}, 8)
    return dict(seen.races)


@pytest.mark.parametrize(("ranks", "strategy"), FROM_1_TO_4)
def test_a_timeline_is_written(machine, tmp_path, ranks, strategy):
    assert machine.run(drawn, ranks, strategy, str(tmp_path)) == [{}] * ranks
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    spans = [each for each in events if each.get("name") == "backward k0"]
    assert len(spans) >= 3
    assert all(each["dur"] > 0 for each in spans)


def out_of_memory(world):
    """Trains on a device that has hardly any memory; returns what the report of the launcher says, and what is held."""
    from lockstep.launch.outcome import RankEnd, judge, report
    from lockstep.runtime.control import StopReason
    from lockstep.runtime.error_record import record_of

    held = torch.cuda.memory_allocated()
    try:
        cuda.limit_memory(0, 12_000)
        trained_for(world, "single", {}, 4)
    except torch.OutOfMemoryError as error:
        ends = [RankEnd(rank=0, pid=1, code=4, time=1.0, record=record_of(error, rank=0, beat=None))]
    gc.collect()
    lines = report(judge(ends, StopReason.NONE), ends, StopReason.NONE, Path("logs"))
    return lines, torch.cuda.memory_allocated() - held


def test_a_device_without_memory_is_told_with_the_data_and_what_needs_less(machine):
    ((lines, held),) = machine.run(out_of_memory, 1)
    text = "\n".join(lines)
    assert lines[0].startswith("rank 0 failed first")
    assert "OutOfMemoryError: CUDA out of memory. Tried to allocate" in text
    assert "The data of a micro-batch: (float32 [2, 1, 8, 8], int64 [2])." in text
    assert "Two settings need less memory on each device: more micro_batches" in text
    assert held < 12_000


def examined(world):
    """The doctor's findings, and the exchanges it measures."""
    from lockstep.doctor import look_at_software, measure

    os.environ.update(LOCAL_WORLD_SIZE=str(world.world_size), LOCKSTEP_RENDEZVOUS=world.rendezvous)
    os.environ.update(LOCKSTEP_RUN_ID="simcuda")
    return [(each.subject, each.found) for each in look_at_software()], measure()


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_doctor_finds_devices_and_measures(machine, ranks):
    for found, measured in machine.run(examined, ranks):
        devices = [text for name, text in found if name == "devices"]
        assert len(devices) == 4
        assert devices[0].startswith("0: Simulated CUDA, 16 GiB of 16 GiB free")
        assert ("backends", "gloo, nccl") in found
        assert measured["large"] > 0


def examined_on_one_device(world):
    """As ``examined``, with ``--devices 3,3``; returns what is measured, and the device."""
    os.environ["LOCKSTEP_DEVICES"] = "3,3"
    _, measured = examined(world)
    return measured["large"], torch.cuda.current_device()


def test_the_doctor_measures_between_ranks_that_share_a_device(machine):
    for seconds, device in machine.run(examined_on_one_device, 2):
        assert seconds > 0
        assert device == 3


def timed(world, strategy):
    """Phases that ``lockstep scale`` times in a training."""
    from lockstep.scale.rank import StepObserver

    run = open_run(world, strategy)
    observer = StepObserver(run)
    for _ in steps_of(run, "perceptron", 2):
        observer.end_step()
    run.close()
    return len(observer.clock.steps)


@pytest.mark.parametrize(("ranks", "strategy"), FROM_1_TO_4)
def test_scale_times_the_phases_of_steps(machine, ranks, strategy):
    assert machine.run(timed, ranks, strategy) == [6] * ranks


def offloaded(world):
    """Trains with the rows in the host's memory."""
    from lockstep.strategies.fsdp import FullyShardedDataParallel

    levels = []
    release = FullyShardedDataParallel.release

    def noted(strategy):
        levels.append(strategy.level.name)
        release(strategy)

    FullyShardedDataParallel.release = noted
    return train(world, "perceptron", "fsdp", {"fsdp": {"cpu_offload": True}}), levels


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_offloaded_rows_are_trained_at_level_b(machine, trained, ranks):
    """Of each of six parameters the rows go to the device for each micro-batch, and for the norm of the gradients; the
    gradient comes back, and so does one factor for all gradients."""
    (reference,) = trained("single", "perceptron")
    for each, levels in machine.run(offloaded, ranks):
        assert (each.fingerprint, levels) == (reference.fingerprint, ["TOLERANCE"])
        assert each.races == {}
        waits = functions_of(each.waits)
        # The last of four ranks has no rows of two parameters
        assert waits.pop("squares_of_rows") <= each.steps * 6
        assert waits == {
            "gather": each.steps * 6 * -(-8 // ranks),
            "_finish": each.steps * 6,
            "clip": each.steps,
        }


def sharing(world, strategy, options, devices):
    """Trains with ranks that share devices; returns what tells that it was so, and the number of communicators."""
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    os.environ["LOCKSTEP_DEVICES"] = devices
    found = train(world, "perceptron", strategy, options)
    told = [line for line in lines if "Some GPUs are given to several ranks" in line]
    return (
        found.fingerprint,
        torch.cuda.current_device(),
        os.environ["NCCL_HOSTID"],
        len(nccl._opened),
        len(told),
    )


def test_ranks_or_replicas_share_a_device_that_is_named_twice(machine, trained):
    (reference,) = trained("single", "perceptron")
    expected = reference.fingerprint
    in_shares = {"dp": {"replicas": 2}}
    assert machine.run(sharing, 1, "dp", in_shares, "0,0") == [(expected, 0, "lockstep-0", 0, 1)]
    assert machine.run(sharing, 2, "ddp", {}, "0,0") == [
        (expected, 0, "lockstep-0", 1, 1),
        (expected, 0, "lockstep-1", 1, 0),
    ]
    assert machine.run(sharing, 2, "hybrid", {"mesh": "data=2,layers=2"}, "0,0,1,2") == [
        (expected, 0, "lockstep-0", 1, 1),
        (expected, 1, "lockstep-1", 1, 0),
    ]


class Branches(torch.nn.Sequential):
    """Convolutions beside a layer that is never called."""

    def __init__(self):
        model, _, _ = job_of("convolutions")
        super().__init__(*model)
        self.never = torch.nn.Linear(2, 2)

    def forward(self, images):
        """Calls all but the last."""
        for layer in [*self][:-1]:
            images = layer(images)
        return images


def loop(world, strategy, what):
    """Steps of a loop that uses more of Lockstep; returns the fingerprint, and what the host waited for in them."""
    from torch.nn.functional import cross_entropy

    torch.manual_seed(0)
    labels, images = torch.arange(48) % 5, torch.randint(256, (48, 1, 8, 8), dtype=torch.uint8)
    data = ImageArrays(images, labels, classes="abcde", name="x", device_transform=Normalize((0.5,), (0.25,)))
    model, named = Branches() if what == "unused" else job_of("convolutions")[0], {}
    if what == "metrics":
        named = {"also": {"right": lambda output, target: ((output.argmax(1) == target).sum(), len(target))}}
    if what == "whole batch":
        named = {"whole_batch": True}

    def loss(output, target):
        total = cross_entropy(output, target, reduction="sum")
        return total / len(target) if what == "whole batch" else (total, len(target))

    run = open_run(world, strategy, fingerprint_every=0)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for epoch in run.epochs(2):
        if epoch == 1:
            rehearse_no_more(run)
        with cuda.observed() as seen:
            for batch in run.batches(data):
                run.backward(batch, loss, **named)
                optimizer.step()
                optimizer.zero_grad()
    found = run.fingerprint(), functions_of(seen.waits), dict(seen.races)
    run.close()
    return found


@pytest.mark.parametrize("what", ["a loss with a count", "metrics", "whole batch", "unused"])
@pytest.mark.parametrize(("ranks", "strategy"), [*FROM_1_TO_4, (1, "dp")])
def test_the_host_does_not_wait_for_what_a_loop_may_use_besides(machine, ranks, strategy, what):
    """Photos that are normalised on the device, a loss that gives sum and count, metrics, a loss of the whole batch."""
    if strategy == "pipeline" and what in ("whole batch", "unused"):
        strategy, ranks = "ddp", 3  # the one needs the whole model, the other is no chain of modules
    (reference,) = machine.run(loop, 1, "single", what)
    for fingerprint, waits, races in machine.run(loop, ranks, strategy, what):
        assert (fingerprint, races) == (reference[0], {})
        if what == "unused" and ranks > 1:
            assert waits == {"reduce" if strategy == "ddp" else "_finish": 3}
        else:
            assert waits == {}


@pytest.mark.parametrize("place", ["device", "made there"])
@pytest.mark.parametrize(("ranks", "strategy"), [(1, "single"), (2, "ddp")])
def test_samples_may_be_on_the_device(machine, ranks, strategy, place):
    ((expected, _),) = machine.run(fed, 1, "single", "host")
    assert machine.run(fed, ranks, strategy, place) == [(expected, {})] * ranks


def compiled_by_hand(world, mode):
    """The message of run.prepare on a model with a compiled layer."""
    run = open_run(world, "single")
    model, _, _ = job_of("perceptron")
    model[0] = torch.compile(model[0], mode=mode)
    try:
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    except ConfigError as error:
        return str(error)
    return ""


def test_cuda_graphs_of_the_compiler_are_refused(machine):
    """Sums of gradients were wrong on an H200, without a word."""
    assert "'0' was compiled with CUDA graphs" in machine.run(compiled_by_hand, 1, "reduce-overhead")[0]
    assert machine.run(compiled_by_hand, 1, "default") == [""]
