import pickle

import numpy as np
import pytest

from lockstep.data.images.cache_file import ALIGNMENT, RecordFile, writing


def record(value, blocks=1):
    return np.full(ALIGNMENT * blocks, value, dtype=np.uint8)


def written(path, values=(1, 2, 3)):
    with writing(path) as writer:
        for value in values:
            writer.append(record(value, value), [ALIGNMENT * value])
        writer.finish({"names": np.array(["a", "b", "c"])})
    return path


def test_records_are_read_as_they_were_written(tmp_path):
    records = RecordFile(written(tmp_path / "file"))
    assert len(records) == 3 and records.arrays["names"].tolist() == ["a", "b", "c"]
    for number, value in enumerate((1, 2, 3)):
        assert np.array_equal(records[number], record(value, value))


@pytest.mark.fault("D7")
def test_a_record_that_was_altered_is_not_given_out(tmp_path):
    path = written(tmp_path / "file")
    content = bytearray(path.read_bytes())
    content[ALIGNMENT + 5] ^= 16
    path.write_bytes(content)
    records = RecordFile(path)
    assert [records.verified(number) is None for number in (0, 1, 2, 1)] == [False, True, False, True]
    assert np.array_equal(records.verified(2), record(3, 3))


def test_several_records_are_appended_at_once_and_may_be_empty(tmp_path):
    with writing(tmp_path / "file") as writer:
        writer.append(np.concatenate([record(1), record(2, 2)]), [ALIGNMENT, 0, 2 * ALIGNMENT])
        assert writer.written == 3 * ALIGNMENT
        writer.finish({})
    records = RecordFile(tmp_path / "file")
    assert [len(records[number]) for number in range(3)] == [ALIGNMENT, 0, 2 * ALIGNMENT]
    assert np.array_equal(records[2], record(2, 2))


def test_sizes_that_do_not_fit_are_refused(tmp_path):
    with writing(tmp_path / "file") as writer:
        with pytest.raises(ValueError, match="do not fill"):
            writer.append(record(1), [ALIGNMENT, ALIGNMENT])
        with pytest.raises(ValueError, match="do not fill"):
            writer.append(record(1)[:9], [9])


def test_a_file_appears_whole_or_not_at_all(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(KeyError), writing(path) as writer:
        writer.append(record(1), [ALIGNMENT])
        raise KeyError
    with writing(path) as writer:
        writer.append(record(1), [ALIGNMENT])
        assert not path.exists()
    assert list(tmp_path.iterdir()) == []


def test_a_writer_that_fails_leaves_the_file_that_was_there(tmp_path):
    path = written(tmp_path / "file")
    before = path.read_bytes()
    with pytest.raises(KeyError), writing(path) as writer:
        writer.append(record(9), [ALIGNMENT])
        raise KeyError
    assert path.read_bytes() == before and list(tmp_path.iterdir()) == [path]


def test_what_is_read_may_be_changed_and_the_file_stays(tmp_path):
    path = written(tmp_path / "file")
    before = path.read_bytes()
    RecordFile(path)[0][:] = 77
    assert path.read_bytes() == before


@pytest.mark.parametrize("cut", [0, 10, 100, -1])
def test_a_file_that_is_cut_off_is_refused(tmp_path, cut):
    path = written(tmp_path / "file")
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(ValueError, match=r"not a complete photo cache file|not a photo cache file"):
        RecordFile(path)


def test_an_altered_index_is_refused(tmp_path):
    path = written(tmp_path / "file")
    content = bytearray(path.read_bytes())
    content[6 * ALIGNMENT + 50] ^= 1
    path.write_bytes(content)
    with pytest.raises(ValueError, match="not a complete photo cache file"):
        RecordFile(path)


def test_a_copy_in_another_process_opens_the_same_file(tmp_path):
    records = pickle.loads(pickle.dumps(RecordFile(written(tmp_path / "file"))))
    assert np.array_equal(records[1], record(2, 2))
