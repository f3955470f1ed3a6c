"""Asynchronous workers and servers on real ranks. All cases of a world size share one world."""

import logging
import os
import select
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import begin, correct, dataset, network
from torch import nn

from lockstep.errors import ConfigError
from lockstep.runtime.lazy_compiler import postpone_compiler

STALENESS, STEPS = 2, 12


def asynchronous(servers=1, staleness=0, **options):
    told = {"mode": "asynchronous", "servers": servers, "staleness": staleness, "snapshot_every": 0}
    return {"strategy": "parameter_server", "parameter_server": told, **options}


def wide():
    """More than half of its values are in one matrix, which two servers share."""
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 3))


def trained(options, make=network, optimizer=torch.optim.SGD, samples=53, resume=""):
    """Two epochs, each with a ragged last step of two micro-batches; what came of it, by name."""
    schedule = lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 6)  # noqa: E731  # handed on
    run, _, stepped, scheduler = begin(make(), optimizer, schedule, resume=resume, **options)
    losses = []
    for _ in run.epochs(2):
        for batch in run.batches(dataset(samples)):
            losses.append(float(run.backward(batch, nn.functional.cross_entropy)))
            stepped.step()
            stepped.zero_grad()
            scheduler.step()
    found = {"losses": losses, "value": run.evaluate(dataset(seed=2), correct)}
    state = run.require_prepared().state.capture(run.fingerprint(), keep=run.is_main)
    found["state"] = {name: t.clone() for name, t in {**state.model, **state.optimizer}.items()}
    found["held"] = {name: tuple(p.shape) for name, p in run.strategy.trainable().items()}
    found["sent"] = run.strategy.bytes_sent
    if options.get("directory"):
        run.save()
    found["fingerprint"] = run.fingerprint()
    run.close()
    return found


def all_cases(world, folder):
    """This rank's results of each case; a world of one computes the expected ones."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    alone = world.world_size == 1
    servers = max(1, world.world_size // 2)
    options = {"strategy": "single"} if alone else asynchronous(servers)
    found = {
        "batch norm": trained(options),
        "wide": trained(options, wide, torch.optim.AdamW),
    }
    if not alone:
        found["saved"] = trained({**options, "directory": f"{folder}/{world.world_size}"}, wide)
    return found


@cache
def world_of(size, folder=""):
    return run_ranks(all_cases, size, folder, timeout=120)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return str(tmp_path_factory.mktemp("saved"))


@pytest.mark.parametrize("case", ["batch norm", "wide"])
@pytest.mark.parametrize("size", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_without_staleness_the_result_is_that_of_one_device_up_to_rounding(size, case, folder):
    """Two workers with one server, and with two: workers that wait for each other add what one device adds."""
    alone, ranks = world_of(1)[0][case], world_of(size, folder)
    found = ranks[0][case]
    assert found["state"].keys() == alone["state"].keys()
    for name, tensor in alone["state"].items():
        torch.testing.assert_close(
            found["state"][name], tensor, rtol=2e-5, atol=2e-6, msg=lambda m, n=name: f"{n}: {m}"
        )
    assert found["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert [rank[case]["value"] for rank in ranks] == [pytest.approx(alone["value"])] * size
    assert len({rank[case]["fingerprint"] for rank in ranks}) == 1


def test_the_counter_check_that_training_moves_every_tensor():
    state, start = world_of(1)[0]["wide"]["state"], dict(wide().named_parameters())
    assert all(not torch.equal(state[name], tensor) for name, tensor in start.items())


def test_the_first_ranks_are_servers_and_a_large_parameter_lies_on_both(folder):
    ranks = [rank["wide"]["held"] for rank in world_of(4, folder)]
    assert [held.get("0.weight") for held in ranks] == [(32, 6), (32, 6), None, None]
    others = [name for held in ranks for name in held if name != "0.weight"]
    assert sorted(others) == ["0.bias", "3.bias", "3.weight"]
    assert ranks[2:] == [{}, {}], "workers hold nothing for an optimizer"


def test_a_worker_sends_its_gradient_once_a_step_and_servers_answer_with_values(folder):
    ranks, steps = [rank["wide"]["sent"] for rank in world_of(4, folder)], 6
    whole = sum(p.nbytes for p in wide().parameters())
    assert ranks[2:] == [steps * whole] * 2
    # Each worker gets them after its step. What all read for an evaluation or a fingerprint was counted, too.
    assert sum(ranks[:2]) == steps * 2 * whole


def resumed(world, path, cases):
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    found = []
    for options in cases:
        schedule = lambda each: torch.optim.lr_scheduler.CosineAnnealingLR(each, 6)  # noqa: E731  # handed on
        run, *_ = begin(wide(), torch.optim.SGD, schedule, directory=path, resume="auto", **options)
        found.append((run.fingerprint(), run.position.step))
        run.close()
    return found


def test_a_checkpoint_of_two_asynchronous_servers_is_read_under_any_strategy(folder):
    saved = world_of(4, folder)[0]["saved"]["fingerprint"]
    synchronous = {"strategy": "parameter_server", "parameter_server": {"servers": 2}}
    for size, cases in (
        (1, [{"strategy": "single"}]),
        (3, [synchronous, asynchronous(1), {"strategy": "ddp"}]),
    ):
        assert run_ranks(resumed, size, f"{folder}/4", cases) == [[(saved, 6)] * len(cases)] * size


def held_up(world, pipe):
    """The last rank, a worker, stays in its first step until the other worker is as far ahead as it may be."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    run, _, optimizer = begin(wide(), **asynchronous(staleness=STALENESS))
    end = os.open(pipe, os.O_RDWR)
    seen, overrun = [], False
    for number, batch in enumerate(run.batches(dataset(24 * STEPS))):
        if world.rank == 1:
            os.write(end, bytes([number]))
        if world.rank == 2 and number == 0:
            seen = [os.read(end, 1)[0] for _ in range(STALENESS + 1)]
            overrun = bool(select.select([end], [], [], 0.3)[0])
        run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    stale = run.strategy.metrics()
    remarks = run.strategy.summary()
    run.close()
    os.close(end)
    return seen, overrun, stale, remarks


