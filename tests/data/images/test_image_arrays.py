import numpy as np
import pytest
import torch

from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.data import ImageArrays, Normalize, PadCropFlip, SampleKeys, StepLoader
from lockstep.errors import ConfigError, DataError


def arrays(count=40, **options):
    images = torch.from_numpy(np.random.default_rng(0).integers(0, 255, (count, 3, 12, 10), dtype=np.uint8))
    return ImageArrays(images, torch.arange(count) % 4, classes="abcd", name="test images", **options)


def bits(dataset, epoch=0, global_batch=8, **options):
    plan = SamplePlan(samples=len(dataset), shape=BatchShape(global_batch=global_batch, micro_batches=4))
    loader = StepLoader(dataset, plan, **options)
    found = {}
    for batch in loader.batches(epoch):
        for part in batch.micro_batches:
            found |= {int(index): row for index, row in zip(part.indices, part.data[0], strict=True)}
    loader.close()
    return found


def test_a_micro_batch_holds_the_samples_one_by_one():
    dataset = arrays()
    images, labels = dataset.get_batch(np.array([5, 0, 39]), SampleKeys(0, 0, np.array([5, 0, 39])))
    assert all(torch.equal(images[row], dataset[index][0]) for row, index in enumerate((5, 0, 39)))
    assert labels.tolist() == [1, 0, 3]


def test_windows_are_parts_of_the_padded_image_perhaps_mirrored():
    transform = PadCropFlip(2)
    images = arrays().images
    cut = transform.transform(images, SampleKeys(0, 0, np.arange(40)).uniforms(3))
    padded = torch.nn.functional.pad(images, [2] * 4)
    for image, around in zip(cut, padded):
        windows = [around[:, y : y + 12, x : x + 10] for y in range(5) for x in range(5)]
        assert any(torch.equal(image, window) or torch.equal(image, window.flip(2)) for window in windows)


def test_every_place_and_both_sides_occur():
    marked = torch.arange(1, 121, dtype=torch.uint8).reshape(1, 1, 12, 10).repeat(2000, 1, 1, 1)
    cut = PadCropFlip(1).transform(marked, SampleKeys(1, 0, np.arange(2000)).uniforms(3))
    kinds, counts = np.unique(cut.reshape(2000, -1).numpy(), axis=0, return_counts=True)
    assert len(kinds) == 18 and counts.min() > 70


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_augmentation_does_not_depend_on_the_micro_batch(dtype):
    dataset = arrays(transform=PadCropFlip(3))
    dataset.images = dataset.images.to(dtype)
    small, large, later = bits(dataset), bits(dataset, global_batch=40), bits(dataset, epoch=1)
    assert small.keys() == large.keys()
    assert all(torch.equal(small[index], large[index]) for index in small)
    assert sum(torch.equal(small[index], later[index]) for index in small) < 10


def test_a_transform_of_single_images_gets_pictures_and_equal_bits_from_workers(torchvision):
    from torchvision import transforms

    dataset = arrays(transform=transforms.Compose([transforms.RandomCrop(8, padding=2), transforms.ToTensor()]))
    assert dataset.get_batch is None
    here, there = bits(dataset), bits(dataset, workers=2)
    assert all(torch.equal(here[index], there[index]) for index in here)


def test_a_label_outside_the_classes_is_refused_on_opening():
    with pytest.raises(DataError, match=r"labels are 0 to 3; sample 2 has label 4\. 1 more labels are wrong too"):
        ImageArrays(torch.zeros(4, 1, 2, 2), torch.tensor([0, 3, 4, -1]), classes="abcd", name="x")


def test_normalisation_is_that_of_torchvision_up_to_rounding():
    images = arrays().images
    finish = Normalize((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    wanted = (images.double() / 255 - torch.tensor([0.4, 0.5, 0.6])[:, None, None]) / torch.tensor([0.2, 0.25, 0.3])[
        :, None, None
    ]
    got = finish(images)
    assert got.dtype == torch.float32 and got.is_contiguous() and torch.allclose(got.double(), wanted, atol=2e-6)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: Normalize((0.5, 0.5), (1.0,)), "it needs as many of one as of the other"),
        (lambda: Normalize((0.5,), (0.0,)), "no std of 0"),
        (lambda: PadCropFlip(-1), "padding must not be negative"),
        (lambda: PadCropFlip(flip=2.0), "flip must be a probability"),
    ],
)
def test_impossible_settings_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()


def test_one_mean_serves_all_channels_and_floats_pass():
    images = arrays().images
    assert torch.allclose(Normalize()(images), images / 255)
    floats = torch.rand(2, 3, 4, 4)
    assert Normalize((0.5,), (0.5,))(floats) is floats


def test_rows_are_normalised_alike_in_any_batch():
    images = arrays().images
    finish = Normalize((0.4, 0.5, 0.6), (0.2, 0.25, 0.3))
    assert torch.equal(finish(images)[7:9], finish(images[7:9]))
