import gzip
import struct

import numpy as np
import pytest
import torch

from lockstep.data import IDX, read_idx
from lockstep.errors import ConfigError, DataError


def idx(array, code=0x08):
    return struct.pack(f">4B{array.ndim}I", 0, 0, code, array.ndim, *array.shape) + array.tobytes()


IMAGES = np.random.default_rng(0).integers(0, 255, (20, 6, 5), dtype=np.uint8)
LABELS = (np.arange(20) % 10).astype(np.uint8)


def write(folder, *, images=None, labels=None, end="", prefix="train", dot="-"):
    contents = {f"images{dot}idx3": idx(IMAGES) if images is None else images}
    contents[f"labels{dot}idx1"] = idx(LABELS) if labels is None else labels
    for name, content in contents.items():
        (folder / f"{prefix}-{name}-ubyte{end}").write_bytes(gzip.compress(content) if end else content)
    return folder


@pytest.mark.parametrize("end", ["", ".gz"])
@pytest.mark.parametrize("dot", ["-", "."])
def test_images_and_labels_are_read_plain_and_compressed(tmp_path, end, dot):
    write(tmp_path, end=end, dot=dot)
    write(tmp_path, end=end, dot=dot, prefix="t10k", labels=idx(LABELS[::-1].copy()))
    train, validation = IDX(tmp_path), IDX(tmp_path, "validation")
    assert torch.equal(train.images[:, 0], torch.from_numpy(IMAGES)) and train.labels.tolist() == LABELS.tolist()
    assert validation.labels.tolist() == LABELS[::-1].tolist()
    assert train[3][0].dtype == torch.uint8 and train[3][0].shape == (1, 6, 5)
    assert torch.allclose(train.device_transform(train.images), train.images / 255)


@pytest.mark.parametrize(("code", "dtype"), [(0x09, ">i1"), (0x0B, ">i2"), (0x0C, ">i4"), (0x0D, ">f4"), (0x0E, ">f8")])
def test_every_type_of_number_is_read(tmp_path, code, dtype):
    array = np.arange(-3, 9).reshape(3, 4).astype(dtype)
    (tmp_path / "numbers").write_bytes(idx(array, code))
    got = read_idx(tmp_path / "numbers", dims=2)
    assert np.array_equal(got, array) and got.dtype.isnative


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (b"", "begins with nothing"),
        (b"\x89PNG\r\n\x1a\n", "is not an IDX file: it begins with 89 50 4e 47"),
        (idx(IMAGES)[:7], "truncated within its header"),
        (idx(IMAGES)[:-1], r"should have 600 bytes .* has only 599"),
        (idx(IMAGES) + b"x", r"should have 600 bytes .* has more"),
        (idx(LABELS), "has 1 dimensions, and 3 are needed"),
        (idx(IMAGES[:0]), "should have 0 bytes"),
        (
            struct.pack(">4B3I", 0, 0, 8, 3, 1 << 31, 1 << 20, 1 << 20),
            "should have 2,361,183,241,434,822,606,848 bytes",
        ),
    ],
)
def test_a_broken_file_is_named(tmp_path, broken, message):
    write(tmp_path, images=broken)
    with pytest.raises(DataError, match=message) as caught:
        IDX(tmp_path)
    assert "train-images-idx3-ubyte" in str(caught.value)


def test_a_broken_compression_is_named(tmp_path):
    write(tmp_path, end=".gz")
    path = tmp_path / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz cannot be decompressed"):
        IDX(tmp_path)


def test_unequal_counts_are_refused(tmp_path):
    write(tmp_path, labels=idx(LABELS[:19]))
    with pytest.raises(DataError, match="holds 20 images and train-labels-idx1-ubyte 19 labels"):
        IDX(tmp_path)


def test_a_label_outside_the_classes_is_named(tmp_path):
    write(tmp_path)
    with pytest.raises(DataError, match=r"sample 5 \(train-labels-idx1-ubyte, entry 5\) has label 5"):
        IDX(tmp_path, classes=5)
    assert IDX(tmp_path, classes=[f"digit {n}" for n in range(10)]).classes[3] == "digit 3"


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match=r"data folder .*absent does not exist"):
        IDX(tmp_path / "absent")
    with pytest.raises(DataError, match="has no train-images file"):
        IDX(tmp_path)
    with pytest.raises(ConfigError, match="no split 'test'"):
        IDX(tmp_path, "test")
    with pytest.raises(DataError, match="does not exist"):
        read_idx(tmp_path / "absent")


def test_numbers_that_are_no_bytes_are_no_images(tmp_path):
    write(tmp_path, images=idx(IMAGES.astype(">f4"), 0x0D))
    with pytest.raises(DataError, match="values of type float32"):
        IDX(tmp_path)
