"""An evaluation that may be repeated is left by all ranks at once when one is asked to stop, and done again later."""

import contextlib

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import begin, correct, dataset, train_step
from torch import nn
from torch.utils.data import Dataset

from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.run import evaluation
from lockstep.runtime.control import Stopped, StopReason

SAMPLES, EPOCHS = 150, 2
QUICK = {
    "ddp": {},
    "fsdp": {"strategy": "fsdp"},
    "replicated stages": {"strategy": "hybrid", "mesh": "data=2,pipeline=2"},
}
SLOW = {
    "pipeline": {"strategy": "pipeline"},
    "sharded stages": {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"},
    "parameter server": {"strategy": "parameter_server"},
}
ASYNCHRONOUS = {
    "strategy": "parameter_server",
    "parameter_server": {"mode": "asynchronous", "snapshot_every": 0},
}


class Asking(Dataset):
    """Asks one rank to stop while it reads, and remembers what was read."""

    def __init__(self, ask):
        self.samples, self.read, self.ask = dataset(SAMPLES, seed=2), [], ask

    def __len__(self):
        return SAMPLES

    def __getitem__(self, index):
        self.read.append(index)
        if len(self.read) == 4:  # in the second micro-batch
            self.ask()
        return self.samples[index]


def network():
    torch.manual_seed(4)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Dropout(0.2), nn.Linear(8, 3))


def nothing(run, optimizer):
    pass


def lower(run, optimizer):
    optimizer.param_groups[0]["lr"] *= 0.5


def count(run, optimizer):
    run.extra["epochs"] = run.extra.get("epochs", 0) + 1


def train(directory, ask_rank=-1, between=nothing, **layout):
    """The evaluations of each epoch, and the fingerprint; with why and where it was left, if it was.

    ``between`` is called between the steps of an epoch and its evaluation.
    """
    run, _, optimizer = begin(network(), torch.optim.Adam, lr=0.01, directory=directory, resume="auto", **layout)

    def ask():
        if run.position.epoch == 1 and run.world.rank == ask_rank:
            run._session.heartbeat.control.request_stop(StopReason.PREEMPTED)

    training, asking, log = dataset(), Asking(ask), []
    try:
        for epoch in run.epochs(EPOCHS):
            for batch in run.batches(training):
                train_step(run, batch, optimizer)
            del asking.read[:]
            between(run, optimizer)
            log.append((epoch, run.position.step, run.evaluate(asking, correct, repeatable=True)))
        return log, run.fingerprint(), dict(run.extra)
    except Stopped as stopped:
        return log, stopped.code, run.position.step, run.position.inside, len(asking.read)


def cut_short(world, directory, layouts):
    evaluation.AGREE_EVERY = 0.0  # after every micro-batch
    return {name: train(directory / name, ask_rank=2, **layout) for name, layout in layouts.items()}


def resumed(world, directory, layouts):
    return {name: train(directory / name, **layout) for name, layout in layouts.items()}


@pytest.mark.parametrize("layouts", [QUICK, pytest.param(SLOW, marks=pytest.mark.slow)], ids=["quick", "slow"])
@pytest.mark.fault("P7")
@pytest.mark.slow
def test_all_ranks_leave_with_one_and_the_resumed_run_evaluates_again(tmp_path, layouts):
    (whole,) = run_ranks(resumed, 1, tmp_path / "whole", {"ddp": {}})
    log, *ended = whole["ddp"]
    for rank, found in enumerate(run_ranks(cut_short, 4, tmp_path, layouts)):
        for name, (*how, read) in found.items():
            assert how == [log[:1], 75, log[1][1], True], (rank, name)
            assert read == (0 if name == "parameter server" and rank == 3 else 6), (rank, name)
    for found in run_ranks(resumed, 4, tmp_path, layouts):
        assert found == dict.fromkeys(layouts, (log[1:], *ended))


@pytest.mark.parametrize("between", [lower, count])
def test_what_the_epoch_has_changed_before_an_evaluation_is_not_done_again(tmp_path, monkeypatch, between):
    """The evaluation was left early, and the resumed run lowered the learning rate once more."""
    monkeypatch.setattr(evaluation, "AGREE_EVERY", 0.0)
    assert train(tmp_path / "asked", 0, between) == train(tmp_path / "whole", between=between)


@pytest.mark.slow
@pytest.mark.fault("P7")
def test_workers_and_servers_leave_together_where_they_need_not_keep_step(tmp_path):
    for rank, found in enumerate(run_ranks(cut_short, 4, tmp_path, {"asynchronous": ASYNCHRONOUS})):
        log, code, _, inside, read = found["asynchronous"]
        assert (len(log), code, inside) == (1, 75, True)
        assert read == (6 if rank else 0), rank


def of_few_samples(world, layouts):
    found = {}
    for name, layout in layouts.items():
        run, *_ = begin(network(), **layout)
        found[name] = run.evaluate(dataset(2), correct)  # one micro-batch
        run.close()
    return found


def test_a_set_of_fewer_micro_batches_than_pipelines_is_evaluated():
    """The pipeline without one went on alone, and the run was refused: "computed twice, has other bits"."""
    layouts = {name: QUICK[name] for name in ("fsdp", "replicated stages")} | {"sharded stages": SLOW["sharded stages"]}
    (expected,) = of_few_samples(World(), {"single": {"strategy": "single"}}).values()
    assert run_ranks(of_few_samples, 4, layouts) == [dict.fromkeys(layouts, expected)] * 4