def test_a_worker_is_never_further_ahead_of_the_slowest_than_it_may_be(tmp_path):
    """The slow worker is held up by a pipe: it goes on when the fast one has begun the last step that it may begin."""
    pipe = Path(tmp_path) / "steps"
    os.mkfifo(pipe)
    server, _, slow = run_ranks(held_up, 3, str(pipe))
    assert slow[:2] == (list(range(STALENESS + 1)), False)
    _, _, stale, remarks = server
    assert f"at most {STALENESS + 1} steps ahead (bound {STALENESS} " in remarks["staleness"]
    assert stale["staleness_max"] >= 1, "the slow worker's first gradient came when others had made an update"
    assert 0 < stale["staleness"] <= stale["staleness_max"] <= 2 * STALENESS + 1


def refused(world):
    """The refusals that every rank makes by itself."""
    import lockstep

    postpone_compiler()
    with pytest.raises(ConfigError, match=r"precision is 'fp16', .*Use bf16"):
        begin(wide(), **asynchronous(precision="fp16"))
    with pytest.raises(ConfigError, match=r"servers is 2, which leaves no worker among 2 processes\. Use at most 1"):
        begin(wide(), **asynchronous(servers=2))
    model = wide()
    made = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model[0], model[3])]
    with pytest.raises(ConfigError, match=r"got several optimizers\. Put their parameters into groups of one"):
        lockstep.init(global_batch=24, **asynchronous()).prepare(model, *made)
    elsewhere = lockstep.init(global_batch=24, **asynchronous())
    elsewhere.world = replace(elsewhere.world, nodes=2)  # started by a launcher that has no token
    with pytest.raises(ConfigError, match=r"asked for on 2 hosts, .*Start the run on each host with --nnodes"):
        elsewhere.prepare(model, made[0])
    return True


def test_what_cannot_be_done_is_refused_before_the_first_step():
    assert run_ranks(refused, 2) == [True, True]


def misused(world, case):
    postpone_compiler()
    run, *_ = begin(wide(), **asynchronous())
    for batch in run.batches(dataset(24)):
        run.backward(batch, nn.functional.cross_entropy)
        if case == "two backward passes":
            run.backward(batch, nn.functional.cross_entropy)
        run.evaluate(dataset(24), correct)


@pytest.mark.parametrize(
    ("case", "why"),
    [
        ("two backward passes", r"run\.backward was called twice before optimizer\.step\(\)"),
        (
            "evaluation before the step",
            r"between run\.backward and optimizer\.step\(\)\. Call optimizer\.step\(\) first",
        ),
    ],
)
def test_a_loop_that_does_not_push_once_a_step_is_refused(case, why):
    with pytest.raises(ConfigError, match=why):
        run_ranks(misused, 2, case)
