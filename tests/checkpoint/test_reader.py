import json
import os
import pickle
import random
import shutil
from contextlib import contextmanager

import pytest
import safetensors.torch
import torch
from tests.checkpoint.manifests import manifest_of

from lockstep.checkpoint import read, read_newest, verify, write
from lockstep.checkpoint.manifest import digest, seal
from lockstep.checkpoint.reader import JoinedRows
from lockstep.core.fingerprint import digest_tensor
from lockstep.errors import CheckpointError, CheckpointMismatch


@pytest.fixture
def sound(tmp_path, state_of):
    return write(tmp_path / "run", state_of(7), step=7)


def refused(path):
    with pytest.raises(CheckpointError) as raised:
        read(path)
    assert raised.value.exit_code == 3
    return str(raised.value)


def reseal(path, **changes):
    """Changes the manifest and seals it again, as someone with bad intentions would."""
    body = json.loads((path / "manifest.json").read_bytes())["body"]
    (path / "manifest.json").write_bytes(seal(body | changes))
    return body


@pytest.mark.fault("K3")
def test_a_hundred_random_bit_flips_are_refused(sound, tmp_path):
    moments = random.Random(1)
    files = sorted(sound.iterdir())
    assert len(files) == 4
    copy = tmp_path / "flipped"
    for number in range(100):
        shutil.copytree(sound, copy)
        path = copy / files[number % len(files)].name
        content = bytearray(path.read_bytes())
        content[moments.randrange(len(content))] ^= 1 << moments.randrange(8)
        path.write_bytes(content)
        assert str(copy) in refused(copy)
        shutil.rmtree(copy)
    assert read(sound).progress == {"step": 7}


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.safetensors", "state.json", "manifest.json"])
@pytest.mark.fault("K3")
def test_a_missing_a_cut_and_a_zeroed_file_are_refused_by_name(sound, name):
    path = sound / name
    content = path.read_bytes()
    path.write_bytes(content[:-1])
    assert str(path) in refused(sound)
    path.write_bytes(content[: len(content) // 2] + bytes(len(content) - len(content) // 2))
    assert str(path) in refused(sound)
    path.unlink()
    assert f"{path} is missing" in refused(sound)
    path.symlink_to("/etc/hostname")
    assert "is not a regular file" in refused(sound)
    path.unlink()
    os.mkfifo(path)
    assert "is not a regular file" in refused(sound)


def test_a_folder_that_is_not_there_is_refused(tmp_path):
    assert "There is no checkpoint at" in refused(tmp_path / "step-00000009")


@pytest.mark.parametrize("name", ["../outside.json", "/etc/passwd", "model.safetensors/..", "x.pt", "", "a" * 99])
@pytest.mark.fault("K8")
def test_a_manifest_that_names_a_file_elsewhere_is_refused(sound, name):
    (sound.parent / "outside.json").write_text("{}")
    files = json.loads((sound / "manifest.json").read_bytes())["body"]["files"]
    reseal(sound, files=files | {name: {"size": 2, "sha256": digest(sound.parent / "outside.json")}})
    assert "a file with the invalid name" in refused(sound)


@pytest.mark.parametrize("files", [{}, {"state.json": {"size": 1}}, {"state.json": 3}, ["state.json"], None])
def test_a_manifest_without_the_right_entries_is_refused(sound, files):
    reseal(sound, files=files)
    refused(sound)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'{"body":{}}', b"[" * 100_000, bytes(2 << 20), b"\xff\xfe"])
def test_a_manifest_of_other_content_is_refused(sound, content):
    (sound / "manifest.json").write_bytes(content)
    refused(sound)


class Evil:
    def __reduce__(self):
        return os.system, ("touch ran-code",)