class Recurrent(nn.Module):
    """Goes on with the state of the batch before, as language models do."""

    def __init__(self, carries=True):
        super().__init__()
        self.cell, self.out, self.state, self.carries = nn.RNNCell(6, 6), nn.Linear(6, 3), None, carries

    def forward(self, x):
        state = self.cell(x, None if self.state is None else self.state[: len(x)])
        self.state = state.detach() if self.carries and not self.training else None
        return self.out(state)


def carrying(world, own_forward, predicts=False, carries=True, strategy="ddp"):
    torch.manual_seed(0)
    model = Recurrent(carries)
    run, model, _ = begin(model, strategy=strategy)
    states, forward = [], None

    def keeps(data):
        states.append(model.cell(data[0], states[-1][: len(data[0])] if states and carries else None))
        return model.out(states[-1])

    if own_forward:
        forward = keeps
    try:
        if predicts:
            run.predict(dataset(), forward=forward)
        else:
            loss = nn.functional.cross_entropy
            metric = loss if forward is None else lambda output, data: loss(output, data[1])
            run.evaluate(dataset(), metric, forward=forward)
        return ""
    except ConfigError as error:
        return str(error)
    finally:
        run.close()


@pytest.mark.parametrize(("own_forward", "named"), [(False, "state"), (True, "'states'")])
def test_an_evaluation_that_carries_state_is_refused_on_every_rank(own_forward, named):
    for found in [carrying(World(), own_forward, True, True), *run_ranks(carrying, 3, own_forward)]:
        assert "of the evaluation, computed twice" in found and named in found, found
    assert carrying(World(), own_forward, False, False) == ""


class OwnStatistics(nn.Module):
    """Normalises by its batch in evaluation, too, and notes its statistics then."""

    def __init__(self, training, cached=False):
        super().__init__()
        self.out, self.always = nn.Linear(6, 3), training
        self.register_buffer("mean", torch.zeros(6), persistent=not cached)
        self.register_buffer("var", torch.ones(6), persistent=not cached)

    def forward(self, x):
        training = self.always or self.training
        return self.out(nn.functional.batch_norm(x, self.mean, self.var, training=training))


def evaluated(world, training, cached=False):
    torch.manual_seed(0)
    named = [] if cached else ["mean", "var"]
    run, *_ = begin(OwnStatistics(training, cached), running_buffers=named)
    try:
        return run.evaluate(dataset(), nn.functional.cross_entropy), run.predict(dataset()) is None, ""
    except ConfigError as error:
        return None, False, str(error)
    finally:
        run.close()


def test_an_evaluation_that_changes_buffers_is_refused_on_every_rank():
    """The next steps began with other running statistics on each process, and ended in other ones without a word."""
    for _, _, said in [evaluated(World(), True), *run_ranks(evaluated, 2, True)]:
        assert "an evaluation changes buffers ('mean', 'var')" in said, said
    for loss, _, said in [evaluated(World(), False), evaluated(World(), True, True)]:
        assert loss and not said, said


def after_close(world):
    run, *_ = begin()
    run.close()
    said = []
    for call in (
        lambda: run.predict(dataset()),
        lambda: run.evaluate(dataset(), nn.functional.cross_entropy),
        lambda: run.batches(dataset()),
        run.fingerprint,
        lambda: run.prepare(nn.Linear(2, 2)),
    ):
        try:
            call()
        except ConfigError as error:
            said.append(str(error))
    return said


@pytest.mark.parametrize("ranks", [1, 2])
def test_calls_after_close_are_refused(ranks):
    """Of two processes, each predicted its own part of the data and gave that for all."""
    said = "The run was ended by run.close(). Call that last, or begin another: lockstep.init(...)."
    assert run_ranks(after_close, ranks) == [[said] * 5] * ranks


def ordered_by_rank(world):
    run, _, optimizer = begin()
    functions = {"loss": nn.functional.cross_entropy, "correct": correct}
    names = sorted(functions, reverse=world.rank == 1)
    functions, found = {name: functions[name] for name in names}, []
    for batch in run.batches(dataset()):
        _, also = run.backward(batch, nn.functional.cross_entropy, also=functions)
        optimizer.step()
        optimizer.zero_grad()
        found.append({name: float(value) for name, value in also.items()})
    return [*found, run.evaluate(dataset(), functions)]


def test_metrics_in_another_order_on_each_rank_are_the_same_numbers():
    """Names from a set come in another order in each process of torchrun; each rank's loss was added to the others'
    accuracy, and both numbers were wrong."""
    expected = ordered_by_rank(World())
    assert run_ranks(ordered_by_rank, 2) == [expected, expected]


def other_metrics(world, evaluates):
    run, *_ = begin()
    functions = {f"of rank {world.rank}": correct}
    try:
        if evaluates:
            run.evaluate(dataset(), functions)
        else:
            run.backward(next(iter(run.batches(dataset()))), nn.functional.cross_entropy, also=functions)
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("evaluates", [True, False])
def test_other_metrics_on_each_rank_are_refused(evaluates):
    for said in run_ranks(other_metrics, 2, evaluates):
        assert "are not the same on every rank" in said and "of rank 1" in said


class FlakySet:
    """A metric of the whole set, which the main process alone computes."""

    def update(self, output, target):
        pass

    def reset(self):
        pass

    def compute(self):
        raise ValueError("flaky")


def caught(world):
    run, _, _ = begin(network(), torch.optim.Adam, lr=0.01)
    with contextlib.suppress(ValueError):
        run.evaluate(dataset(20, seed=2), {"flaky": FlakySet()})
    run.evaluate(dataset(20, seed=2), correct)


def test_going_on_after_an_error_of_compute_is_refused_where_other_ranks_wait():
    """The message was about ranks that make different calls, or the run waited."""
    with pytest.raises(ConfigError, match=r"An evaluation raised ValueError \(flaky\), which was caught"):
        run_ranks(caught, 2)
