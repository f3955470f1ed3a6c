"""Output to a terminal, pipe or disk that takes nothing any more."""

import logging
import os
import resource
import subprocess
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

from lockstep.runtime.output import TERMINAL_LOG, PrintableFormatter, lasting


@contextmanager
def writer(descriptor):
    with os.fdopen(descriptor, "w") as stream:
        yield stream


@pytest.mark.fault("T1")
def test_what_a_closed_pipe_does_not_take_is_in_the_log_folder(tmp_path):
    reader, end = os.pipe()
    with writer(end) as stream:
        lasts = lasting(stream, tmp_path)
        print("before", file=lasts)
        assert os.read(reader, 100) == b"before\n"
        os.close(reader)
        print("after", file=lasts)
        os.write(end, b"from C++\n")
        print("last", file=lasts, flush=True)
    assert (tmp_path / TERMINAL_LOG).read_text() == "after\nfrom C++\nlast\n"


@pytest.mark.fault("T1")
def test_a_closed_terminal_without_a_log_folder_fails_nothing(tmp_path):
    ours, terminal = os.openpty()
    with writer(terminal) as stream:
        lasts = lasting(stream, tmp_path / "absent")
        os.close(ours)
        for _ in range(3):
            print("x" * 10_000, file=lasts, flush=True)


@contextmanager
def disk_of(size):
    """Files may have so many bytes at most."""
    former = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, former[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, former)


@pytest.mark.fault("T2")
def test_a_log_on_a_full_disk_fails_nothing_and_goes_on_when_there_is_room(tmp_path):
    with (tmp_path / "rank-001.log").open("w") as file:
        lasts = lasting(file, None)
        with disk_of(4):
            print("12345678", file=lasts)
            print("lost", file=lasts)
        print("again", file=lasts)
    assert (tmp_path / "rank-001.log").read_text() == "1234again\n"


@pytest.mark.fault("T2")
def test_a_result_on_a_full_disk_fails(tmp_path):
    with (tmp_path / "results").open("w") as file:
        lasts = lasting(file, None, is_result=True)
        with disk_of(4), pytest.raises(OSError):
            print("12345678", file=lasts, flush=True)
        lasts.flush()


def test_a_result_on_a_full_device_fails_and_a_log_does_not(tmp_path):
    """It was taken for a terminal that is gone: ``lockstep train > /dev/full`` ended well without its summary."""
    for is_result in (True, False):
        with Path("/dev/full").open("w") as full:
            stream = lasting(full, tmp_path, is_result=is_result)
            if is_result:
                with pytest.raises(OSError, match="No space left on device"):
                    print("lost", file=stream)
                os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # for what the buffer holds
            else:
                print("lost", file=stream)
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("closed", ["0", "1", "2", "012"])
def test_no_file_takes_the_number_of_a_stream_that_the_parent_has_closed(closed, tmp_path):
    code = (
        "import sys; from lockstep.runtime.output import open_standard_streams; open_standard_streams()\n"
        "with open('file', 'w') as file:\n"
        "    assert file.fileno() > 2\n"
        "    print('out'); print('err', file=sys.stderr)\n"
    )
    shell = "".join(f" {number}>&-" for number in closed)
    subprocess.run(["sh", "-c", f'exec "$0" -c "$1"{shell}', sys.executable, code], cwd=tmp_path, check=True)
    assert (tmp_path / "file").read_text() == ""


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "ascii:surrogateescape"])
def test_standard_output_takes_the_names_of_files_in_any_encoding(encoding):
    """``data``, ``compare`` and ``report`` ended in a UnicodeEncodeError for a folder named in Latin-1."""
    code = (
        "from lockstep.runtime.output import open_standard_streams; open_standard_streams()\n"
        "print('caf\\udce9', '\\u65e5')"
    )
    environment = {**os.environ, "PYTHONIOENCODING": encoding}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment)
    assert printed == b"caf\xe9 " + ("日".encode() if encoding == "utf-8" else b"\\u65e5") + b"\n"


def test_the_stream_keeps_name_and_encoding_and_says_that_it_is_no_terminal(tmp_path):
    with (tmp_path / "file").open("w", encoding="latin1", errors="replace") as file:
        lasts = lasting(file, None)
        assert (lasts.name, lasts.encoding, lasts.errors) == (file.name, "latin1", "replace")
        assert lasts.fileno() == file.fileno() and not lasts.isatty()
        print("é", "\u2026", file=lasts)
    assert (tmp_path / "file").read_bytes() == b"\xe9 ?\n"


def test_letters_that_the_encoding_lacks_fail_nothing(tmp_path):
    """The table of a prediction ended in a UnicodeEncodeError where the locale was not UTF-8."""
    with (tmp_path / "file").open("w", encoding="ascii") as file:
        print("größe", os.fsdecode(b"\xff"), "\u86c7\udcff", file=lasting(file, None))
    assert (tmp_path / "file").read_bytes() == b"gr\\xf6\\xdfe \xff \\u86c7\\udcff\n"


@pytest.mark.fault("T8")
def test_escape_codes_in_what_lockstep_logs_are_shown_and_those_of_other_libraries_obeyed():
    shown = PrintableFormatter("%(message)s")
    for name, expected in (("lockstep.data", "a\\x1b[2J.jpg\n"), ("lockstepped", "a\x1b[2J.jpg\n")):
        record = logging.LogRecord(name, logging.WARNING, __file__, 1, "%s.jpg\n", ("a\x1b[2J",), None)
        assert shown.format(record) == expected
