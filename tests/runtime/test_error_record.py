"""The record of an exception that reached the top of a rank."""

from lockstep.errors import DataError
from lockstep.runtime.error_record import read_record, record_of, write_record


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


def test_an_error_of_lockstep_has_its_own_exit_code():
    record = record_of(raised(DataError("line 3 is torn")), rank=0, beat=None)
    assert (record.on_purpose, record.exit_code) == (True, 3)


def test_a_lost_connection_is_a_consequence_unless_lockstep_says_so():
    message = "[tcp] Connection closed by peer [127.0.0.1]:9"
    assert record_of(raised(RuntimeError(message)), rank=0, beat=None).is_consequence
    assert not record_of(raised(DataError(message)), rank=0, beat=None).is_consequence
