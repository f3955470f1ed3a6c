"""The supervisor's end of the fork server, with a real server."""

import os
import select

import pytest

from lockstep.launch.fork_server import ServerProcess


@pytest.fixture
def signal_pipe():
    reader, writer = os.pipe()
    yield writer
    os.close(reader)
    os.close(writer)


def test_a_server_that_cannot_import_torch_reports_the_traceback(tmp_path, signal_pipe):
    (tmp_path / "torch.py").write_text("raise ImportError('a broken torch')\n")
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}"}
    order = {"preload": [], "target": {}, "log_directory": str(tmp_path), "ranks": []}
    events = []
    with ServerProcess(order, environment, signal_pipe) as server:
        while not events and not server.closed:
            select.select([server], [], [], 30.0)
            events += server.events()
        pid = server.pid
    assert [event["event"] for event in events] == ["broken"]
    assert "a broken torch" in events[0]["message"]
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
