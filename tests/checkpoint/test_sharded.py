"""Checkpoints that several processes write, each its own rows: whole for all readers, or not there at all."""

import dataclasses
import shutil
import threading

import pytest
import safetensors.torch
import torch
from tests.checkpoint.manifests import manifest_of
from tests.checkpoint.shards import RANKS, by_all, rows_of, save

from lockstep.checkpoint import BackgroundWriter, CheckpointState, read, read_newest, sharded, verify, write
from lockstep.checkpoint.manifest import MANIFEST, file_names, tensor_files
from lockstep.checkpoint.sharded import prepare_sharded
from lockstep.errors import CheckpointError, ConfigError


def whole(rows=7):
    """A state of tensors with rows, and what only one process holds."""
    draw = torch.Generator().manual_seed(rows)
    weight = torch.randn(rows, 4, generator=draw)
    return CheckpointState(
        model={"weight": weight, "half": weight[:, 0].bfloat16(), "count": torch.tensor(5)},
        optimizer={"0|weight|exp_avg": weight * 2, "0|weight|step": torch.tensor(3.0)},
        progress={"run": "r", "position": [1, 2]},
        optimizer_records={"0": {"class": "SGD"}},
    )


def require_equal(found, wanted):
    for one, other in ((found.model, wanted.model), (found.optimizer, wanted.optimizer)):
        assert one.keys() == other.keys()
        for name, tensor in one.items():
            assert (tensor.dtype, tensor.shape) == (other[name].dtype, other[name].shape), name
            assert torch.equal(tensor, other[name]), name
    assert found.progress == wanted.progress
    assert found.optimizer_records == wanted.optimizer_records


@pytest.fixture
def sound(tmp_path):
    """A checkpoint that three processes wrote."""
    path, *others = save(tmp_path / "run", whole())
    assert others == [path, path]
    return path


@pytest.mark.parametrize("rows", [1, 2, 7])
def test_what_all_write_is_read_as_what_one_has_written(tmp_path, rows):
    paths = save(tmp_path / "run", whole(rows))
    alone = write(tmp_path / "alone", whole(rows), step=7)
    assert paths == [tmp_path / "run" / "step-00000007"] * RANKS
    require_equal(read(paths[0]), read(alone))


def test_each_file_holds_the_rows_of_one_process_and_the_folder_nothing_else(sound):
    names = [name for rank in range(RANKS) for name in file_names(rank, RANKS)]
    assert {path.name for path in sound.iterdir()} == {*names, "state.json", MANIFEST}
    shapes = [
        {name: tuple(t.shape) for name, t in safetensors.torch.load_file(sound / file).items()} for file in names[::2]
    ]
    assert shapes[0] == {"weight": (3, 4), "half": (3,), "count": ()}
    assert shapes[1] == shapes[2] == {"weight": (2, 4), "half": (2,)}
    assert [path.name for path in sound.parent.iterdir()] == [sound.name]


def test_threads_of_all_ranks_write_while_the_tensors_change(tmp_path):
    wanted = whole()

    def body(rank, exchange):
        state = rows_of(whole(), rank)
        prepared = prepare_sharded(tmp_path, state, step=7, rank=rank, ranks=RANKS, exchange=exchange)
        writer = BackgroundWriter()
        path = writer.write(prepared)
        for tensor in (*state.model.values(), *state.optimizer.values()):
            tensor.zero_()
        writer.finish()
        return path

    require_equal(read(by_all(body)[0]), wanted)


def test_older_checkpoints_go_once(tmp_path):
    for step in (1, 2, 3):
        assert not [each for each in save(tmp_path, whole(), step, keep=2) if isinstance(each, Exception)]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]


@pytest.mark.fault("K2")
def test_a_disk_that_is_full_for_one_rank_stops_all_and_leaves_the_former(tmp_path, monkeypatch):
    save(tmp_path, whole(), 1)
    genuine = sharded.write_tensors

    def write_tensors(folder, state, names):
        if names == file_names(1, RANKS):
            (folder / names[0]).write_bytes(b"half")
            raise OSError(28, "No space left on device")
        return genuine(folder, state, names)

    monkeypatch.setattr(sharded, "write_tensors", write_tensors)
    found = save(tmp_path, whole(), 2)
    assert all(isinstance(each, CheckpointError) for each in found)
    assert all("The checkpoint of step 2 could not be written" in str(each) for each in found)
    assert [str(each).startswith("Rank 1: ") for each in found] == [True, False, True]
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]


def test_rows_that_cannot_be_written_are_refused_by_all_before_anything_is_made(tmp_path):
    def body(rank, exchange):
        state = rows_of(whole(), rank)
        if rank == 2:
            state.model["odd"] = torch.eye(3).to_sparse()
        return prepare_sharded(tmp_path / "run", state, step=7, rank=rank, ranks=RANKS, exchange=exchange)

    found = by_all(body)
    assert [type(each) for each in found] == [CheckpointError, CheckpointError, ConfigError]
    assert str(found[0]).startswith("Rank 2: A checkpoint holds dense tensors only")
    assert not (tmp_path / "run").exists()


