import os

import pytest
import safetensors.torch
import torch
from tests.checkpoint.full_disk import largest_file
from tests.core.test_atomic import entry_of_dead_process
from torch import nn

from lockstep.checkpoint import CheckpointState, export, read, read_newest, write
from lockstep.errors import CheckpointError, ConfigError


def contents(directory):
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def raw(tensor):
    return tensor.flatten().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("size", [0, 100, 1000, 3000])
@pytest.mark.fault("K2")
def test_a_disk_that_fills_up_leaves_everything_as_it_was(tmp_path, state_of, shown, size):
    write(tmp_path, state_of(1), step=1, keep=1)
    before = contents(tmp_path)
    with largest_file(size), pytest.raises(CheckpointError, match=r"could not be written .*untouched"):
        write(tmp_path, state_of(2, size=1000), step=2, keep=1)
    assert contents(tmp_path) == before
    assert shown(read_newest(tmp_path).state) == 1


@pytest.mark.fault("K2")
def test_a_checkpoint_larger_than_the_free_space_is_not_begun(tmp_path, state_of):
    write(tmp_path, state_of(1), step=1)
    before = contents(tmp_path)
    huge = CheckpointState({"w": torch.zeros(1).expand(10**15)}, {}, {})
    with pytest.raises(CheckpointError, match=r"no space: needs 4,000 TB, .* free at"):
        write(tmp_path, huge, step=2)
    assert contents(tmp_path) == before


def test_a_folder_that_cannot_be_made_is_named(state_of):
    """/proc takes no folders, not even from the administrator."""
    with pytest.raises(CheckpointError, match="could not be written to /proc/run"):
        write("/proc/run", state_of(1), step=1)


def test_a_file_in_place_of_the_folder_is_named(tmp_path, state_of):
    (tmp_path / "run").write_text("precious")
    with pytest.raises(CheckpointError, match=r"could not be written to .*run"):
        write(tmp_path / "run", state_of(1), step=1)
    assert (tmp_path / "run").read_text() == "precious"


def test_every_dtype_comes_back_with_its_bits(tmp_path):
    bits = torch.randint(256, (64,), dtype=torch.uint8)
    dtypes = [
        torch.float32,
        torch.float64,
        torch.float16,
        torch.bfloat16,
        torch.int64,
        torch.int32,
        torch.uint8,
    ]
    tensors = {str(dtype): bits.view(dtype) for dtype in dtypes}
    tensors |= {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(2.0),
        "flags": bits > 100,
        "turned": torch.rand(3, 4).T,
    }
    found = read(write(tmp_path, CheckpointState(tensors, {}, {}), step=0)).model
    for name, tensor in tensors.items():
        assert (found[name].dtype, found[name].shape) == (tensor.dtype, tensor.shape)
        assert raw(found[name]) == raw(tensor), name


def test_views_of_one_memory_are_written_apart(tmp_path):
    whole = torch.arange(10.0)
    found = read(write(tmp_path, CheckpointState({"a": whole[:4], "b": whole[2:]}, {"c": whole}, {}), step=0))
    assert torch.equal(found.model["b"], whole[2:])


@pytest.mark.parametrize("tensor", [torch.zeros(2, dtype=torch.complex128), torch.zeros(2, 2).to_sparse()])
def test_a_tensor_that_the_format_cannot_hold_is_refused_by_name(tmp_path, tensor):
    with pytest.raises(ConfigError, match="odd"):
        write(tmp_path, CheckpointState({"fine": torch.ones(1), "odd": tensor}, {}, {}), step=0)
    assert list(tmp_path.iterdir()) == []


def test_progress_that_json_cannot_hold_is_refused_before_anything_is_written(tmp_path):
    with pytest.raises(ConfigError, match=r"^.scheduler"):
        write(tmp_path / "run", CheckpointState({}, {}, {"scheduler": object()}), step=0)
    assert not (tmp_path / "run").exists()


def test_keeping_none_is_refused(tmp_path, state_of):
    with pytest.raises(ConfigError, match="keep=0"):
        write(tmp_path, state_of(1), step=1, keep=0)


def test_equal_states_make_equal_files(tmp_path, state_of):
    left, right = (write(tmp_path / side, state_of(3), step=3) for side in ("left", "right"))
    assert contents(left) == contents(right)


def test_exported_weights_load_into_the_plain_model(tmp_path, tied):
    path = export(tmp_path / "out" / "weights.safetensors", tied.state_dict())
    fresh = type(tied)()
    fresh.load_state_dict(safetensors.torch.load_file(path))
    assert all(torch.equal(a, b) for a, b in zip(fresh.state_dict().values(), tied.state_dict().values()))
    assert fresh.head.weight is fresh.embed.weight


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o007, 0o660)])
def test_every_file_has_the_mode_that_the_umask_gives(tmp_path, state_of, umask, mode):
    before = os.umask(umask)
    try:
        files = [export(tmp_path / "model.safetensors", {"w": torch.ones(2)})]
        files += write(tmp_path / "run", state_of(1), step=1).iterdir()
    finally:
        os.umask(before)
    assert {path.name: oct(path.stat().st_mode & 0o777) for path in files} == {p.name: oct(mode) for p in files}


def test_an_export_that_fails_leaves_the_older_file(tmp_path):
    path = export(tmp_path / "weights.safetensors", nn.Linear(2, 2).state_dict())
    before = contents(tmp_path)
    with largest_file(100), pytest.raises(CheckpointError, match="could not be written"):
        export(path, nn.Linear(200, 200).state_dict())
    assert contents(tmp_path) == before


@pytest.mark.fault("K1")
def test_the_next_save_cleans_up_after_a_killed_one(tmp_path, state_of):
    dead = entry_of_dead_process(tmp_path / "step-00000007")
    dead.mkdir()
    write(tmp_path, state_of(8), step=8)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000008"]
