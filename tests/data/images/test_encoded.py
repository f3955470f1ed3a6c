"""Photos that lie many in a file, decoded once: tar shards, Arrow and Parquet files, Hugging Face sets."""

import io
import os
import pickle
import tarfile
from functools import partial

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.data import (
    ArrowFiles,
    CenterCrop,
    HuggingFace,
    RandomResizedCrop,
    Resize,
    SkipBroken,
    StepLoader,
    TarShards,
)
from lockstep.errors import ConfigError

NOISE = np.random.RandomState(8).randint(0, 256, (200, 200, 3)).astype(np.uint8)
COUNT, BROKEN = 13, 7
TRANSFORMS = [RandomResizedCrop(24), CenterCrop(24), Resize(20)]


def photos(shift=0):
    """Encoded photos of all sizes, one of them broken."""
    found = []
    for number in range(COUNT):
        file = io.BytesIO()
        image = Image.fromarray(NOISE[: 30 + 13 * number, : 170 - 11 * number] - np.uint8(shift))
        image.save(file, "PNG" if number == 3 else "JPEG")
        found.append(file.getvalue())
    found[BROKEN] = found[BROKEN][:500]
    return found


def write_shards(folder, contents):
    folder.mkdir(exist_ok=True)
    for shard in range(2):
        with tarfile.open(folder / f"{shard}.tar", "w") as tar:
            for number in range(shard, COUNT, 2):
                for ending, data in (("jpg", contents[number]), ("cls", b"%d" % (number % 2))):
                    member = tarfile.TarInfo(f"{number:03}.{ending}")
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))
    return lambda transform: TarShards(folder, transform=transform)


def write_arrow(folder, contents):
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    folder.mkdir(exist_ok=True)
    table = pyarrow.table({"image": contents, "label": [number % 2 for number in range(COUNT)]})
    parquet.write_table(table, folder / "train.parquet", row_group_size=4)
    return lambda transform: ArrowFiles(folder, "image", "label", transform=transform)


def write_hugging_face(folder, contents):
    datasets = pytest.importorskip("datasets")
    rows = [{"bytes": content, "path": None} for content in contents]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    found = datasets.Dataset.from_dict({"image": rows, "label": [n % 2 for n in range(COUNT)]}, features=features)
    found.save_to_disk(str(folder))
    return lambda transform: HuggingFace(folder, "image", "label", transform=transform)


STORES = [write_shards, write_arrow, write_hugging_face]
stores = pytest.mark.parametrize("write", STORES, ids=["shards", "parquet", "hugging face"])


def pictures(dataset, workers=0):
    """All micro-batches of an epoch, the broken photo replaced."""
    plan = SamplePlan(samples=len(dataset), shape=BatchShape(global_batch=6, micro_batches=2))
    loader = StepLoader(SkipBroken(dataset, most=0.5), plan, seed=4, workers=workers)
    found = [tuple(map(torch.clone, part.data)) for batch in loader.batches(2) for part in batch.micro_batches]
    loader.close()
    return found


def same(first, second):
    return len(first) == len(second) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second)
    )


@stores
def test_every_bit_is_the_same_with_and_without_a_cache(tmp_path, write):
    make, told = write(tmp_path / "set", photos()), []
    for transform in TRANSFORMS:
        plain = pictures(make(transform))
        kept = make(transform).use_cache(tmp_path / "kept", tell=lambda *numbers: told.append(numbers))
        assert same(pictures(kept), plain) and told[-1] == (COUNT, COUNT)
        again = make(transform).use_cache(tmp_path / "kept", tell=lambda *numbers: pytest.fail("made anew"))
        again = pickle.loads(pickle.dumps(again))
        assert same(pictures(again, workers=1), plain)
        torch.manual_seed(1)
        alone = again[4][0]
        torch.manual_seed(1)
        assert torch.equal(alone, make(transform)[4][0])