@pytest.mark.fault("K2")
def test_the_room_for_all_rows_is_asked_for_at_once(tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr("lockstep.checkpoint.writer.require_space", lambda place, size: asked.append(size))
    save(tmp_path, whole())
    assert len(asked) == 1
    assert asked[0] > whole().tensor_bytes


@pytest.mark.fault("K1")
@pytest.mark.parametrize(("moment", "left"), [(1, []), (2, ["step-00000007"])], ids=["writing", "committed"])
def test_a_rank_that_leaves_while_all_write_leaves_a_whole_checkpoint_or_none(tmp_path, moment, left):
    all_written = threading.Barrier(RANKS)

    def body(rank, exchange):
        prepared = prepare_sharded(tmp_path, rows_of(whole(), rank), step=7, rank=rank, ranks=RANKS, exchange=exchange)
        calls = []

        def cut(value):
            calls.append(value)
            if len(calls) == moment:
                all_written.wait(60)
                raise RuntimeError("Connection closed by peer\nand more")
            return exchange(value)

        return dataclasses.replace(prepared, exchange=cut).write()

    for failure in by_all(body):
        assert isinstance(failure, CheckpointError)
        assert str(failure).endswith("a rank left while it was written: Connection closed by peer")
    assert [path.name for path in tmp_path.iterdir()] == left
    assert not left or read(tmp_path / left[0])


def test_hosts_that_do_not_see_one_folder_are_told_so(tmp_path):
    def body(rank, exchange):
        own = tmp_path / f"host{rank // 2}"
        return prepare_sharded(own, rows_of(whole(), rank), step=7, rank=rank, ranks=RANKS, exchange=exchange)

    assert by_all(body) == [None] * RANKS
    assert list((tmp_path / "host0").iterdir()) == []
    assert not (tmp_path / "host1").exists()


@pytest.mark.fault("K3")
@pytest.mark.parametrize("file", [name for rank in range(RANKS) for name in file_names(rank, RANKS)])
def test_a_changed_byte_in_any_part_is_found_and_the_one_before_is_taken(tmp_path, file, caplog):
    save(tmp_path, whole(), 1)
    newest = save(tmp_path, whole(), 2)[0]
    content = bytearray((newest / file).read_bytes())
    content[-1] ^= 1
    (newest / file).write_bytes(content)
    restored = read_newest(tmp_path)
    assert restored.path.name == "step-00000001"
    assert f"Checkpoint skipped: {newest / file}" in caplog.text


@pytest.mark.fault("K3")
def test_a_missing_part_is_named(sound):
    name = file_names(1, RANKS)[0]
    (sound / name).unlink()
    with pytest.raises(CheckpointError, match=f"{name} is missing: the checkpoint is incomplete"):
        verify(sound)


def test_a_manifest_without_one_of_the_parts_is_refused(sound):
    for name in file_names(1, RANKS):
        (sound / name).unlink()
    (sound / MANIFEST).write_bytes(manifest_of(sound, 7))
    with pytest.raises(CheckpointError, match="does not list the files of a checkpoint"):
        read(sound)


@pytest.mark.parametrize(
    "odd",
    [torch.zeros(2, 5), torch.zeros(2, 4, dtype=torch.float64), torch.zeros(8), torch.tensor(1.0)],
    ids=["wider", "another dtype", "flat", "a number"],
)
def test_rows_that_do_not_fit_together_are_refused(sound, odd):
    safetensors.torch.save_file({"weight": odd}, sound / file_names(1, RANKS)[0])
    (sound / MANIFEST).write_bytes(manifest_of(sound, 7))
    with pytest.raises(CheckpointError, match="rows of 'weight' do not make up one tensor"):
        read(sound)


def test_a_number_in_two_parts_is_refused(sound):
    shutil.copyfile(sound / file_names(0, RANKS)[0], sound / file_names(1, RANKS)[0])
    (sound / MANIFEST).write_bytes(manifest_of(sound, 7))
    with pytest.raises(CheckpointError, match="do not make up one tensor"):
        read(sound)


def test_files_are_told_by_their_names_alone():
    assert tensor_files(["state.json", *file_names()]) == (["model.safetensors"], ["optimizer.safetensors"])
    pairs = [file_names(shard, 12) for shard in range(12)]
    names = ["state.json", *(name for pair in pairs for name in pair)]
    assert tensor_files(names[::-1]) == ([model for model, _ in pairs], [other for _, other in pairs])
    for wrong in ([], ["state.json"], names[1:], [*names, "more.json"], [*names[:-1], "model.safetensors"]):
        assert tensor_files(wrong) is None
