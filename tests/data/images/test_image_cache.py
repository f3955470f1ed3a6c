import os
import pickle
import pwd
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.data import (
    CenterCrop,
    EvaluationLoader,
    ImageFolder,
    RandomResizedCrop,
    Resize,
    SkipBroken,
    StepLoader,
)
from lockstep.data.images import cache_file, image_cache
from lockstep.data.images.image_cache import default_folder
from lockstep.errors import ConfigError, DataError

NOISE = np.random.RandomState(5).randint(0, 256, (300, 300, 3)).astype(np.uint8)
TRANSFORMS = [RandomResizedCrop(32), CenterCrop(32), Resize(24)]


@pytest.fixture
def photos(tmp_path):
    """Of all kinds: small and large, upright and not, JPEG and PNG, and one that is broken."""
    root = tmp_path / "photos"
    sizes = [(40, 30), (30, 44), (150, 99), (90, 280), (33, 33), (267, 131)]
    for name in ("a", "b"):
        (root / name).mkdir(parents=True)
        for number, (width, height) in enumerate(sizes):
            exif = Image.Exif()
            exif[0x0112] = 1 + number if name == "b" else 1
            image = Image.fromarray(NOISE[:height, :width])
            image.save(root / name / f"{number}.jpg", quality=85, exif=exif)
        image.convert("L").save(root / name / "grey.png")
    (root / "b" / "broken.jpg").write_bytes((root / "b" / "5.jpg").read_bytes()[:4000])
    return root


def pictures(dataset, workers=0, epoch=3):
    """All micro-batches of an epoch, the broken photo replaced."""
    plan = SamplePlan(samples=len(dataset), shape=BatchShape(global_batch=6, micro_batches=2))
    loader = StepLoader(SkipBroken(dataset, most=0.5), plan, seed=4, workers=workers)
    found = [part.data for batch in loader.batches(epoch) for part in batch.micro_batches]
    loader.close()
    return found


def same(first, second):
    return len(first) == len(second) and all(
        torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, second)
    )


def files(folder):
    return sorted(path.name for path in folder.iterdir() if path.suffix == ".photos")


@pytest.mark.parametrize("transform", TRANSFORMS, ids=lambda each: type(each).__name__)
def test_every_bit_is_the_same_with_and_without_a_cache(photos, tmp_path, transform):
    plain = pictures(ImageFolder(photos, transform=transform))
    assert same(pictures(ImageFolder(photos, transform=transform).use_cache(tmp_path / "kept")), plain)
    again = ImageFolder(photos, transform=transform).use_cache(tmp_path / "kept")
    assert same(pictures(again), plain) and len(files(tmp_path / "kept")) == 1


def test_no_number_of_workers_changes_a_bit(photos, tmp_path):
    transform = RandomResizedCrop(32)
    plain = pictures(ImageFolder(photos, transform=transform))
    filled_by_workers = ImageFolder(photos, transform=transform).use_cache(tmp_path, workers=2)
    for workers in (0, 1, 3):
        assert same(pictures(ImageFolder(photos, transform=transform), workers), plain)
        assert same(pictures(filled_by_workers, workers), plain)


def test_large_photos_are_kept_at_every_scale_that_is_asked_for(photos, tmp_path, monkeypatch):
    from lockstep.data.images import image_cache

    dataset = ImageFolder(photos, transform=RandomResizedCrop(16)).use_cache(tmp_path)
    asked = []
    read = image_cache.read_photo
    monkeypatch.setattr(image_cache, "read_photo", lambda path, most: asked.append(Path(path).name) or read(path, most))
    for epoch in range(3):
        pictures(dataset, epoch=epoch)
    assert set(asked) == {"broken.jpg"}
    scales = dataset.cache._records.arrays["rows"][:, 2]
    assert scales.max() == 4 and scales[dataset.paths.index("a/grey.png")] == 1


def test_another_callable_gets_the_same_photo(photos, tmp_path):
    (photos / "b" / "broken.jpg").unlink()
    plain = ImageFolder(photos, transform=np.asarray)
    kept = ImageFolder(photos, transform=np.asarray).use_cache(tmp_path)
    assert all(np.array_equal(plain[index][0], kept[index][0]) for index in range(len(plain)))


def test_a_sample_alone_is_the_same_too(photos, tmp_path):
    for transform in TRANSFORMS:
        sample = []
        for dataset in (
            ImageFolder(photos, transform=transform),
            ImageFolder(photos, transform=transform).use_cache(tmp_path),
        ):
            torch.manual_seed(1)
            sample.append(dataset[3][0])
        assert torch.equal(*sample)


def test_a_transform_that_is_changed_afterwards_is_followed(photos, tmp_path):
    (photos / "b" / "broken.jpg").unlink()
    for first in TRANSFORMS:
        dataset = ImageFolder(photos, transform=first).use_cache(tmp_path)
        for then in (CenterCrop(20, resize=40), Resize(9), RandomResizedCrop(8)):
            dataset.transform = then
            assert same(pictures(dataset), pictures(ImageFolder(photos, transform=then)))
        dataset.transform = np.asarray
        assert np.array_equal(dataset[2][0], ImageFolder(photos, transform=np.asarray)[2][0])


def test_a_broken_photo_is_an_error_where_it_is_read_and_not_where_it_is_kept(photos, tmp_path):
    dataset = ImageFolder(photos, transform=RandomResizedCrop(32)).use_cache(tmp_path)
    with pytest.raises(DataError, match=r"b/broken\.jpg.*truncated"):
        list(EvaluationLoader(dataset, micro_batch_size=4))


