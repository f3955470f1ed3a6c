import os
import signal

import pytest

from lockstep.data.photo_cache.file_lock import lock_file
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


def test_a_folder_that_is_absent_is_named(tmp_path):
    with (
        pytest.raises(ConfigError, match=r"nowhere cannot be written to"),
        lock_file(tmp_path / "nowhere" / "lock", complain),
    ):
        pytest.fail("there is no lock")