@pytest.mark.fault("K7")
def test_a_pickle_in_place_of_a_file_runs_nothing(sound, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("model.safetensors", "optimizer.safetensors", "state.json"):
        kept = (sound / name).read_bytes()
        (sound / name).write_bytes(pickle.dumps(Evil()))
        (sound / "manifest.json").write_bytes(manifest_of(sound, 7))
        refused(sound)
        torch.save({"a": Evil()}, sound / name)
        (sound / "manifest.json").write_bytes(manifest_of(sound, 7))
        refused(sound)
        (sound / name).write_bytes(kept)
    (sound / "manifest.json").write_bytes(pickle.dumps(Evil()))
    refused(sound)
    assert not (tmp_path / "ran-code").exists()


@pytest.mark.parametrize("record", [[], {}, {"progress": 1, "aliases": {}, "optimizers": {}}, "[" * 99_999])
def test_a_sealed_record_of_other_content_is_refused(sound, record):
    text = record if isinstance(record, str) else json.dumps(record)
    (sound / "state.json").write_text(text)
    (sound / "manifest.json").write_bytes(manifest_of(sound, 7))
    refused(sound)


def test_a_renamed_checkpoint_is_refused(sound):
    assert "holds step 7: it was renamed" in refused(sound.rename(sound.with_name("step-00000008")))


def test_a_later_format_is_told_from_damage(sound):
    reseal(sound, format=2)
    with pytest.raises(CheckpointMismatch, match="format 2, and this version reads 1"):
        read(sound)


def test_a_copy_under_another_name_can_be_read(sound, shown):
    assert shown(read(sound.rename(sound.with_name("the-one-i-like")))) == 7


@pytest.mark.fault("K3")
def test_the_newest_that_is_broken_is_passed_over_and_said(tmp_path, state_of, shown, caplog):
    for step in (1, 2, 3):
        path = write(tmp_path, state_of(step), step=step)
    (path / "model.safetensors").write_bytes(b"")
    restored = read_newest(tmp_path)
    assert shown(restored.state) == 2
    assert restored.path.name == "step-00000002"
    assert f"Checkpoint skipped: {path / 'model.safetensors'}" in caplog.text


def test_a_folder_with_nothing_but_broken_ones_is_an_error(tmp_path, state_of):
    assert read_newest(tmp_path) is None
    for step in (1, 2):
        (write(tmp_path, state_of(step), step=step) / "state.json").unlink()
    with pytest.raises(CheckpointError, match=r"(?s)No checkpoint .* can be used.*step-00000002.*step-00000001"):
        read_newest(tmp_path)


def test_a_link_in_the_place_of_a_checkpoint_is_named_and_a_run_never_begins_anew_beside_it(
    tmp_path, state_of, shown, caplog
):
    """Checkpoints that were moved to another disk and linked were taken for none at all."""
    run, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    for step in (1, 2):
        write(run, state_of(step), step=step)
    (run / "step-00000002").rename(disk / "step-00000002")
    (run / "step-00000002").symlink_to(disk / "step-00000002")
    assert shown(read_newest(run).state) == 1
    assert f"Checkpoint skipped: {run / 'step-00000002'} is a link" in caplog.text
    assert shown(read(run / "step-00000002")) == 2  # where a user names it
    assert write(run, state_of(2), step=2).name == "step-00000002-2"
    shutil.rmtree(run / "step-00000001")
    shutil.rmtree(run / "step-00000002-2")
    with pytest.raises(CheckpointError, match=r"(?s)No checkpoint .* can be used.*step-00000002 is a link"):
        read_newest(run)


def test_verify_returns_what_the_checkpoint_consists_of(sound):
    manifest = verify(sound)
    assert manifest.step == 7
    assert manifest.files["model.safetensors"].size == (sound / "model.safetensors").stat().st_size
    assert set(safetensors.torch.load_file(sound / "model.safetensors")) == {"a.weight", "a.count"}


def test_rows_of_several_files_are_taken_without_reading_the_others():
    whole = torch.arange(24.0).view(8, 3)
    parts = [whole[:3], whole[3:3], whole[3:5], whole[5:]]
    joined = JoinedRows(parts)
    assert joined.shape == (8, 3) and joined.numel() == 24 and joined.nbytes == 96 and joined.dtype == torch.float32
    assert joined[3:5].data_ptr() == whole[3:].data_ptr()
    for taken in (slice(None), slice(0, 2), slice(2, 6), slice(4, 99), slice(-2, None), slice(5, 5)):
        found = joined[taken]
        assert type(found) is torch.Tensor and torch.equal(found, whole[taken])


def test_rows_of_several_files_are_one_tensor_for_everything_else():
    whole = torch.arange(24.0).view(8, 3)
    joined = JoinedRows([whole[:3], whole[3:]])
    assert torch.equal(torch.empty(8, 3).copy_(joined), whole) and torch.equal(joined * 2, whole * 2)
    assert torch.equal(joined[::2], whole[::2]) and joined.device.type == "cpu" and not joined.is_meta
    assert torch.equal(torch.stack([joined, whole])[0], whole) and digest_tensor(joined) == digest_tensor(whole)


@contextmanager
def without_rights_of_root():
    """Other users' rights, where the tests are run by root, who may read everything."""
    is_root = os.geteuid() == 0
    if is_root:
        os.setresuid(65534, 65534, 0)
    try:
        yield
    finally:
        if is_root:
            os.setresuid(0, 0, 0)


@pytest.mark.parametrize("name", ["model.safetensors", "manifest.json", "", ".."])
def test_what_this_user_may_not_read_is_named(sound, name):
    """It was a traceback, and the run was started again."""
    for parent in (sound, *sound.parents[:-2]):
        parent.chmod(parent.stat().st_mode | 0o055)
    path = (sound / name).resolve()
    path.chmod(0)
    said = path / "manifest.json" if path == sound else path
    with without_rights_of_root(), pytest.raises(CheckpointError) as refusal:
        read_newest(sound.parent)
    path.chmod(0o700)
    assert f"{said} cannot be read: Permission denied." in str(refusal.value)
