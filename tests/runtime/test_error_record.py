"""The record of an exception that reached the top of a rank."""

import re
import runpy
import subprocess
import sys
from dataclasses import replace

import pytest
import torch

from lockstep.core.world import World
from lockstep.errors import DataError, LockstepError
from lockstep.launch.rank_process import run_script
from lockstep.launch.targets import ScriptTarget
from lockstep.run import Run, RunOptions
from lockstep.runtime.error_record import (
    ErrorPage,
    about_own_backward,
    read_record,
    record_file,
    record_of,
    write_record,
)
from lockstep.runtime.heartbeat import Beat, Membership


def raised(error):
    try:
        raise error
    except type(error) as caught:
        return caught


def test_a_record_is_read_as_it_was_written(tmp_path):
    record = record_of(raised(ValueError("no")), rank=3, beat=None)
    write_record(tmp_path, record)
    assert read_record(tmp_path, 3) == record
    assert read_record(tmp_path, 4) is None
    assert (record.kind, record.message, record.exit_code, record.phase) == ("ValueError", "no", 4, "start")
    assert "in raised" in record.shown


def test_a_record_names_the_users_line_that_the_exception_came_from(tmp_path):
    script = tmp_path / "train.py"
    script.write_text('from lockstep.data import IDX\n\n\ndef main():\n    IDX("absent", "train")\n\n\nmain()\n')
    with pytest.raises(LockstepError) as caught:
        runpy.run_path(str(script))
    assert record_of(caught.value, rank=0, beat=None).place == "train.py:5"


def step_with(loss):
    """Calls ``loss`` as a step of a run does, and returns the record of its exception."""
    options = RunOptions(global_batch=4, micro_batches=1)
    with Run(options, World()) as run, pytest.raises(Exception) as caught:
        model = torch.nn.Linear(2, 2)
        run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        (batch,) = run.batches([(torch.zeros(2), torch.zeros(2))] * 4)
        run.backward(batch, loss)
    return record_of(caught.value, rank=0, beat=None)


def test_frames_of_lockstep_between_those_of_other_code_are_one_line():
    def loss(output, target):
        try:
            return [output, target][2]
        except IndexError as error:
            raise ValueError("no such output") from error

    record = step_with(loss)
    shown = re.sub(r"\d+", "N", record.shown)
    assert re.findall(r"in (\w+)|(\[N frames of Lockstep\])", shown) == [
        ("loss", ""),  # of the cause
        ("step_with", ""),
        ("", "[N frames of Lockstep]"),
        ("loss", ""),
    ]
    assert "in backward_by" in record.traceback
    assert record.leaves_frames_out


def test_of_an_exception_that_lockstep_raises_all_frames_are_shown():
    record = step_with(lambda output: output.sum())
    assert record.kind == "TypeError"
    assert "in backward_by" in record.shown
    assert not record.leaves_frames_out


@pytest.mark.fault("T2")
def test_a_record_that_no_file_takes_is_on_its_page_with_long_texts_cut(tmp_path):
    record = record_of(raised(DataError("é" * 100_000)), rank=3, beat=None)
    ErrorPage(tmp_path, 3).write(record)
    with pytest.raises(OSError):
        write_record(tmp_path / "absent", record)
    found = read_record(tmp_path / "absent", 3, tmp_path)
    assert (found.kind, found.exit_code, found.on_purpose) == ("DataError", 3, True)
    assert record.message.startswith(found.message)
    assert record.shown.endswith(found.shown)
    ErrorPage(tmp_path, 4)
    assert read_record(tmp_path, 4, tmp_path) is None


def test_a_file_that_is_no_record_is_none(tmp_path):
    for text in ("", "[", "[" * 100_000, "{}", '{"samples": 3}', "null"):
        record_file(tmp_path, 0).write_text(text)
        assert read_record(tmp_path, 0, tmp_path) is None


def test_an_error_of_lockstep_has_its_own_exit_code():
    record = record_of(raised(DataError("line 3 is torn")), rank=0, beat=None)
    assert (record.on_purpose, record.exit_code) == (True, 3)


def test_a_lost_connection_is_a_consequence_unless_lockstep_says_so():
    message = "[tcp] Connection closed by peer [127.0.0.1]:9"
    assert record_of(raised(RuntimeError(message)), rank=0, beat=None).is_consequence
    assert not record_of(raised(DataError(message)), rank=0, beat=None).is_consequence


