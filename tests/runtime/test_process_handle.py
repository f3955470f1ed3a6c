"""A process is signalled and waited for, with Linux's pidfd and without."""

import os
import signal
import subprocess

import pytest

from lockstep.runtime.process_handle import ProcessHandle


@pytest.fixture(params=["pidfd", "psutil"])
def sleeper(request, monkeypatch):
    if request.param == "psutil":
        monkeypatch.delattr(os, "pidfd_open")
        monkeypatch.delattr(signal, "pidfd_send_signal")
    elif not hasattr(os, "pidfd_open"):
        pytest.skip("this system has no pidfd")
    with subprocess.Popen(["sleep", "60"]) as child:
        yield child
        child.kill()


def test_a_process_is_signalled_and_its_end_is_seen_before_it_is_reaped(sleeper):
    with ProcessHandle(sleeper.pid) as handle:
        assert not handle.has_ended(0.0)
        handle.send(signal.SIGTERM)
        assert handle.has_ended(5.0)
    assert sleeper.wait() == -signal.SIGTERM


def test_a_process_that_was_reaped_gets_no_signal(sleeper):
    with ProcessHandle(sleeper.pid) as handle:
        sleeper.kill()
        sleeper.wait()
        with pytest.raises(ProcessLookupError):
            handle.send(signal.SIGTERM)
        assert handle.has_ended(0.0)
    with pytest.raises(ProcessLookupError):
        ProcessHandle(sleeper.pid)