@stores
def test_nothing_is_decoded_twice_but_what_is_broken(tmp_path, write, monkeypatch):
    from lockstep.data.images import image_cache

    kept = write(tmp_path / "set", photos())(Resize(20)).use_cache(tmp_path / "kept", workers=2)
    opened, asked = image_cache.open_photo, []
    monkeypatch.setattr(image_cache, "open_photo", lambda source: asked.append(source) or opened(source))
    pictures(kept)
    assert set(asked) == {photos()[BROKEN]}


@pytest.mark.parametrize("write", STORES[:2], ids=["shards", "parquet"])
def test_a_changed_set_makes_the_cache_anew_and_a_touched_one_does_not(tmp_path, write):
    folder, told = tmp_path / "set", []

    def open_again(contents=None):
        told.clear()
        make = write(folder, contents or photos())
        for file in folder.iterdir():
            os.utime(file, ns=(1, 1) if contents else (2, 2))
        return make(Resize(20)).use_cache(tmp_path / "kept", tell=lambda *numbers: told.append(numbers))

    open_again()
    assert told
    other = photos()
    content = bytearray(other[2])
    content[len(content) // 2] ^= 1  # as many bytes as before
    other[2] = bytes(content)
    assert same(pictures(open_again(other)), pictures(write(folder, other)(Resize(20)))) and told
    open_again(other)
    assert not told
    for file in folder.iterdir():
        os.utime(file, ns=(3, 3))
    kept = write(folder, other)(Resize(20)).use_cache(tmp_path / "kept", tell=lambda *all: told.append(all))
    assert not told and same(pictures(kept), pictures(write(folder, other)(Resize(20))))


def test_other_members_of_the_same_shards_have_a_cache_of_their_own(tmp_path):
    with tarfile.open(tmp_path / "one.tar", "w") as tar:
        for number, content in enumerate(photos()):
            for ending, data in (("a.jpg", content), ("b.jpg", photos(shift=70)[number]), ("cls", b"1")):
                member = tarfile.TarInfo(f"{number:03}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    for ending in ("a.jpg", "b.jpg"):
        make = partial(TarShards, tmp_path / "one.tar", input=ending, transform=Resize(20))
        assert same(pictures(make().use_cache(tmp_path / "kept")), pictures(make()))
    assert len(list((tmp_path / "kept").glob("*.photos"))) == 2


def test_a_set_in_memory_finds_its_cache_by_what_it_holds(tmp_path):
    datasets = pytest.importorskip("datasets")
    files = []
    for shift in (0, 0, 70):
        rows = {"image": photos(shift), "label": [0] * COUNT}
        dataset = HuggingFace(datasets.Dataset.from_dict(rows), "image", "label", transform=Resize(20))
        plain = pictures(dataset)
        files.append(dataset.use_cache(tmp_path).cache.file)
        assert same(pictures(dataset), plain)
    assert files[0] == files[1] != files[2]


def test_pictures_that_lie_outside_of_the_set_are_read_where_they_lie(tmp_path):
    """They could change unseen."""
    datasets = pytest.importorskip("datasets")
    (tmp_path / "one.png").write_bytes(photos()[3])
    rows = {"image": [str(tmp_path / "one.png")] * 4, "label": [0, 1, 0, 1]}
    source = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    dataset = HuggingFace(source, "image", "label", transform=Resize(20)).use_cache(tmp_path / "kept")
    before = dataset[0][0]
    (tmp_path / "one.png").write_bytes(photos(shift=90)[3])
    plain = HuggingFace(source, "image", "label", transform=Resize(20))
    assert torch.equal(dataset[0][0], plain[0][0]) and not torch.equal(before, plain[0][0])


@stores
def test_a_set_without_pictures_is_refused(tmp_path, write):
    make = write(tmp_path / "set", photos())
    for transform in (None, np.asarray):
        with pytest.raises(
            ConfigError,
            match=r"\w+ cannot cache decoded photos, because its transform is .*RandomResizedCrop",
        ):
            make(transform).use_cache(tmp_path / "kept")
    assert not (tmp_path / "kept").exists()
