import os
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Subset

from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.data import EvaluationLoader, ImageFolder, RandomResizedCrop, Resize, StepLoader
from lockstep.errors import ConfigError, DataError


def write(path, colour=(200, 100, 50), size=(40, 30)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)


@pytest.fixture
def flowers(tmp_path):
    for label, name in enumerate(("daisy", "rose", "tulip")):
        for number in range(10):
            write(tmp_path / "flowers" / name / f"{number}.jpg", (80 * label, 20 * number, 90))
    return tmp_path / "flowers"


def real_photos():
    data = Path(os.environ.get("LOCKSTEP_DATA", Path(__file__).parents[3] / "shared" / "data")) / "flower_photos"
    if not data.is_dir():
        pytest.skip("needs flower_photos below $LOCKSTEP_DATA or ../shared/data")
    return data


def test_labels_follow_the_names_of_the_folders(flowers):
    dataset = ImageFolder(flowers, transform=Resize(8))
    assert dataset.classes == ("daisy", "rose", "tulip") and len(dataset) == 30
    picture, label = dataset[10]
    assert (dataset.paths[10], label) == ("rose/0.jpg", 1)
    assert picture.shape == (3, 8, 8) and picture.dtype == torch.uint8
    assert abs(int(picture[0, 4, 4]) - 80) < 4


def test_nested_folders_and_any_case_of_the_ending_count(flowers):
    write(flowers / "rose" / "red" / "deep" / "a.JPEG")
    write(flowers / "rose" / "b.Png")
    (flowers / "rose" / "notes.txt").write_text("not a photo")
    write(flowers / "rose" / ".thumbnails" / "c.jpg")
    dataset = ImageFolder(flowers)
    assert {"rose/red/deep/a.JPEG", "rose/b.Png"} <= set(dataset.paths) and len(dataset) == 32


def test_the_seed_holds_out_a_fifth_of_each_class(flowers):
    train, validation = ImageFolder(flowers, "train", seed=3), ImageFolder(flowers, "validation", seed=3)
    assert train.labels.bincount().tolist() == [8, 8, 8] and validation.labels.bincount().tolist() == [
        2,
        2,
        2,
    ]
    assert sorted(train.paths + validation.paths) == ImageFolder(flowers).paths
    assert ImageFolder(flowers, "validation", seed=4).paths != validation.paths
    assert ImageFolder(flowers, "validation", seed=3).paths == validation.paths


def test_the_split_does_not_depend_on_the_order_of_the_disk(flowers, monkeypatch):
    wanted = ImageFolder(flowers, "train").paths
    walk = os.walk
    monkeypatch.setattr(os, "walk", lambda top: [(a, b[::-1], c[::-1]) for a, b, c in walk(top)])
    assert ImageFolder(flowers, "train").paths == wanted


def test_a_name_that_is_not_in_utf_8_is_split_like_others(flowers):
    (flowers / "rose" / "3.jpg").rename(flowers / "rose" / os.fsdecode(b"\xff.jpg"))
    train, validation = ImageFolder(flowers, "train"), ImageFolder(flowers, "validation")
    assert sorted(train.paths + validation.paths) == ImageFolder(flowers).paths


def test_folders_named_after_the_splits_are_the_splits(tmp_path):
    for split, count in (("Train", 3), ("val", 2)):
        for name in ("cat", "dog"):
            for number in range(count):
                write(tmp_path / split / name / f"{number}.jpg")
    assert len(ImageFolder(tmp_path, "train")) == 6 and len(ImageFolder(tmp_path, "validation")) == 4
    assert len(ImageFolder(tmp_path)) == 10
    assert ImageFolder(tmp_path, "validation").paths[0] == "val/cat/0.jpg"
    assert ImageFolder(tmp_path, split_by="seed").classes == ("Train", "val")


def test_a_file_of_names_gives_the_order_of_the_labels(flowers, tmp_path):
    (tmp_path / "names.txt").write_text("tulip\ndaisy\n\nrose\n")
    dataset = ImageFolder(flowers, classes=tmp_path / "names.txt")
    assert dataset.classes == ("tulip", "daisy", "rose")
    assert int(dataset.labels[dataset.paths.index("daisy/0.jpg")]) == 1


