import errno
import fcntl
import os
import signal

import pytest

from lockstep.data.images.image_cache import lock_file
from lockstep.errors import ConfigError


class Waited(Exception):
    pass


def complain():
    raise Waited


def test_a_second_holder_waits_for_the_first(tmp_path):
    path = tmp_path / "lock"
    with lock_file(path, complain), pytest.raises(Waited), lock_file(path, complain):
        pytest.fail("two hold the lock")
    with lock_file(path, complain):
        assert path.exists()


def test_a_holder_that_dies_gives_the_lock_up(tmp_path):
    path, (reader, writer) = tmp_path / "lock", os.pipe()
    child = os.fork()
    if child == 0:
        with lock_file(path, complain):
            os.write(writer, b"x")
            while True:
                signal.pause()
    try:
        os.close(writer)
        assert os.read(reader, 1) == b"x"
    finally:
        os.kill(child, 9)
        os.waitpid(child, 0)
        os.close(reader)
    with lock_file(path, complain):
        assert path.exists()


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path):
    (tmp_path / "file").touch()
    with (
        pytest.raises(ConfigError, match=r"Cannot write to .*file"),
        lock_file(tmp_path / "file" / "lock", complain),
    ):
        pytest.fail("there is no lock")


def test_a_file_system_without_locks_is_named(tmp_path, monkeypatch):
    def refuse(descriptor, operation):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with (
        pytest.raises(ConfigError, match=r"has no locks \(\[Errno 38\] Function not implemented\)"),
        lock_file(tmp_path / "lock", complain),
    ):
        pytest.fail("there is no lock")
