"""Marks on functions show in real stacks and tracebacks, and what reads them knows every place that waits."""

import faulthandler
import importlib
import inspect
import traceback
from contextlib import contextmanager

import pytest

from lockstep.data.reader import SampleReader
from lockstep.data.workers import WorkerReading
from lockstep.distributed import collectives, process_group, rank_exchange, rendezvous
from lockstep.distributed.shared_memory import Word
from lockstep.launch import rank_process
from lockstep.launch.stalls.snapshot import main_stack, users_frame, waits_in
from lockstep.reduce import ordered, ring, shared_memory
from lockstep.runtime.stack_dump import (
    Mark,
    _serve_recorder,
    has_mark,
    mark_of,
    package_folder,
    stack_marker,
    unescaped,
)


def dump(path):
    with path.open("w+") as file:
        faulthandler.dump_traceback(file, all_threads=True)
        file.seek(0)
        return file.read()


@stack_marker(Mark.READS_SAMPLES)
def reading(path):
    return dump(path)


@stack_marker(Mark.RUNS_RANK)
def running(path):
    return waiting(path)


@stack_marker(Mark.WAITS_FOR_EXCHANGE)
def waiting(path):
    return dump(path)


def test_a_mark_shows_in_what_faulthandler_writes(tmp_path):
    text = reading(tmp_path / "stack")
    assert has_mark(text, Mark.READS_SAMPLES)
    assert not has_mark(text, Mark.WAITS_FOR_WORKER)
    assert not has_mark(dump(tmp_path / "stack"), Mark.READS_SAMPLES)


def test_a_rank_that_waits_is_recognised_wherever_the_function_stands(tmp_path):
    stack = main_stack(running(tmp_path / "stack"))
    assert [mark_of(frame.function) for frame in stack[:3]] == [None, Mark.WAITS_FOR_EXCHANGE, Mark.RUNS_RANK]
    assert waits_in(stack[1:], collective_pending=False) == "an exchange between ranks"
    assert users_frame(stack) == stack[0]


def test_paths_and_names_outside_ascii_are_read_as_they_are(tmp_path):
    folder = tmp_path / "öko \U0001f600 \\x41"
    folder.mkdir()
    script = folder / "größe.py"
    script.write_text("def zählen(dump, path):\n    return dump(path)\n")
    namespace = {}
    exec(compile(script.read_text(), str(script), "exec"), namespace)
    text = namespace["zählen"](dump, tmp_path / "stack")
    assert str(script) not in text  # faulthandler writes ASCII
    assert f'File "{script}", line 2 in zählen' in unescaped(text)


def test_a_byte_of_a_path_that_is_no_character_stays_escaped():
    assert unescaped(r'File "/x/\udcff\xe9", line 1') == r'File "/x/\udcff' + 'é", line 1'


def test_a_marked_function_is_otherwise_the_same():
    assert reading.__name__ == "reading"
    assert "reading" in reading.__qualname__
    assert list(inspect.signature(reading).parameters) == ["path"]


def test_a_mark_shows_in_a_traceback():
    @stack_marker(Mark.RUNS_TARGET)
    def fail():
        raise ValueError("on purpose")

    with pytest.raises(ValueError) as caught:
        fail()
    assert traceback.extract_tb(caught.tb)[-1].name == "fail [runs the target]"


def test_a_generator_behind_a_context_manager_can_be_marked():
    @contextmanager
    @stack_marker(Mark.WAITS_FOR_RENDEZVOUS)
    def opened():
        yield inspect.currentframe().f_code.co_name

    with opened() as name:
        assert mark_of(name) is Mark.WAITS_FOR_RENDEZVOUS


@pytest.mark.parametrize("name", ["wait", "wait [", "wait []", "<listcomp>", "wait [reads samples", "x [y]", ""])
def test_other_names_have_no_mark(name):
    assert mark_of(name) is None or name.endswith("[reads samples")


@pytest.mark.parametrize("mark", Mark)
def test_every_mark_is_found_again(mark):
    assert mark.isascii()
    assert mark_of(f"function [{mark}]") is mark


@pytest.mark.parametrize(
    ("function", "mark"),
    [
        (rank_process.run_rank, Mark.RUNS_RANK),
        (rank_process.run_script, Mark.RUNS_TARGET),
        (SampleReader.read_grouped, Mark.READS_SAMPLES),
        (WorkerReading._next, Mark.WAITS_FOR_WORKER),
        (collectives.gather_json, Mark.WAITS_FOR_EXCHANGE),
        (process_group.roll_call, Mark.WAITS_FOR_RENDEZVOUS),
        (rendezvous.wait_for_all, Mark.WAITS_FOR_RENDEZVOUS),
        (Word.wait_until, Mark.WAITS_FOR_EXCHANGE),
        (rank_exchange.GroupExchange.all_to_all, Mark.WAITS_FOR_EXCHANGE),
        (rank_exchange.SharedMemoryExchange._all_slots, Mark.WAITS_FOR_EXCHANGE),
        (ordered.OrderedBucket._wait, Mark.WAITS_FOR_GRADIENTS),
        (ring.RingReducer.finish, Mark.WAITS_FOR_GRADIENTS),
        (shared_memory.SharedMemoryReducer._wait, Mark.WAITS_FOR_GRADIENTS),
    ],
)
def test_the_functions_that_reports_look_for_are_marked(function, mark):
    assert mark_of(function.__code__.co_name) is mark


def test_a_package_is_found_without_its_import(tmp_path, monkeypatch):
    (tmp_path / "unimportable").mkdir()
    (tmp_path / "unimportable" / "__init__.py").write_text("raise ImportError\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert package_folder("unimportable") == tmp_path / "unimportable"
    with pytest.raises(ModuleNotFoundError, match="'absent_package' is not installed"):
        package_folder("absent_package")


def test_the_folder_of_torch_is_the_one_that_is_imported():
    assert str(package_folder("torch")) == importlib.import_module("torch").__path__[0]


def test_a_run_directory_whose_path_is_too_long_for_a_socket_costs_only_the_recorder(tmp_path, capfd):
    """``TMPDIR`` and ``XDG_RUNTIME_DIR`` may be long; a rank used to end with "Error binding" then."""
    path = tmp_path / ("deep" * 30)
    path.mkdir()
    _serve_recorder(path / "recorder-000")
    assert list(path.iterdir()) == []
    assert capfd.readouterr().err == ""
