"""Saving, timelines, measurements and reports on simulated devices."""

import json
import os

import pytest
import torch
from tests.simcuda import cuda, nccl
from tests.simcuda.trainings import job_of, open_run, saving, train, trained_for

pytestmark = pytest.mark.slow


def test_a_run_is_saved_and_resumed_in_another_layout(machine, tmp_path):
    ((expected, _),) = machine.run(saving, 1, "single", {}, 8, str(tmp_path / "whole"), "")
    layouts = [(2, "ddp", {}), (3, "fsdp", {}), (2, "pipeline", {}), (3, "parameter_server", {})]
    for steps, (ranks, strategy, options) in zip((2, 4, 6, 8), layouts):
        found = machine.run(saving, ranks, strategy, options, steps, str(tmp_path / "parts"), "auto")
        assert [races for _, races in found] == [{}] * ranks
    assert {fingerprint for fingerprint, _ in found} == {expected}


def test_a_timeline_is_written(machine, tmp_path):
    machine.run(trained_for, 2, "ddp", {"profile": "2:3", "directory": str(tmp_path)}, 8)
    events = json.loads((tmp_path / "timeline.json").read_text())["traceEvents"]
    names = {each.get("name") for each in events}
    assert "backward k0" in names


def out_of_memory(world):
    """Trains on a device that has hardly any memory."""
    cuda.limit_memory(0, 4_000)
    trained_for(world, "single", {}, 4)


def test_a_device_without_memory_says_so(machine):
    with pytest.raises(torch.OutOfMemoryError, match=r"CUDA out of memory\. Tried to allocate") as caught:
        machine.run(out_of_memory, 1)
    assert "trained_for" in str(caught.value.__notes__)


def examined(world):
    """What the doctor finds, and the exchanges it measures."""
    from lockstep.doctor import look_at_software, measure

    os.environ.update(LOCAL_WORLD_SIZE=str(world.world_size), LOCKSTEP_RENDEZVOUS=world.rendezvous)
    os.environ.update(LOCKSTEP_RUN_ID="simcuda")
    return [(each.subject, each.found) for each in look_at_software()], measure()


def test_the_doctor_finds_devices_and_measures(machine):
    for found, measured in machine.run(examined, 2):
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


def timed(world):
    """Phases that ``lockstep scale`` times in a training."""
    from lockstep.scale.rank import StepObserver

    run = open_run(world, "ddp")
    observer = StepObserver(run)
    model, data, loss_fn = job_of("perceptron")
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.epochs(2):
        for batch in run.batches(data):
            run.backward(batch, loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            observer.end_step()
    run.close()
    return len(observer.clock.steps)


def test_scale_times_the_phases_of_steps(machine):
    assert machine.run(timed, 2) == [6, 6]


def offloaded(world):
    """Trains with the rows in the host's memory; returns the fingerprint and the level."""
    torch.manual_seed(0)
    run = open_run(world, "fsdp" if world.world_size > 1 else "single", fsdp={"cpu_offload": True})
    model, data, loss_fn = job_of("convolutions")
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in run.epochs(2):
        for batch in run.batches(data):
            run.backward(batch, loss_fn)
            run.clip_gradients(0.5)
            optimizer.step()
            optimizer.zero_grad()
    found = run.fingerprint()
    run.close()
    return found, run.strategy.level.name


def test_offloaded_rows_are_trained_at_level_b(machine):
    ((expected, _),) = machine.run(offloaded, 1)
    assert machine.run(offloaded, 2) == [(expected, "TOLERANCE")] * 2


def sharing(world):
    """Trains with two ranks on one device; returns what tells that it was so, and the number of communicators."""
    os.environ["LOCKSTEP_DEVICES"] = "0,0"
    strategy = "ddp" if world.world_size > 1 else "dp"
    found = train(world, "perceptron", strategy, {"dp": {"replicas": 2}})
    return found.fingerprint, torch.cuda.current_device(), os.environ["NCCL_HOSTID"], len(nccl._opened)


def test_two_ranks_or_replicas_share_a_device_that_is_named_twice(machine):
    expected = machine.run(sharing, 1)[0][0]
    first, second = machine.run(sharing, 2)
    assert first == (expected, 0, "lockstep-0", 1)
    assert second == (expected, 0, "lockstep-1", 1)
