import io
import os
import pickle
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data import CIFAR10, PadCropFlip
from lockstep.data.formats.cifar10 import CLASSES
from lockstep.errors import ConfigError, DataError

RNG = np.random.default_rng(0)
BATCHES = {
    name: (RNG.integers(0, 255, (20, 3072), dtype=np.uint8), (np.arange(20) * 7 + number) % 10)
    for number, name in enumerate([*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"])
}
TRAIN = [f"data_batch_{k}" for k in range(1, 6)]


def python_version(name):
    images, labels = BATCHES[name]
    return pickle.dumps({"data": images, "labels": labels.tolist(), "batch_label": name}, protocol=2)


def binary_version(name):
    images, labels = BATCHES[name]
    return np.concatenate([labels.astype(np.uint8)[:, None], images], axis=1).tobytes()


def write(folder, form, end=""):
    folder.mkdir(parents=True, exist_ok=True)
    for name in BATCHES:
        (folder / f"{name}{end}").write_bytes(form(name))
    return folder


def photos(folder, split, each=3):
    wanted = []
    for label, name in enumerate(CLASSES):
        (folder / split / name).mkdir(parents=True)
        for number in range(each):
            pixels = RNG.integers(0, 255, (32, 32, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / split / name / f"{number}.png")
            wanted.append((pixels.transpose(2, 0, 1), label))
    return wanted


def packed(folder, archive, mode):
    with tarfile.open(archive, mode) as tar:
        tar.add(folder, arcname=folder.name)
    return archive


def assert_is(dataset, names):
    images = np.concatenate([BATCHES[name][0] for name in names]).reshape(-1, 3, 32, 32)
    assert torch.equal(dataset.images, torch.from_numpy(images))
    assert dataset.labels.tolist() == np.concatenate([BATCHES[name][1] for name in names]).tolist()


@pytest.mark.parametrize(("form", "end"), [(python_version, ""), (binary_version, ".bin")])
def test_both_published_versions_give_the_same_images(tmp_path, form, end):
    root = write(tmp_path / "cifar", form, end)
    assert_is(CIFAR10(root, images_per_file=20), TRAIN)
    assert_is(CIFAR10(root, "validation", images_per_file=20), ["test_batch"])


@pytest.mark.parametrize(("mode", "ending"), [("w:gz", ".tar.gz"), ("w:xz", ".tar.xz"), ("w", ".tar")])
def test_archives_are_read_without_unpacking_them(tmp_path, mode, ending):
    root = write(tmp_path / "cifar-10-batches-py", python_version)
    archive = packed(root, tmp_path / f"cifar{ending}", mode)
    before = sorted(tmp_path.iterdir())
    assert_is(CIFAR10(archive, images_per_file=20), TRAIN)
    assert sorted(tmp_path.iterdir()) == before


def test_folders_of_image_files_are_read_into_memory(tmp_path):
    wanted = {split: photos(tmp_path / "cifar", split) for split in ("train", "test")}
    archive = packed(tmp_path / "cifar", tmp_path / "cifar.tar.xz", "w:xz")
    for root in (tmp_path / "cifar", archive):
        for split, name in (("train", "train"), ("validation", "test")):
            dataset = CIFAR10(root, split)
            assert dataset.labels.tolist() == [label for _, label in wanted[name]]
            assert np.array_equal(dataset.images, np.stack([pixels for pixels, _ in wanted[name]]))
            assert dataset.sample_path(4).endswith(f"{name}/automobile/1.png")


def test_images_are_augmented_and_normalised_as_usual(tmp_path):
    root = write(tmp_path, python_version)
    dataset = CIFAR10(root, images_per_file=20, transform=PadCropFlip())
    image, label = dataset[3]
    assert image.shape == (3, 32, 32) and image.dtype == torch.uint8 and isinstance(label, int)
    finished = dataset.device_transform(dataset.images)
    assert abs(float(finished.mean())) < 0.5 and 0.8 < float(finished.std()) < 1.6


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_label_outside_the_classes_is_named(tmp_path, split):
    root = write(tmp_path, binary_version, ".bin")
    name = "data_batch_3" if split == "train" else "test_batch"
    content = bytearray((root / f"{name}.bin").read_bytes())
    content[5 * 3073] = 10
    (root / f"{name}.bin").write_bytes(bytes(content))
    with pytest.raises(DataError, match=rf"\({name}\.bin, entry 5\) has label 10"):
        CIFAR10(root, split, images_per_file=20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda path: path.unlink(), r"has data_batch_1\.bin|has .* but not data_batch_2"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), r"data_batch_2\.bin has 61,459 bytes"),
        (
            lambda path: path.write_bytes(path.read_bytes()[:-3073]),
            r"data_batch_2\.bin holds 19 images instead of 20",
        ),
        (lambda path: path.write_bytes(b""), r"data_batch_2\.bin has 0 bytes"),
    ],
)
def test_a_broken_binary_file_is_named(tmp_path, change, message):
    root = write(tmp_path, binary_version, ".bin")
    change(root / "data_batch_2.bin")
    with pytest.raises(DataError, match=message):
        CIFAR10(root, images_per_file=20)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "cannot be read"),
        (pickle.dumps({"data": [1], "labels": [1]}, 2), "no array 'data' of 3072 bytes"),
        (pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1, "a"]}, 2), "no list 'labels'"),
        (
            pickle.dumps({"data": np.zeros((2, 3072), np.uint8), "labels": [1]}, 2),
            "holds 2 images and 1 labels",
        ),
        (pickle.dumps(io.StringIO, 2), "asks for"),
    ],
)
def test_a_broken_pickle_is_named(tmp_path, content, message):
    root = write(tmp_path, python_version)
    (root / "data_batch_4").write_bytes(content)
    with pytest.raises(DataError, match=f"data_batch_4 .*{message}"):
        CIFAR10(root, images_per_file=20)


