import io
import pickle
import tarfile

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data import CenterCrop, RandomResizedCrop, TarShards
from lockstep.data.formats import tar_shards as tar_index_file
from lockstep.data.formats.cifar10 import files_of
from lockstep.data.formats.tar_shards import INDEX_NAME
from lockstep.data.reader import SampleReader
from lockstep.errors import ConfigError, DataError


def photo(number):
    pixels = np.random.default_rng(number).integers(0, 255, (20, 24, 3), dtype=np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, "PNG")
    return buffer.getvalue()


def pack(path, members):
    with tarfile.open(path, "w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return path


def sample(number, label=None):
    return [
        (f"train/{number:03}.png", photo(number)),
        (f"train/{number:03}.cls", str(number % 3 if label is None else label).encode()),
    ]


def shards(folder, count=10):
    for shard in range(2):
        pack(
            folder / f"s-{shard}.tar",
            [m for n in range(shard * count // 2, (shard + 1) * count // 2) for m in sample(n)],
        )
    return folder


def test_samples_of_all_shards_are_read_by_number(tmp_path):
    dataset = TarShards(shards(tmp_path), classes=3)
    assert len(dataset) == 10
    for number in (7, 0, 9, 4):
        content, label = dataset[number]
        assert content == photo(number) and label == number % 3
    assert dataset.sample_path(7) == "s-1.tar, train/007"


def test_a_name_that_is_not_in_utf_8_is_read_and_told(tmp_path):
    pack(tmp_path / "s.tar", [("\udcff.png", photo(0)), ("\udcff.cls", b"0")])
    dataset = TarShards(tmp_path, classes=3)
    assert dataset[0][1] == 0 and dataset.sample_path(0) == "s.tar, \udcff"


def test_pictures_are_decoded_by_micro_batch_with_numbers_keyed_by_sample(tmp_path):
    dataset = TarShards(shards(tmp_path), transform=RandomResizedCrop(8))
    reader = SampleReader(pickle.loads(pickle.dumps(dataset)), seed=0)
    pictures, labels = reader.read(0, np.array([3, 8, 5]))
    assert pictures.shape == (3, 3, 8, 8) and pictures.dtype == torch.uint8 and labels.tolist() == [0, 2, 2]
    again, _ = reader.read(0, np.array([5, 3]))
    assert torch.equal(again[0], pictures[2]) and torch.equal(again[1], pictures[0])
    assert dataset[3][0].shape == (3, 8, 8)


def test_decode_gets_every_member_of_a_sample(tmp_path):
    pack(tmp_path / "a.tar", [("x/1.txt", b"one"), ("x/1.seg.json", b"[1]"), ("x/2.txt", b"two")])
    dataset = TarShards(tmp_path / "a.tar", decode=dict)
    assert [dataset[index] for index in range(2)] == [{"txt": b"one", "seg.json": b"[1]"}, {"txt": b"two"}]


def test_the_index_is_built_once_and_again_only_where_a_shard_has_changed(tmp_path, monkeypatch):
    TarShards(shards(tmp_path))
    assert sorted(path.name for path in tmp_path.iterdir()) == [INDEX_NAME, "s-0.tar", "s-1.tar"]
    assert (tmp_path / INDEX_NAME).stat().st_mode & 0o777 == 0o644
    scanned = []
    members = tar_index_file._members
    monkeypatch.setattr(tar_index_file, "_members", lambda shard: scanned.append(shard.name) or members(shard))
    assert len(TarShards(tmp_path)) == 10 and scanned == []
    pack(tmp_path / "s-1.tar", sample(40))
    assert len(TarShards(tmp_path)) == 6 and scanned == ["s-0.tar", "s-1.tar"]


@pytest.mark.parametrize("place", [0, 40, -1])
def test_an_altered_index_is_not_used(tmp_path, place):
    TarShards(shards(tmp_path))
    content = bytearray((tmp_path / INDEX_NAME).read_bytes())
    good = bytes(content)
    content[place] ^= 1
    (tmp_path / INDEX_NAME).write_bytes(content)
    assert TarShards(tmp_path)[7][0] == photo(7)
    assert (tmp_path / INDEX_NAME).read_bytes() == good


def test_an_index_elsewhere_leaves_the_folder_as_it_was(tmp_path):
    data = tmp_path / "data"
    data.mkdir()
    TarShards(shards(data), index=tmp_path / "index")
    assert sorted(path.name for path in data.iterdir()) == ["s-0.tar", "s-1.tar"]
    assert (tmp_path / "index").is_file()
    assert len(TarShards(data, index=tmp_path / "absent" / "index")) == 10


@pytest.mark.parametrize("cut", [512 + 100, 1024 + 20, 1024 + 512, -10240 + 4 * 1024])
def test_a_shard_that_is_cut_off_is_named(tmp_path, cut):
    path = pack(tmp_path / "a.tar", [(f"{n}.{kind}", b"1" * 9) for n in range(2) for kind in ("png", "cls")])
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(DataError, match=r"a\.tar.*[dD]ownload"):
        TarShards(tmp_path)


def test_links_and_compression_are_refused(tmp_path):
    with tarfile.open(tmp_path / "a.tar", "w") as archive:
        link = tarfile.TarInfo("1.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        archive.addfile(link)
    with pytest.raises(DataError, match=r"a\.tar holds '1\.png', which is a link"):
        TarShards(tmp_path)
    with tarfile.open(tmp_path / "a.tar", "w:gz") as archive:
        archive.addfile(tarfile.TarInfo("1.png"))
    with pytest.raises(DataError, match=r"a\.tar cannot be read as a tar file without compression"):
        TarShards(tmp_path)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([("1.png", b"x")], r"sample a\.tar, 1 has 0 members that end in cls"),
        (
            [("1.cls", b"1")],
            "has 0 members that end in jpg or jpeg or png or webp.*Endings in these shards: cls",
        ),
        ([("1.png", b"x"), ("1.jpg", b"x"), ("1.cls", b"1")], "has 2 members"),
        ([("1.png", b"x"), ("1.png", b"x")], r"holds '1\.png' twice in a row"),
        ([("1.png", b"x"), ("1.cls", b"rose")], r"label of a\.tar, 1 is b'rose'"),
        ([("1.png", b"x"), ("1.cls", b"9" * 30)], "should be an integer in digits"),
        ([("1.png", b"x"), ("1.cls", b"3")], r"sample 0 \(a\.tar, 1\) has label 3"),
    ],
)
def test_samples_that_are_not_whole_are_named(tmp_path, members, message):
    pack(tmp_path / "a.tar", members)
    with pytest.raises(DataError, match=message):
        TarShards(tmp_path, classes=3)


def test_a_picture_that_cannot_be_decoded_is_named(tmp_path):
    pack(tmp_path / "a.tar", [*sample(0), ("train/x.png", b"no picture"), ("train/x.cls", b"1")])
    reader = SampleReader(TarShards(tmp_path, transform=CenterCrop(8)), seed=0)
    with pytest.raises(DataError, match=r"Sample 1 \(a\.tar, train/x\) cannot be read: UnidentifiedImageError"):
        reader.read(0, np.array([0, 1]))


def test_what_is_missing_or_contradicts_itself_is_said(tmp_path):
    with pytest.raises(DataError, match=r"has no files that end in \.tar"):
        TarShards(tmp_path)
    with pytest.raises(DataError, match="does not exist"):
        TarShards(tmp_path / "no.tar")
    with pytest.raises(ConfigError, match="decode and transform"):
        TarShards(tmp_path, decode=dict, transform=CenterCrop(8))


def test_a_shard_that_shrinks_while_it_is_read_is_named(tmp_path):
    dataset = TarShards(shards(tmp_path))
    (tmp_path / "s-1.tar").write_bytes(b"")
    with pytest.raises(DataError, match=r"s-1\.tar was truncated after it was opened"):
        dataset[9]


@pytest.mark.fault("M9")
@pytest.mark.parametrize("kind", [tarfile.GNUTYPE_LONGNAME, tarfile.XHDTYPE, tarfile.XGLTYPE])
@pytest.mark.parametrize("source", ["shard", "archive"])
def test_a_name_that_would_take_memory_is_refused_unread(tmp_path, kind, source):
    info = tarfile.TarInfo("x")
    info.type, info.size = kind, 1 << 33
    path = tmp_path / "s.tar"
    path.write_bytes(info.tobuf(tarfile.GNU_FORMAT) + bytes(10_240))
    with pytest.raises(DataError, match="name or attributes have 8,589,934,592 bytes"):
        TarShards(path) if source == "shard" else list(files_of(path, lambda name: True))


def test_a_long_name_is_read(tmp_path):
    name = "long/" + "x" * 300
    pack(tmp_path / "s.tar", [(f"{name}.png", photo(1)), (f"{name}.cls", b"2")])
    assert TarShards(tmp_path)[0] == (photo(1), 2)