def test_a_cache_is_made_once_for_the_same_files_and_settings(photos, tmp_path):
    told = []
    for _ in range(2):
        ImageFolder(photos).use_cache(tmp_path, tell=lambda *numbers: told.append(numbers))
    assert told == [(8, 15), (15, 15)]
    assert ImageFolder(photos, size=64).use_cache(tmp_path).cache.file.name in files(tmp_path)
    ImageFolder(photos, transform=RandomResizedCrop(32)).use_cache(tmp_path)
    ImageFolder(photos, "train").use_cache(tmp_path)
    assert len(files(tmp_path)) == 4


def test_a_changed_photo_makes_the_cache_anew_and_a_touched_one_does_not(photos, tmp_path):
    folder = tmp_path / "kept"
    told = []

    def open_again():
        told.clear()
        return ImageFolder(photos, transform=Resize(24)).use_cache(folder, tell=lambda done, _: told.append(done))

    open_again()
    os.utime(photos / "a" / "1.jpg", ns=(1, 1))
    open_again()
    assert told == []
    Image.fromarray(255 - NOISE[:44, :30]).save(photos / "a" / "1.jpg")
    assert told == [] and same(pictures(open_again()), pictures(ImageFolder(photos, transform=Resize(24))))
    assert told and len(files(folder)) == 1
    content = bytearray((photos / "a" / "2.jpg").read_bytes())
    content[len(content) // 2] ^= 1  # as many bytes as before
    (photos / "a" / "2.jpg").write_bytes(content)
    assert same(pictures(open_again()), pictures(ImageFolder(photos, transform=Resize(24))))
    assert told


def test_a_copy_of_the_photos_elsewhere_finds_their_cache(photos, tmp_path):
    told = []
    ImageFolder(photos).use_cache(tmp_path / "kept")
    elsewhere = tmp_path / "elsewhere" / "photos"
    shutil.copytree(photos, elsewhere, copy_function=shutil.copyfile)
    ImageFolder(elsewhere).use_cache(tmp_path / "kept", tell=lambda *numbers: told.append(numbers))
    assert told == []


def test_a_damaged_file_is_made_anew(photos, tmp_path):
    dataset = ImageFolder(photos, transform=Resize(24)).use_cache(tmp_path)
    dataset.cache.file.write_bytes(dataset.cache.file.read_bytes()[:-5])
    again = ImageFolder(photos, transform=Resize(24)).use_cache(tmp_path)
    assert same(pictures(again), pictures(ImageFolder(photos, transform=Resize(24))))


def test_a_kept_set_can_be_sent_to_another_process(photos, tmp_path):
    dataset = ImageFolder(photos, transform=Resize(24)).use_cache(tmp_path)
    assert same(pictures(pickle.loads(pickle.dumps(dataset))), pictures(dataset))


def test_a_disk_that_would_be_full_is_named_before_it_is(photos, tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(total=10**6, free=60_000)
    monkeypatch.setattr(image_cache.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ConfigError, match=r"15 decoded photos would take about .* MB free, of which .* are reserved"):
        ImageFolder(photos).use_cache(tmp_path / "kept")
    assert files(tmp_path / "kept") == []


def test_a_folder_that_cannot_be_made_is_named(photos, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Cannot create .*file/kept"):
        ImageFolder(photos).use_cache(tmp_path / "file" / "kept")


def test_others_wait_for_the_one_who_decodes(photos, tmp_path):
    from lockstep.data.images.image_cache import lock_file

    class Waited(Exception):
        pass

    def tell(done, count):
        raise Waited(done, count)

    file = ImageFolder(photos).use_cache(tmp_path).cache.file
    file.unlink()
    with lock_file(file.with_suffix(".lock"), pytest.fail), pytest.raises(Waited) as caught:
        ImageFolder(photos).use_cache(tmp_path, tell=tell)
    assert caught.value.args == (0, 15)


def test_the_default_folder_follows_the_xdg_rules(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert default_folder() == tmp_path / "lockstep"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/me")
    assert str(default_folder()) == "/home/me/.cache/lockstep"


@pytest.mark.fault("D7")
@pytest.mark.parametrize("transform", TRANSFORMS[:2], ids=lambda each: type(each).__name__)
def test_flipped_bits_in_the_file_change_no_picture_and_are_said_once(photos, tmp_path, transform, caplog):
    (photos / "b" / "broken.jpg").unlink()
    plain = ImageFolder(photos, transform=transform)
    records = ImageFolder(photos, transform=transform).use_cache(tmp_path / "kept").cache._records
    content = bytearray(records.path.read_bytes())
    for number in (0, 3):
        content[int(records._starts[number]) + 7] ^= 1
    records.path.write_bytes(content)
    kept = ImageFolder(photos, transform=transform).use_cache(tmp_path / "kept")
    for _ in range(2):
        assert same(pictures(kept), pictures(plain))
    told = [record.getMessage() for record in caplog.records if "damaged" in record.getMessage()]
    assert len(told) == 2 and "The decoded photo 0 in " in "".join(told)


def test_a_file_of_an_earlier_version_without_checksums_is_made_anew(photos, tmp_path, monkeypatch):
    with monkeypatch.context() as earlier:
        earlier.setattr(cache_file, "_SUMS", "others")
        ImageFolder(photos, transform=TRANSFORMS[0]).use_cache(tmp_path / "kept")
    again = ImageFolder(photos, transform=TRANSFORMS[0]).use_cache(tmp_path / "kept")
    assert len(again.cache._records._sums) == len(again) and len(files(tmp_path / "kept")) == 1


@pytest.mark.fault("T7")
def test_a_user_without_a_home_is_asked_for_a_folder(monkeypatch):
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match=r"Give data\.cache a folder"):
        default_folder()