def test_a_broken_photo_or_an_empty_class_is_named(tmp_path):
    photos(tmp_path, "train", each=1)
    path = tmp_path / "train" / "cat" / "0.png"
    Image.new("RGB", (31, 32)).save(path)
    with pytest.raises(DataError, match=r"train/cat/0\.png has 31 x 32 pixels"):
        CIFAR10(tmp_path)
    path.write_bytes(b"\x89PNG")
    with pytest.raises(DataError, match=r"train/cat/0\.png cannot be read"):
        CIFAR10(tmp_path)
    path.unlink()
    with pytest.raises(DataError, match="no images of cat for train"):
        CIFAR10(tmp_path)


def test_what_is_missing_or_damaged_as_a_whole_is_named(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        CIFAR10(tmp_path / "absent")
    (tmp_path / "notes.txt").write_text("no archive")
    with pytest.raises(DataError, match="neither a folder nor an archive"):
        CIFAR10(tmp_path / "notes.txt")
    archive = packed(write(tmp_path / "cifar", python_version), tmp_path / "cifar.tar.gz", "w:gz")
    archive.write_bytes(archive.read_bytes()[:-5000])
    with pytest.raises(DataError, match=r"cifar\.tar\.gz cannot be unpacked"):
        CIFAR10(archive, images_per_file=20)
    with pytest.raises(ConfigError, match="no split 'test'"):
        CIFAR10(tmp_path, "test")


def test_the_real_archive_is_read():
    data = Path(os.environ.get("LOCKSTEP_DATA", Path(__file__).parents[3] / "shared" / "data"))
    if not (data / "cifar10_jpg.tar.xz").is_file():
        pytest.skip("needs cifar10_jpg.tar.xz below $LOCKSTEP_DATA or ../shared/data")
    dataset = CIFAR10(data / "cifar10_jpg.tar.xz", "validation")
    assert dataset.labels.bincount().tolist() == [1000] * 10
    assert dataset.sample_path(1000) == "test/automobile/0000.jpg"
    assert 0.4 < float((dataset.images / 255).mean()) < 0.55
