import io
import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data import ArrowFiles, CenterCrop
from lockstep.data.reader import SampleReader
from lockstep.errors import ConfigError, DataError

pa = pytest.importorskip("pyarrow", reason="pyarrow is not installed")
pq = pytest.importorskip("pyarrow.parquet")


def photo(number):
    buffer = io.BytesIO()
    Image.new("RGB", (10, 12), (number, 2 * number, 3 * number)).save(buffer, "PNG")
    return buffer.getvalue()


def table(first=0, count=25):
    numbers = list(range(first, first + count))
    return pa.table(
        {
            "x": [[n, n + 0.5] for n in numbers],
            "photo": [photo(n) for n in numbers],
            "label": pa.array([n % 4 for n in numbers], pa.int16()),
            "unused": [str(n) for n in numbers],
        }
    )


def write(path, content):
    if path.suffix == ".parquet":
        pq.write_table(content, path, row_group_size=4)
    else:
        with pa.OSFile(str(path), "wb") as sink:
            new = pa.ipc.new_stream if path.suffix == ".feather" else pa.ipc.new_file
            with new(sink, content.schema) as writer:
                writer.write_table(content, max_chunksize=4)
    return path


@pytest.mark.parametrize("suffix", [".parquet", ".arrow", ".feather"])
def test_rows_of_several_files_are_read_by_number(tmp_path, suffix):
    write(tmp_path / f"a{suffix}", table())
    write(tmp_path / f"b{suffix}", table(25, 7))
    rows = pickle.loads(pickle.dumps(ArrowFiles(tmp_path, "x", "label", classes=4)))
    inputs, labels = SampleReader(rows, seed=0).read(0, np.array([31, 0, 26, 4, 13, 24]))
    assert torch.equal(inputs, torch.tensor([[n, n + 0.5] for n in (31, 0, 26, 4, 13, 24)]))
    assert labels.tolist() == [3, 0, 2, 0, 1, 0]
    assert (
        len(rows) == 32 and rows.sample_path(26) == f"b{suffix}, row 1" and rows.sample_path(24) == f"a{suffix}, row 24"
    )
    with pytest.raises(IndexError):
        rows[32]


def test_pictures_in_a_column_are_decoded(tmp_path):
    rows = ArrowFiles(write(tmp_path / "a.parquet", table()), "photo", "label", transform=CenterCrop(8))
    pictures, labels = SampleReader(rows, seed=0).read(0, np.array([20, 3]))
    assert pictures[:, :, 4, 4].tolist() == [[20, 40, 60], [3, 6, 9]] and labels.tolist() == [0, 3]


def test_few_row_groups_are_held(tmp_path):
    rows = ArrowFiles(write(tmp_path / "a.parquet", table()), "x", "label")
    for index in range(25):
        assert rows[index][1] == index % 4
    assert len(rows._kept) == 4


def test_wrong_labels_and_columns_are_named(tmp_path):
    path = write(tmp_path / "a.parquet", table())
    with pytest.raises(DataError, match=r"sample 3 \(a\.parquet, row 3\) has label 3"):
        ArrowFiles(path, "x", "label", classes=3)
    with pytest.raises(DataError, match=r"no column 'labels'\. Did you mean 'label'"):
        ArrowFiles(path, "x", "labels")
    with pytest.raises(DataError, match=r"column 'x'.*every target must be one integer"):
        ArrowFiles(path, "photo", "x", classes=3)
    write(tmp_path / "b.parquet", table().drop(["x"]))
    with pytest.raises(DataError, match=r"b\.parquet has no column 'x'"):
        ArrowFiles(tmp_path, "x", "label")


def test_an_empty_cell_is_named(tmp_path):
    content = pa.table({"x": [[1.0], None, [2.0, None], [3.0]], "label": [0, 1, 1, None]})
    path = write(tmp_path / "a.arrow", content)
    reader = SampleReader(ArrowFiles(path, "x", "label"), seed=0)
    for index, why in ((1, "the cell is empty"), (2, "contains a null")):
        with pytest.raises(DataError, match=rf"Sample {index} \(a\.arrow, row {index}\) cannot be read: .*{why}"):
            reader.read(0, np.array([index]))
    with pytest.raises(DataError, match="has empty cells"):
        ArrowFiles(path, "x", "label", classes=2)


@pytest.mark.parametrize("suffix", [".parquet", ".arrow"])
def test_broken_and_missing_files_are_named(tmp_path, suffix):
    path = write(tmp_path / f"a{suffix}", table())
    path.write_bytes(path.read_bytes()[:300])
    with pytest.raises(DataError, match=rf"a\{suffix} cannot be read as {suffix[1:]}"):
        ArrowFiles(path, "x", "label")
    with pytest.raises(DataError, match="does not exist"):
        ArrowFiles(tmp_path / f"no{suffix}", "x", "label")


def test_other_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="has no files"):
        ArrowFiles(tmp_path, "x", "label")
    write(tmp_path / "a.parquet", table())
    write(tmp_path / "a.arrow", table())
    with pytest.raises(ConfigError, match=r"files of one kind .* and was given \.arrow, \.parquet"):
        ArrowFiles(tmp_path, "x", "label")


def test_one_sentence_where_pyarrow_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(ConfigError, match=r"ArrowFiles needs pyarrow, .* Install it: pip install pyarrow\."):
        ArrowFiles(tmp_path, "x", "label")


def test_an_integer_that_int64_cannot_hold_is_refused(tmp_path):
    """It became negative, and a list with one floats of seven digits, in silence."""
    content = pa.table({"x": pa.array([[1, 2], [1 << 63, 2], [1 << 63]], pa.list_(pa.uint64())), "label": [0, 1, 1]})
    reader = SampleReader(ArrowFiles(write(tmp_path / "a.arrow", content), "x", "label"), seed=0)
    assert reader.read(0, np.array([0]))[0].tolist() == [[1, 2]]
    for index in (1, 2):
        with pytest.raises(DataError, match=rf"Sample {index} .* an integer of 2\^63 or more"):
            reader.read(0, np.array([index]))
