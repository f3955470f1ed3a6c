import pickle

import numpy as np
import pytest
import torch

from lockstep.data import NumpyArrays
from lockstep.data.reader import SampleReader
from lockstep.errors import ConfigError, DataError

INPUTS = np.random.default_rng(0).standard_normal((12, 3, 4)).astype(np.float32)
TARGETS = (np.arange(12) % 3).astype(np.int32)


def written(folder, inputs=INPUTS, targets=TARGETS):
    np.save(folder / "x.npy", inputs)
    np.save(folder / "y.npy", targets)
    np.savez(folder / "both.npz", x=inputs, y=targets)
    np.savez_compressed(folder / "small.npz", photos=inputs, kinds=targets)
    return folder


def test_rows_are_read_from_each_kind_of_file(tmp_path):
    written(tmp_path)
    sets = [
        NumpyArrays(tmp_path / "x.npy", tmp_path / "y.npy", classes=3),
        NumpyArrays(tmp_path / "both.npz", classes=["a", "b", "c"]),
        NumpyArrays(tmp_path / "small.npz", "kinds", input_name="photos"),
    ]
    for dataset in sets:
        inputs, targets = SampleReader(pickle.loads(pickle.dumps(dataset)), seed=0).read(0, np.array([5, 0, 11]))
        assert torch.equal(inputs, torch.from_numpy(INPUTS[[5, 0, 11]]))
        assert targets.dtype == torch.int64 and targets.tolist() == [2, 0, 2]
        assert torch.equal(dataset[4][0], torch.from_numpy(INPUTS[4])) and dataset[4][1].item() == 1
    assert isinstance(sets[0].inputs, np.memmap) and len(pickle.dumps(sets[0])) < 2000


def test_numbers_in_big_endian_are_read(tmp_path):
    written(tmp_path, INPUTS.astype(">f8"), TARGETS.astype(">i2"))
    inputs, targets = NumpyArrays(tmp_path / "x.npy", tmp_path / "y.npy").get_batch(np.array([3]))
    assert inputs.dtype == torch.float64 and torch.equal(inputs[0].float(), torch.from_numpy(INPUTS[3]))
    assert targets.tolist() == [0]


def test_python_objects_are_never_unpickled(tmp_path):
    np.save(tmp_path / "x.npy", np.array([{"a": 1}], dtype=object), allow_pickle=True)
    np.savez(tmp_path / "both.npz", x=np.array([print], dtype=object), y=TARGETS)
    for path, why in (("x.npy", "Python objects in dtype"), ("both.npz", "allow_pickle=False")):
        with pytest.raises(DataError, match=rf"{path} cannot be read as an a.*{why}"):
            NumpyArrays(tmp_path / path, tmp_path / "x.npy" if path == "x.npy" else None)


@pytest.mark.parametrize(
    ("inputs", "targets", "message"),
    [
        (INPUTS, TARGETS[:9], "holds 12 inputs and 9 targets"),
        (INPUTS[:0], TARGETS[:0], "has no rows"),
        (INPUTS, TARGETS + 1, r"sample 2 \(x\.npy, row 2\) has label 3"),
        (INPUTS, TARGETS + 0.5, "with classes each must be one integer"),
        (np.array(["a"] * 12), TARGETS, "holds <U1 of shape"),
    ],
)
def test_arrays_that_do_not_fit_are_named(tmp_path, inputs, targets, message):
    written(tmp_path, inputs, targets)
    with pytest.raises(DataError, match=message):
        NumpyArrays(tmp_path / "x.npy", tmp_path / "y.npy", classes=3)


def test_broken_and_missing_files_are_named(tmp_path):
    written(tmp_path)
    for name in ("x.npy", "both.npz"):
        content = (tmp_path / name).read_bytes()
        (tmp_path / name).write_bytes(content[: len(content) // 2])
        with pytest.raises(DataError, match=rf"{name} cannot be read"):
            NumpyArrays(tmp_path / name, tmp_path / "y.npy" if name == "x.npy" else None)
    with pytest.raises(DataError, match="does not exist"):
        NumpyArrays(tmp_path / "no.npz")
    with pytest.raises(DataError, match="no array 'y'; it holds kinds, photos"):
        NumpyArrays(tmp_path / "small.npz", input_name="photos")
    with pytest.raises(ConfigError, match="name the file of the targets"):
        NumpyArrays(tmp_path / "y.npy")
