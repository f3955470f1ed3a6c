"""Callbacks of a run: which events they are told, in which order, and how they are refused and removed."""

import timeit

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import begin, correct, dataset, train_step

import lockstep
from lockstep.errors import ConfigError
from lockstep.runtime import Callback
from lockstep.runtime.events import StepEvents, observe_new_runs

EVENTS = [name.removeprefix("on_") for name in dir(Callback) if name.startswith("on_")]


def _heard(name):
    def method(self, *arguments):
        self.heard.append((name, *arguments))

    return method


Everything = type("Everything", (Callback,), {f"on_{name}": _heard(name) for name in EVENTS})


def listening(*without):
    everything = Everything()
    everything.heard = []
    everything.names = lambda: [name for name, *_ in everything.heard if name not in without]
    return everything


def test_every_event_is_told_by_its_own_attribute():
    events, listener = StepEvents(), listening()
    assert not any(getattr(events, name) for name in EVENTS)
    events.add(listener)
    for name in EVENTS:
        (call,) = getattr(events, name)
        call()
    assert listener.names() == EVENTS


def test_a_step_is_told_in_order(tmp_path):
    run, _, optimizer = begin(strategy="single", directory=tmp_path)
    listener = listening("phase", "samples", "span_begin", "span_end")
    run.add_callback(listener)
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
        if batch.plan.position == 1:
            break
    assert listener.names() == [
        *("step_begin", "backward_begin", *8 * ["micro_batch_begin", "output", "micro_batch_end"]),
        *("backward_end", "gradients_ready", "step_end"),
        *("step_begin", "backward_begin", *8 * ["micro_batch_begin", "output", "micro_batch_end"]),
        *("backward_end", "gradients_ready"),
    ], "the second step was left by a break"
    listener.heard.clear()
    folder = run.save(wait=True)
    value = run.evaluate(dataset(), correct)
    run.close()
    assert listener.names() == ["save_begin", "save", "evaluation", "close"]
    told = {name: arguments for name, *arguments in listener.heard}
    assert told["save_begin"] == [2]
    assert told["save"] == [2, folder]
    assert told["evaluation"] == [2, value]
    assert told["close"] == [run]


def rank_body(world):
    """The events of one step on a rank of ddp, and the parameters."""
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4)
    run = lockstep.init(global_batch=8, micro_batches=4, seed=0)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    listener = listening("samples", "span_begin", "span_end")
    run.add_callback(listener)
    data = torch.utils.data.TensorDataset(torch.randn(8, 6), torch.randint(0, 4, (8,)))
    for batch in run.batches(data):
        run.backward(batch, torch.nn.CrossEntropyLoss())
        optimizer.step()
    run.close()
    return [
        " ".join(str(word) for word in (name, *told) if type(word) in (str, int))
        for name, *told in listener.heard
        if name != "samples"
    ]


def test_a_rank_of_ddp_is_told_of_buckets_and_the_exchange():
    for rank, told in enumerate(run_ranks(rank_body, 2)):
        first, second = 2 * rank, 2 * rank + 1
        assert told == [
            "phase data 0 0 -1",
            "step_begin",
            *("span_begin rehearsal", "span_end rehearsal"),
            "backward_begin",
            *(
                "micro_batch_begin",
                f"phase forward 0 0 {first}",
                "output",
                f"phase backward 0 0 {first}",
                "micro_batch_end",
            ),
            *("micro_batch_begin", f"phase forward 0 0 {second}", "output", f"phase backward 0 0 {second}"),
            *("bucket_start 0", "micro_batch_end", "phase reduce 0 0 -1", "exchange_begin", "exchange_end"),
            *("backward_end", "phase update 0 0 -1", "gradients_ready", "step_end"),
            *("span_begin fingerprint", "span_end fingerprint"),  # replicas are compared after the first step
            *("phase data 0 1 -1", "close"),
        ]


def test_a_removed_callback_is_not_called_and_the_others_are():
    run, _, optimizer = begin(strategy="single")
    first, second = listening(), listening()
    handle = run.add_callback(first)
    with run.add_callback(second):
        batches = run.batches(dataset())
        train_step(run, next(batches), optimizer)
        handle.remove()
        handle.remove()
        count = len(first.heard)
        train_step(run, next(batches), optimizer)
    assert len(first.heard) == count < len(second.heard)
    count = len(second.heard)
    train_step(run, next(batches), optimizer)
    assert len(second.heard) == count
    run.close()


def test_a_callback_may_remove_itself_while_it_is_called():
    events, heard = StepEvents(), []

    class Once(Callback):
        def on_close(self, run):
            heard.append(run)
            handle.remove()

    handle = events.add(Once())
    after = events.add(after_it := listening())
    for _ in range(2):
        for call in events.close:
            call("run")
    assert (heard, after_it.names()) == (["run"], ["close", "close"])
    after.remove()


def test_a_callback_that_raises_is_named():
    class Broken(Callback):
        def on_gradients_ready(self, batch, loss):
            raise ValueError("no such gradient")

    run, _, optimizer = begin(strategy="single")
    run.add_callback(Broken())
    with pytest.raises(ValueError, match="no such gradient") as caught:
        train_step(run, next(run.batches(dataset())), optimizer)
    (note,) = caught.value.__notes__
    assert note.startswith("raised by the callback ")
    assert note.endswith("Broken.on_gradients_ready")
    run.close()


@pytest.mark.parametrize(
    ("callback", "words"),
    [
        (object(), "was called with a object, which is not a callback. Derive its class from"),
        (type("Mine", (Callback,), {"on_step_ends": print})(), "'on_step_ends'.*Did you mean 'on_step_end'"),
    ],
)
def test_what_cannot_be_called_is_refused(callback, words):
    with pytest.raises(ConfigError, match=words):
        StepEvents().add(callback)


def test_a_callback_is_added_once():
    events, callback = StepEvents(), Callback()
    events.add(callback)
    with pytest.raises(ConfigError, match="twice with the same Callback"):
        events.add(callback)


def test_runs_that_others_make_are_observed_within_a_block():
    listener = listening()
    with observe_new_runs(listener, options=lambda options: options):
        run, *_ = begin(strategy="single")
    assert ("prepare_end", run) in listener.heard
    run.close()
    assert listener.names()[-1] == "close"
    count = len(listener.heard)
    begin(strategy="single")[0].close()
    assert len(listener.heard) == count


def test_callbacks_change_no_bit():
    states = []
    for listener in (None, listening()):
        run, _, optimizer = begin(strategy="single")
        if listener is not None:
            run.add_callback(listener)
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
        states.append(run.fingerprint())
        run.close()
    assert states[0] == states[1]


def test_an_event_that_nobody_hears_costs_less_than_a_microsecond():
    events = StepEvents()

    def micro_batch():
        for call in events.micro_batch_begin:
            call(None)
        for call in events.micro_batch_end:
            call(None)

    assert min(timeit.repeat(micro_batch, number=2000, repeat=7)) / 2000 < 2e-6, "for a busy machine"