@pytest.mark.fault("M13")
def test_a_missing_folder_is_named(tmp_path):
    with pytest.raises(DataError, match=r"data folder .*nowhere does not exist"):
        ImageFolder(tmp_path / "nowhere")


def test_a_folder_without_classes_is_refused(tmp_path):
    with pytest.raises(DataError, match="no subfolders"):
        ImageFolder(tmp_path)


@pytest.mark.fault("D4")
def test_an_empty_class_is_named(flowers):
    (flowers / "lily").mkdir()
    with pytest.raises(DataError, match="has folders without photos: 'lily'"):
        ImageFolder(flowers)


@pytest.mark.fault("D4")
def test_a_class_in_only_one_split_is_named(tmp_path):
    for split, names in (("train", ("cat", "dog")), ("validation", ("cat",))):
        for name in names:
            write(tmp_path / split / name / "0.jpg")
    for split in ("train", "validation"):
        with pytest.raises(DataError, match=r"validation has no folder for the classes dog"):
            ImageFolder(tmp_path, split)


def test_a_class_too_small_to_divide_is_named(flowers):
    write(flowers / "lily" / "only.jpg")
    with pytest.raises(DataError, match="Class lily has 1 sample, too few"):
        ImageFolder(flowers, "train")
    assert len(ImageFolder(flowers)) == 31


def test_classes_that_do_not_match_the_folders_are_named(flowers):
    with pytest.raises(DataError, match=r"folders that are not classes: tulip\. Classes: daisy, rose"):
        ImageFolder(flowers, classes=["daisy", "rose"])
    with pytest.raises(DataError, match=r"no folder for the classes lily"):
        ImageFolder(flowers, classes=["daisy", "rose", "tulip", "lily"])
    with pytest.raises(DataError, match="named once each"):
        ImageFolder(flowers, classes=["daisy", "daisy"])