@pytest.mark.fault("T1")
def test_a_broken_pipe_of_the_program_itself_is_no_lost_peer():
    error = BrokenPipeError(32, "Broken pipe")
    assert not record_of(raised(error), rank=0, beat=None).is_consequence


def test_a_backward_of_the_script_after_that_of_the_run_is_explained():
    """``scaler.scale(loss).backward()``: torch says only that there is nothing to go back through."""
    beat = Beat(
        phase="update",
        epoch=0,
        step=0,
        micro_batch=-1,
        time=0.0,
        pid=1,
        membership=Membership.JOINED,
        samples=(),
    )
    for phase, noted in (("update", True), ("forward", False)):
        try:
            (torch.ones(()) * 2.0).backward()
        except RuntimeError as error:
            found = record_of(error, rank=0, beat=replace(beat, phase=phase))
        assert found.on_purpose is noted
        assert bool(re.search(r"Leave out loss.backward\(\) \(.*test_error_record.py:\d+\)", found.message)) is noted
    assert "Leave out" not in record_of(raised(ValueError("no")), rank=0, beat=beat).shown


def test_a_scaler_that_has_scaled_no_loss_is_explained_too():
    model = torch.nn.Linear(2, 2)
    scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
    for call in (scaler.step, scaler.unscale_):
        with pytest.raises(AssertionError) as raised:
            call(optimizer)
        assert "GradScaler of your own" in about_own_backward(raised.value, None)


OF_THE_SYSTEM = """
import sysconfig

path = sysconfig.get_path
sysconfig.get_path = lambda name, *rest: "/venv/site-packages" if name in ("purelib", "platlib") else path(name, *rest)
import torch
from lockstep.runtime.error_record import about_own_backward

model = torch.nn.Linear(2, 2)
scaler, optimizer = torch.amp.GradScaler("cpu"), torch.optim.SGD(model.parameters(), lr=0.1)
try:
    scaler.step(optimizer)
except AssertionError as error:
    print(about_own_backward(error, None))
"""


def test_the_place_is_the_users_where_torch_is_a_package_of_the_system(tmp_path):
    """In a virtual environment that sees the system's packages it was a line of torch."""
    script = tmp_path / "train.py"
    script.write_text(OF_THE_SYSTEM)
    told = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True).stdout
    assert f"({script}:12)" in told


def test_without_a_heartbeat_it_is_explained_where_nothing_of_lockstep_was_called():
    with pytest.raises(RuntimeError) as raised:
        (torch.ones(()) * 2.0).backward()
    assert "Leave out loss.backward()" in about_own_backward(raised.value, None)
    run = Run(RunOptions.of(global_batch=4, micro_batches=2, strategy="single"), World())
    model = torch.nn.Linear(2, 2)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    (batch,) = run.batches([(torch.ones(2), 0)] * 4)
    with pytest.raises(RuntimeError) as raised:
        run.backward(batch, lambda output, target: (output.detach() * 1.0).sum().backward())
    assert not about_own_backward(raised.value, None)


@pytest.mark.parametrize(
    ("phase", "samples"), [("forward", (7, 8)), ("evaluate", (7, 8)), ("save", ()), ("script", ())]
)
def test_samples_belong_to_the_phases_that_read_them(phase, samples):
    """A disk that was full while it saved was reported with the last samples of the evaluation."""
    beat = Beat(
        phase=phase,
        epoch=0,
        step=3,
        micro_batch=0,
        time=0.0,
        pid=1,
        membership=Membership.JOINED,
        samples=(7, 8),
    )
    assert record_of(raised(ValueError("no")), rank=0, beat=beat).samples == samples


def test_a_syntax_error_of_the_script_itself_is_shown_without_frames_of_lockstep(tmp_path):
    """Only the launcher, which compiles the script, has called anything; its three frames stood above the line."""
    script = tmp_path / "train.py"
    script.write_text("import torch\nmodel = torch.nn.Linear(2, 2\n")
    with pytest.raises(SyntaxError) as caught:
        run_script(ScriptTarget(path=str(script)))
    error = caught.value.with_traceback(caught.value.__traceback__.tb_next)  # without the frame of this test
    shown = record_of(error, rank=0, beat=None).shown
    assert shown.startswith(f'  File "{script}", line 2\n')
    assert "SyntaxError: '(' was never closed" in shown
