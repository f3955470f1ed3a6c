"""A run that is watched has the same bits, and its timeline says what overlapped."""

import json

import pytest
import torch
from tests.data.test_loader_ahead import told  # noqa: F401  a fixture
from tests.run.jobs import begin, correct, dataset, train_step

from lockstep.errors import ConfigError
from lockstep.profile.trace import FILE


def train(data=None, epochs=2, **options):
    """Parameters at the end."""
    run, model, optimizer = begin(strategy="single", **options)
    for _ in run.epochs(epochs):
        for batch in run.batches(dataset() if data is None else data):
            train_step(run, batch, optimizer)
            with run.span("log"):
                float(next(model.parameters()).detach().sum())
        run.evaluate(dataset(), correct)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run.close()
    return run, state


def spans(folder):
    return [event for event in json.loads((folder / FILE).read_text())["traceEvents"] if event["ph"] == "X"]


def lanes(folder):
    return {event["cat"] for event in spans(folder)}


def steps(folder):
    return [event["args"]["step"] for event in spans(folder) if event["cat"] == "steps"]


@pytest.fixture(scope="module")
def expected():
    return train()[1]


def test_a_watched_run_has_the_same_bits(expected, tmp_path):
    _, state = train(directory=tmp_path, profile="1:3")
    for name, tensor in expected.items():
        assert torch.equal(state[name], tensor), name


def test_the_steps_that_were_asked_for_are_shown_with_all_that_they_do(tmp_path):
    train(directory=tmp_path, profile="1:3")
    assert steps(tmp_path) == [1, 2, 3]
    assert lanes(tmp_path) == {
        *("steps", "loader, this process", "loader (evaluation), this process", "waiting for data"),
        *("rehearsal", "compute", "forward", "backward", "reduce, exposed", "optimizer", "evaluation"),
        "log",
    }
    micro_batches = [event["name"] for event in spans(tmp_path) if event["cat"] == "forward"]
    assert micro_batches == [f"forward k{k}" for k in (*range(8), *range(2), *range(8))]


def test_a_resumed_run_counts_from_its_own_first_step(tmp_path):
    run, _, optimizer = begin(strategy="single", directory=tmp_path)
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
        if batch.plan.step == 1:
            run.save(wait=True)
            break
    run.close()
    train(directory=tmp_path, resume="auto", profile="1:1")
    assert steps(tmp_path) == [3]


def test_the_run_has_no_callback_once_the_steps_are_over(tmp_path):
    run, _, optimizer = begin(strategy="single", directory=tmp_path, profile="0:1")
    events, heard = run._session.events, []
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
        heard.append(bool(events.phase))
    assert heard == [True, False, False]
    run.close()


def test_a_run_that_ends_within_the_window_shows_the_steps_that_there_were(tmp_path):
    train(directory=tmp_path, profile="4:100")
    assert steps(tmp_path) == [4, 5]


def test_a_run_that_ends_before_the_window_says_so(tmp_path, caplog):
    train(directory=tmp_path, profile="100:3")
    assert "The timeline is empty: the run ended before step 100 of this start." in caplog.text
    assert spans(tmp_path) == []


def test_a_file_that_cannot_be_written_any_more_is_an_error_in_the_log_and_training_goes_on(expected, tmp_path, caplog):
    run, model, optimizer = begin(strategy="single", directory=tmp_path, profile="0:1")
    (tmp_path / FILE).unlink()
    for _ in run.epochs(2):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
    run.close()
    assert "Rank 0 cannot write to" in caplog.text
    for name, tensor in expected.items():
        assert torch.equal(model.state_dict()[name], tensor), name


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"profile": "1:2"}, "needs the run folder to write to"),
        ({"profile": "3", "directory": "x"}, "not a range of steps"),
    ],
)
def test_a_timeline_that_cannot_be_made_is_refused_at_once(options, words):
    with pytest.raises(ConfigError, match=words):
        begin(strategy="single", **options)


def test_the_next_batch_is_read_while_a_step_computes(told, tmp_path):  # noqa: F811
    run, model, optimizer = begin(
        strategy="single", global_batch=16, micro_batches=2, prefetch=1, directory=tmp_path, profile="0:2"
    )

    def forward(data):
        if len(seen) == 1:
            told.wait_for(16 + 1)  # this step's samples, which are here, and one of the next's
        seen.append(len(data))
        return model(data[:, None].float().expand(-1, 6))

    seen = []
    for batch in run.batches(told, workers=1):
        run.backward(batch, lambda output, _: output.sum(1), forward=forward)
        optimizer.zero_grad()
    run.close()
    first, second = (event for event in spans(tmp_path) if event["cat"] == "steps")
    read = [event for event in spans(tmp_path) if event["cat"] == "loader, worker 0"]
    ahead = [event for event in read if event["name"].startswith("step 1 ")]
    assert [event["name"] for event in read][:4] == ["step 0 k0", "step 0 k1", "step 1 k0", "step 1 k1"]
    assert ahead[0]["ts"] < first["ts"] + first["dur"] <= second["ts"] + 1
    events = json.loads((tmp_path / FILE).read_text())["traceEvents"]
    assert sum(event["ph"] == "s" for event in events) == sum(event["ph"] == "f" for event in events) == 4


def test_the_launcher_can_ask_for_a_timeline_of_a_script_that_asks_for_none(monkeypatch, tmp_path):
    monkeypatch.setenv("LOCKSTEP_PROFILE", "2:1")
    train(directory=tmp_path)
    assert steps(tmp_path) == [2]


def test_a_timeline_without_a_folder_is_refused_whoever_asks_for_it(monkeypatch):
    monkeypatch.setenv("LOCKSTEP_PROFILE", "2:1")
    with pytest.raises(ConfigError, match=r"--profile 2:1 needs a folder.*init names none.*directory="):
        begin(strategy="single")
