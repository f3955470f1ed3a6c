"""The supervisor's end of the fork server, with a real server."""

import os
import select

import pytest

from lockstep.launch.fork_server import ServerProcess
from lockstep.launch.supervisor import run_sequentially


@pytest.fixture
def signal_pipe():
    reader, writer = os.pipe()
    yield writer
    os.close(reader)
    os.close(writer)


def started(folder, signal_pipe, preloaded, *, ranks=0):
    """A server with a module of this text, and the events until it has ended or says that it cannot go on."""
    (folder / "poor.py").write_text(preloaded)
    path = f"{folder}:{os.environ.get('PYTHONPATH', '')}"
    environment = {**os.environ, "PYTHONPATH": path, "LOCKSTEP_RUN_DIRECTORY": str(folder)}
    task = {"environment": {}, "log": "", "debug_port": None}
    each = [{"rank": rank, **task} for rank in range(ranks)]
    order = {"preload": ["poor"], "target": {}, "log_directory": str(folder), "ranks": each}
    events = []
    with ServerProcess(order, environment, signal_pipe) as server:
        while not events and not server.closed:
            select.select([server], [], [], 30.0)
            events += server.events()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)
    return server, events


def test_a_server_that_cannot_import_torch_reports_the_traceback(tmp_path, signal_pipe):
    (tmp_path / "torch.py").write_text("raise ImportError('a broken torch')\n")
    _, events = started(tmp_path, signal_pipe, "")
    assert [event["event"] for event in events] == ["broken"]
    assert events[0]["message"].startswith("No rank was started, because importing torch failed:\n")
    assert "a broken torch" in events[0]["message"]


@pytest.mark.slow
def test_a_server_that_cannot_make_a_process_says_for_which_rank_and_what_to_do(tmp_path, signal_pipe):
    """As under ``ulimit -u`` and the limits of a container: its error was a traceback of ours."""
    poor = "import os\ndef fork():\n    raise BlockingIOError(11, 'Resource temporarily unavailable')\nos.fork = fork\n"
    _, events = started(tmp_path, signal_pipe, poor, ranks=2)
    assert [event["event"] for event in events] == ["broken"]
    assert events[0]["message"] == (
        "No process could be made for rank 0: Resource temporarily unavailable. Start fewer with --devices, or allow "
        "more processes and memory (ulimit -u, ulimit -v, the limits of a container)."
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ending", "told"),
    [
        ("os.kill(os.getpid(), signal.SIGXCPU)", "was killed by SIGXCPU"),
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed"),
        ("os._exit(3)", "ended with exit code 3"),
    ],
)
def test_the_end_of_a_server_is_told(tmp_path, signal_pipe, ending, told):
    """It was said to be killed where it had ended with an error of its own."""
    server, events = started(tmp_path, signal_pipe, f"import os, signal\n{ending}\n")
    assert not events
    assert server.end == told


def test_the_module_of_an_entry_is_imported_once_for_all_ranks(tmp_path, monkeypatch):
    """Each rank of ``lockstep train`` and ``verify`` imported the code of training itself."""
    (tmp_path / "imported.py").write_text(
        "import os\nIMPORTED_BY = os.getpid()\n"
        "def main(payload):\n"
        "    with open(f\"{payload['folder']}/{os.getpid()}\", 'w') as file:\n"
        "        file.write(f'{IMPORTED_BY == os.getppid()}')\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    outcome = run_sequentially("imported:main", {}, ranks=2, threads=1, folder=tmp_path)
    assert (outcome.code, outcome.lines) == (0, ())
    assert [file.read_text() for file in tmp_path.iterdir() if file.name.isdecimal()] == ["True", "True"]


def test_every_rank_has_random_numbers_of_its_own_until_it_is_seeded(tmp_path, monkeypatch):
    """All had those of the fork server: a split without a seed was equal on all ranks, and other in the next run."""
    (tmp_path / "drawing.py").write_text(
        "import random, numpy, torch\n"
        "def main(payload):\n"
        "    drawn = random.random(), numpy.random.rand(), torch.rand(()).item()\n"
        "    with open(f\"{payload['folder']}/drawn-{drawn[0]}\", 'w') as file:\n"
        "        file.write(' '.join(map(str, drawn)))\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    assert run_sequentially("drawing:main", {}, ranks=2, threads=1, folder=tmp_path).code == 0
    first, second = (file.read_text().split() for file in tmp_path.glob("drawn-*"))
    assert not set(first) & set(second)
