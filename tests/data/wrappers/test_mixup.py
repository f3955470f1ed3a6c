import numpy as np
import pytest
import torch
from torch.utils.data import Dataset, TensorDataset

from lockstep.data import Digits, ImageArrays, Mixed, Normalize, PadCropFlip, RandomErasing, SkipBroken
from lockstep.data.reader import SampleReader
from lockstep.errors import ConfigError, DataError

IMAGES = (torch.arange(12, dtype=torch.uint8) * 20).view(12, 1, 1, 1).expand(12, 3, 8, 10).contiguous()
LABELS = torch.arange(12) % 3
ARRAYS = ImageArrays(IMAGES, LABELS, classes="abc", name="twelve", device_transform=Normalize())


class Each(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return torch.rand(1, 4, 4), index % 3


def read(dataset, indices, epoch=0, seed=0):
    return SampleReader(dataset, seed=seed).read(epoch, np.asarray(indices))


def test_mixup_blends_images_and_targets_alike():
    images, targets = read(Mixed(ARRAYS, 3, mixup=1.0), range(12))
    assert images.dtype == torch.uint8 and targets.dtype == torch.float32
    assert torch.allclose(targets.sum(1), torch.ones(12))
    kept = targets[torch.arange(12), LABELS].min()
    assert 0 < kept < 1
    blends = [kept * own + (1 - kept) * IMAGES[:, 0, 0, 0].float() for own in IMAGES[:, 0, 0, 0].float()]
    for row, image in enumerate(images):
        assert image.unique().numel() == 1
        partners = [
            other
            for other in range(12)
            if abs(blends[row][other] - image[0, 0, 0]) <= 0.51
            and torch.allclose(
                targets[row],
                kept * torch.eye(3)[LABELS[row]] + (1 - kept) * torch.eye(3)[LABELS[other]],
            )
        ]
        assert partners


def test_cutmix_weighs_targets_by_the_area_that_is_left():
    images, targets = read(Mixed(ARRAYS, 3, mixup=0, cutmix=1.0), range(12))
    for row, image in enumerate(images):
        own = (image == IMAGES[row, 0, 0, 0]).float().mean()
        other = image[image != IMAGES[row, 0, 0, 0]].unique()
        assert len(other) <= 1
        expected = own * torch.eye(3)[LABELS[row]]
        if len(other):
            expected = expected + (1 - own) * torch.eye(3)[LABELS[int(other) // 20]]
        assert torch.allclose(targets[row], expected)
    assert (images != IMAGES).any()


def test_both_are_used_in_turn():
    dataset = Mixed(ARRAYS, 3, mixup=1.0, cutmix=1.0)
    blended = [
        all(image.unique().numel() == 1 for image in read(dataset, range(start, 12), epoch)[0])
        for epoch in range(20)
        for start in (0, 5)
    ]
    assert 5 < sum(blended) < 35


@pytest.mark.parametrize("inner", [ARRAYS, Each(), TensorDataset(IMAGES.float(), LABELS)])
def test_a_micro_batch_is_mixed_alike_whoever_reads_it_and_otherwise_in_each_epoch(inner):
    images, targets = read(Mixed(inner, 3, mixup=1.0, cutmix=1.0), [7, 3, 9, 0, 1])
    again, targets_again = read(Mixed(inner, 3, mixup=1.0, cutmix=1.0), [7, 3, 9, 0, 1])
    assert torch.equal(images, again) and torch.equal(targets, targets_again)
    for epoch, seed in ((1, 0), (0, 1)):
        assert not torch.equal(read(Mixed(inner, 3, mixup=1.0), [7, 3, 9, 0, 1], epoch, seed)[1], targets)


def test_one_image_alone_stays_as_it_is():
    images, targets = read(Mixed(ARRAYS, 3, mixup=1.0), [4])
    assert torch.equal(images, IMAGES[4:5]) and torch.allclose(targets, torch.eye(3)[LABELS[4:5]])


def test_boxes_are_erased_by_sample_whatever_micro_batch_it_is_in():
    erasing = RandomErasing(probability=0.6, fill=255)
    dataset = Mixed(ARRAYS, 3, mixup=0, erasing=erasing)
    images, targets = read(dataset, range(12))
    assert torch.equal(read(dataset, [9, 2])[0], images[[9, 2]])
    assert torch.equal(targets, torch.eye(3)[LABELS])
    erased = 0
    for image, before in zip(images, IMAGES, strict=True):
        box = (image != before)[0]
        assert torch.equal(image[:, box], torch.full((3, int(box.sum())), 255, dtype=torch.uint8))
        if box.any():
            rows, columns = box.any(1), box.any(0)
            assert int(box.sum()) == int(rows.sum() * columns.sum()) and 1 <= int(box.sum()) <= 0.45 * 80
            erased += 1
    assert 0 < erased < 12


def test_erasing_is_a_transform_of_image_arrays_too():
    arrays = ImageArrays(IMAGES, LABELS, classes="abc", name="x", transform=RandomErasing(1.0, fill=7))
    assert all((image == 7).any() for image in read(arrays, range(12))[0])
    padded = ImageArrays(IMAGES, LABELS, classes="abc", name="x", transform=PadCropFlip(1))
    assert not torch.equal(read(Mixed(padded, 3), range(12))[0], read(Mixed(ARRAYS, 3), range(12))[0])


def test_it_keeps_finish_and_memory_of_the_set():
    assert Mixed(ARRAYS, 3).device_transform is ARRAYS.device_transform
    assert SampleReader(Mixed(ARRAYS, 3), seed=0).in_memory and not SampleReader(Mixed(Each(), 3), seed=0).in_memory
    assert len(Mixed(Digits(), 10)) == len(Digits())


def test_what_cannot_be_mixed_is_refused():
    odd = ({"mixup": -1}, {"cutmix": -1}, {"mixup": float("nan")}, {"cutmix": float("inf")})
    for arguments in ({"classes": 1}, *({"classes": 3, **each} for each in odd)):
        with pytest.raises(ConfigError, match="at least 2 classes and parameters from 0 on"):
            Mixed(ARRAYS, **arguments)
    with pytest.raises(ConfigError, match=r"SkipBroken\(Mixed"):
        Mixed(SkipBroken(ARRAYS), 3)
    with pytest.raises(ConfigError, match="without a collate function"):
        Mixed(ARRAYS, 3)[0]
    with pytest.raises(DataError, match=r"classes=2, and the set gives labels of torch\.int64"):
        read(Mixed(ARRAYS, 2), range(12))
    with pytest.raises(DataError, match="pairs of an image"):
        read(Mixed(TensorDataset(torch.rand(4, 3), torch.zeros(4).long()), 2), range(4))
    for arguments in ({"probability": 2}, {"scale": (0.5, 1.5)}, {"ratio": (2, 1)}):
        with pytest.raises(ConfigError, match=f"RandomErasing {next(iter(arguments))}=.* must be"):
            RandomErasing(**arguments)