def test_an_unknown_split_is_refused_with_the_nearest(flowers):
    with pytest.raises(ConfigError, match="Did you mean 'validation'"):
        ImageFolder(flowers, "valdation")
    with pytest.raises(ConfigError, match=r"held-out fraction of 1\.2"):
        ImageFolder(flowers, "train", held_out=1.2)
    with pytest.raises(DataError, match="split_by='folders'"):
        ImageFolder(flowers, "train", split_by="folders")
    with pytest.raises(ConfigError, match=r"split_by='folder' is not known\. Did you mean 'folders'\?"):
        ImageFolder(flowers, "train", split_by="folder")  # it was taken for auto, and divided by the seed
    with pytest.raises(ConfigError, match="a list of their names"):  # its order is another in each process
        ImageFolder(flowers, classes={"daisy", "rose", "tulip"})
    with pytest.raises(ConfigError, match="has no split 3"):
        ImageFolder(flowers, 3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.fault("D1", "M9")
def test_a_truncated_photo_is_named(flowers, workers):
    path = flowers / "rose" / "4.jpg"
    path.write_bytes(path.read_bytes()[:300])
    loader = EvaluationLoader(ImageFolder(flowers), micro_batch_size=6, workers=workers)
    with pytest.raises(DataError, match=r"Sample 14 \(rose/4\.jpg\) cannot be read: OSError: .*[Tt]runcated"):
        list(loader)


@pytest.mark.fault("D1", "M9")
def test_an_empty_file_is_named(flowers):
    (flowers / "tulip" / "7.jpg").write_bytes(b"")
    chosen = Subset(ImageFolder(flowers), [29, 27])
    with pytest.raises(DataError, match=r"Sample 1 \(tulip/7\.jpg\) cannot be read"):
        list(EvaluationLoader(chosen, micro_batch_size=2))


@pytest.mark.fault("M9")
def test_the_largest_file_of_a_photo_is_a_setting(flowers, tmp_path):
    size = max(path.stat().st_size for path in flowers.rglob("*.*"))
    transform, folder = Resize(8), tmp_path / "cache"
    enough = ImageFolder(flowers, transform=transform, max_file_size=size)
    small = ImageFolder(flowers, transform=transform, max_file_size=size - 1)
    largest = next(i for i in range(len(small)) if (flowers / small.sample_path(i)).stat().st_size == size)
    for dataset in (small, small.use_cache(folder)):
        with pytest.raises(DataError, match=f"has {size:,} bytes, more than the {size - 1:,} .* max_file_size"):
            dataset[largest]
    assert torch.equal(enough[largest][0], enough.use_cache(tmp_path / "another")[largest][0])
    with pytest.raises(ConfigError, match="max_file_size=0 was given"):
        ImageFolder(flowers, max_file_size=0)


def bits(dataset, **options):
    plan = SamplePlan(samples=len(dataset), shape=BatchShape(global_batch=12, micro_batches=4))
    loader = StepLoader(dataset, plan, seed=2, **options)
    parts = [part for epoch in (0, 1) for batch in loader.batches(epoch) for part in batch.micro_batches]
    loader.close()
    return parts


@pytest.mark.parametrize("workers", [1, 3])
def test_augmented_photos_are_equal_for_every_number_of_workers(flowers, workers):
    dataset = ImageFolder(flowers, "train", size=20)
    for part, wanted in zip(bits(dataset, workers=workers), bits(dataset), strict=True):
        assert np.array_equal(part.indices, wanted.indices)
        assert torch.equal(part.data[0], wanted.data[0]) and torch.equal(part.data[1], wanted.data[1])


def test_a_photo_is_cut_alike_in_any_micro_batch_and_otherwise_in_another_epoch(flowers):
    rng = np.random.default_rng(0)
    for path in flowers.rglob("*.jpg"):
        Image.fromarray(rng.integers(0, 255, (30, 40, 3), dtype=np.uint8)).save(path)
    dataset = ImageFolder(flowers, transform=RandomResizedCrop(16))

    def pictures(global_batch, epoch):
        plan = SamplePlan(samples=30, shape=BatchShape(global_batch=global_batch, micro_batches=2))
        found = {}
        for batch in StepLoader(dataset, plan).batches(epoch):
            for part in batch.micro_batches:
                found |= {int(i): row for i, row in zip(part.indices, part.data[0])}
        return found

    small, large, later = pictures(4, 0), pictures(30, 0), pictures(30, 1)
    assert all(torch.equal(small[i], large[i]) for i in range(30))
    assert not any(torch.equal(large[i], later[i]) for i in range(30))


def test_any_transform_of_torchvision_can_be_used(flowers, torchvision):
    from torchvision.transforms import v2

    transform = v2.Compose(
        [
            v2.RandomResizedCrop(16),
            v2.RandomHorizontalFlip(),
            v2.ToImage(),
            v2.ToDtype(torch.float32, scale=True),
        ]
    )
    dataset = ImageFolder(flowers, "train", transform=transform)
    assert dataset.device_transform is None
    for part, wanted in zip(bits(dataset, workers=2), bits(dataset), strict=True):
        assert part.data[0].dtype == torch.float32 and torch.equal(part.data[0], wanted.data[0])


def test_pixels_are_left_to_be_normalised_on_the_device(flowers):
    dataset = ImageFolder(flowers, size=8)
    picture = torch.stack([dataset[0][0]])
    wanted = (picture / 255 - torch.tensor([0.485, 0.456, 0.406])[:, None, None]) / torch.tensor([0.229, 0.224, 0.225])[
        :, None, None
    ]
    assert torch.allclose(dataset.device_transform(picture), wanted, atol=1e-6)


def test_the_real_photos_are_divided_and_read():
    data = real_photos()
    train, validation = ImageFolder(data, "train"), ImageFolder(data, "validation")
    assert (len(train), len(validation)) == (2935, 735)
    assert train.classes == ("daisy", "dandelion", "roses", "sunflowers", "tulips")
    some = Subset(train, range(0, 2935, 300))
    (part,) = EvaluationLoader(some, micro_batch_size=10)
    assert part.data[0].shape == (10, 3, 224, 224) and part.data[0].float().std() > 30
