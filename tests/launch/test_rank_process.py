"""A rank runs its target; the whole life of a rank is tested in test_supervisor_multiprocess.py."""

import shutil
import subprocess
import sys
import textwrap
import threading

import pytest

from lockstep.errors import ConfigError, RankError
from lockstep.launch.rank_process import _endings_of_threads, _leave_with, run_target
from lockstep.launch.targets import EntryTarget, FunctionTarget, ScriptTarget
from lockstep.loggers import MultiLogger, TensorBoard
from lockstep.runtime.control import Stopped, StopReason
from lockstep.runtime.heartbeat import Heartbeat
from lockstep.runtime.stop_signals import CriticalThread


@pytest.fixture(autouse=True)
def interpreter(monkeypatch):
    """Restores what a target changes in the interpreter."""
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])


def test_an_entry_point_is_called_with_its_payload():
    assert run_target(EntryTarget(entry="json:dumps", payload=[1, None])) == "[1, null]"
    assert sys.argv == ["json:dumps"]


def test_sys_exit_in_the_code_of_a_job_is_no_end_of_it():
    with pytest.raises(RankError, match=r"called sys.exit\(0\) before all was done. It must return."):
        run_target(EntryTarget(entry="sys:exit", payload=0))


def test_an_error_that_a_script_turns_into_sys_exit_is_told_all_the_same(tmp_path):
    """The report named the exit code alone where ``hydra.main`` had printed the error and called ``sys.exit(1)``."""
    script = tmp_path / "train.py"
    begin = "import sys\nfrom lockstep.errors import ConfigError\n"
    for error, ending in (("ConfigError('refused')", ConfigError), ("ValueError('its own')", SystemExit)):
        script.write_text(f"{begin}try:\n    raise {error}\nexcept Exception:\n    sys.exit(3)\n")
        with pytest.raises(ending, match=r"refused|3"):
            run_target(ScriptTarget(path=str(script), arguments=()))


def test_what_ends_a_thread_that_trains_ends_the_rank(monkeypatch):
    """The exit status was 0 where a script trained in a thread and was refused, or asked to stop."""

    def end(error):
        raise error

    others = []
    monkeypatch.setattr(threading, "excepthook", lambda ending: others.append(ending.exc_value))
    ended = _endings_of_threads()
    errors = [ConfigError("refused"), Stopped(StopReason.PREEMPTED), ValueError("its own"), SystemExit(3)]
    for error in errors:
        thread = threading.Thread(target=end, args=(error,))
        thread.start()
        thread.join()
    assert (ended, others) == (errors[:2], errors[2:])


@pytest.mark.fault("M12")
def test_a_log_of_tensorboard_that_cannot_be_written_is_one_warning(tmp_path, monkeypatch, caplog):
    """The traceback of TensorBoard's thread came before it, in twenty lines."""
    pytest.importorskip("tensorboard")
    others = []
    monkeypatch.setattr(threading, "excepthook", lambda ending: others.append(ending.exc_value))
    assert _endings_of_threads() == []
    logger = MultiLogger([TensorBoard(tmp_path / "logs")])
    logger.log(1, {"loss": 0.5})
    shutil.rmtree(tmp_path / "logs")
    for step in (2, 3):
        logger.epoch(0, step, {"loss": 0.25})
    logger.close()
    assert caplog.text.count("Logger TensorBoard failed and is disabled; training continues.") == 1
    assert others == []


def test_an_error_in_the_thread_that_opened_the_run_ends_the_rank(monkeypatch):
    """Its process left the others with exit status 0, and the report said nothing of the error."""
    error = ValueError("in the loop")

    def train():
        Heartbeat()
        raise error

    monkeypatch.setattr(threading, "excepthook", threading.excepthook)
    monkeypatch.setattr(Heartbeat, "training_thread", 0)
    ended = _endings_of_threads()
    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert ended == [error]


def test_an_exit_status_of_the_script_waits_for_the_checkpoint_that_is_being_written():
    """``sys.exit(1)`` after ``run.save()`` lost it."""
    go_on = threading.Event()
    writing = CriticalThread(target=go_on.wait, args=(30,))
    writing.start()
    threading.Timer(0.2, go_on.set).start()
    assert _leave_with(SystemExit(5), None, None, None) == 5
    assert not writing.is_alive()


def test_a_function_is_called_with_its_arguments():
    target = FunctionTarget.from_function(textwrap.indent, ("x",), {"prefix": "> "})
    assert run_target(target) == "> x"


def test_a_function_that_is_not_defined_on_import_is_named():
    target = FunctionTarget(module="textwrap", name="absent", search_path=tuple(sys.path))
    with pytest.raises(ConfigError, match="absent is not defined when textwrap is imported"):
        run_target(target)


def test_a_script_runs_as_main_with_its_arguments(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "import sys\nfrom pathlib import Path\nPath(sys.argv[1]).write_text(f'{__name__} {sys.path[0]}')\n"
    )
    run_target(ScriptTarget(path=str(script), arguments=(str(tmp_path / "out"),)))
    assert (tmp_path / "out").read_text() == f"__main__ {tmp_path}"


def test_a_module_runs_as_main_of_its_package(tmp_path, monkeypatch):
    package = tmp_path / "package"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "parts.py").write_text("WORD = 'found'\n")
    (package / "train.py").write_text(
        "import sys\nfrom pathlib import Path\nfrom .parts import WORD\n"
        "Path(sys.argv[1]).write_text(f'{__name__} {__package__} {__spec__.name} {WORD} {sys.path[0]}')\n"
    )
    monkeypatch.chdir(tmp_path)
    run_target(ScriptTarget.from_words(["-m", "package.train", "out"]))
    assert (tmp_path / "out").read_text() == f"__main__ package package.train found {tmp_path}"


_TRAINS = """
import torch
optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
print("trained")
"""
_MEETS = """
import torch.distributed as dist
dist.init_process_group("gloo")
dist.destroy_process_group()
"""
_SETS_UP = """
import lockstep
run = lockstep.init(global_batch=2, micro_batches=2)
run.close()
"""


@pytest.mark.parametrize(
    ("devices", "script", "is_warned"),
    [
        ("cpu:2", _TRAINS, True),
        pytest.param("cpu:2", "print('trained')", False, marks=pytest.mark.slow),
        pytest.param("cpu:1", _TRAINS, False, marks=pytest.mark.slow),
        pytest.param("cpu:2", _MEETS + _TRAINS, False, marks=pytest.mark.slow),
        ("cpu:2", _SETS_UP + _TRAINS, False),
    ],
    ids=["alone on each", "no training", "one process", "a group of its own", "lockstep.init"],
)
def test_a_script_that_trains_on_each_device_by_itself_is_told_so_once(tmp_path, devices, script, is_warned):
    (tmp_path / "train.py").write_text(script)
    code = "import sys; from lockstep.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", code, "run", "--devices", devices, "train.py"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=60)
    assert ended.returncode == 0, ended.stderr
    assert ended.stderr.count("each of the 2 processes trained a model of its own") == is_warned
