import os
import pickle
import subprocess

import numpy as np
import pytest

from lockstep.data.formats.cifar10 import load_arrays
from lockstep.errors import DataError

IMAGES = np.random.default_rng(0).integers(0, 255, (5, 12), dtype=np.uint8)


@pytest.mark.parametrize("protocol", [0, 1, 2, 3, 4, 5])
def test_arrays_lists_and_texts_are_read(protocol):
    content = {"data": IMAGES, b"labels": [1, 2, 3, 4, 5], "batch_label": "training batch 1 of 5"}
    if protocol == 5:  # NumPy writes another form there, which the published files do not have
        with pytest.raises(DataError, match="_frombuffer"):
            load_arrays(pickle.dumps(content, protocol), "file")
        return
    found = load_arrays(pickle.dumps(content, protocol), "file")
    assert np.array_equal(found["data"], IMAGES) and found["labels"] == [1, 2, 3, 4, 5]


def test_the_names_and_texts_of_python_2_are_read():
    body = IMAGES.tobytes()
    text = (
        b"(dp0\nS'data'\np1\ncnumpy.core.multiarray\n_reconstruct\np2\n(cnumpy\nndarray\np3\n(I0\ntp4\nS'b'\np5\ntp6\nRp7\n"
        b"(I1\n(I5\nI12\ntp8\ncnumpy\ndtype\np9\n(S'u1'\np10\nI0\nI1\ntp11\nRp12\n"
        b"(I3\nS'|'\np13\nNNNI-1\nI-1\nI0\ntp14\nbI00\nS" + repr(body)[1:].encode() + b"\np15\ntp16\nbs."
    )
    found = load_arrays(text, "file")
    assert np.array_equal(found["data"], IMAGES)


def test_arrays_in_fortran_order_are_read():
    found = load_arrays(pickle.dumps({"data": np.asfortranarray(IMAGES)}, 2), "file")
    assert np.array_equal(found["data"], IMAGES)


class Runs:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize(
    "evil",
    [
        lambda mark: Runs(os.system, f"touch {mark}"),
        lambda mark: Runs(subprocess.check_call, ["touch", str(mark)]),
        lambda mark: Runs(eval, f"open({str(mark)!r}, 'w')"),
        lambda mark: Runs(getattr, "text", "upper"),
        lambda mark: Runs(np.fromfile, str(mark)),
        lambda mark: {"data": Runs(os.mkdir, str(mark))},
    ],
)
@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.fault("K7")
def test_a_pickle_that_would_run_something_is_refused_and_runs_nothing(tmp_path, evil, protocol):
    mark = tmp_path / "was-here"
    with pytest.raises(DataError, match=r"batch_7 cannot be read: it asks for .* Nothing of it was used"):
        load_arrays(pickle.dumps(evil(mark), protocol), "batch_7")
    assert not mark.exists()


def test_what_was_built_cannot_be_called_or_changed():
    chain = b"cnumpy\nndarray\n(S'posix'\ntR(dS'__class__'\nS'x'\nsb."  # an attribute set on the record
    with pytest.raises(DataError, match="holds a _Array, not a dictionary"):
        load_arrays(chain, "file")


@pytest.mark.parametrize(
    "array",
    [
        np.array([print], dtype=object),
        np.zeros(3, np.float64),
        np.zeros(3, np.int64),
        np.zeros(2, [("a", "u1")]),
    ],
)
def test_only_arrays_of_bytes_are_taken(array):
    with pytest.raises(DataError, match=r"elements are not bytes|asks for"):
        load_arrays(pickle.dumps({"data": array}, 2), "file")


def test_a_shape_that_lies_about_the_bytes_is_refused():
    honest = pickle.dumps({"data": IMAGES}, 2)
    lie = honest.replace(b"K\x05K\x0c\x86", b"K\x05K\x0d\x86")
    assert lie != honest
    with pytest.raises(DataError, match=r"shape \(5, 13\) with 60 bytes"):
        load_arrays(lie, "file")


@pytest.mark.parametrize("content", [b"", b"no pickle", pickle.dumps({"data": IMAGES}, 2)[:-20], pickle.dumps([1])])
def test_anything_else_is_refused(content):
    with pytest.raises(DataError, match="file "):
        load_arrays(content, "file")


@pytest.mark.fault("M9")
@pytest.mark.parametrize(
    "content",
    [
        b"\x80\x02}r\xff\xff\xff\x3f.",  # a place in the table of objects: 8 GiB
        b"}p1073741823\n.",
        b"\x80\x02}U\x01a\x8b\x10\x27\0\0" + b"\x7f" * 10_000 + b"s.",  # 80,000 bits, more than can be shown
        b"}S'a'\nI" + b"9" * 4000 + b"\ns.",
    ],
)
def test_numbers_that_would_take_memory_are_refused(content):
    with pytest.raises(DataError, match="it has a number of"):
        load_arrays(content, "file")
