import numpy as np
import pytest

from lockstep.data import CenterCrop, RandomResizedCrop, Resize, SampleKeys
from lockstep.errors import ConfigError


def cuts(transform, width, height, count=4000):
    uniforms = SampleKeys(3, 0, np.arange(count)).uniforms(transform.draws)
    return [transform.cut(width, height, row) for row in uniforms]


def test_parts_lie_inside_the_photo_and_have_an_allowed_shape():
    for width, height in ((320, 240), (17, 90), (1, 1), (500, 3)):
        for cut in cuts(RandomResizedCrop(64), width, height, 500):
            left, top, right, bottom = cut.box
            assert 0 <= left < right <= width and 0 <= top < bottom <= height
            assert cut.resized == (64, 64) and cut.offset == (0, 0)


def test_parts_are_distributed_as_torchvisions(torchvision):
    import torch
    from torchvision.transforms import RandomResizedCrop as Reference

    photo = torch.zeros(3, 160, 240)
    torch.manual_seed(0)
    theirs = np.array([Reference.get_params(photo, [0.08, 1.0], [3 / 4, 4 / 3]) for _ in range(4000)], dtype=float)
    boxes = np.array([cut.box for cut in cuts(RandomResizedCrop(224), 240, 160)], dtype=float)
    ours = np.stack([boxes[:, 1], boxes[:, 0], boxes[:, 3] - boxes[:, 1], boxes[:, 2] - boxes[:, 0]], axis=1)
    for column in range(4):  # top, left, height, width: two-sample Kolmogorov-Smirnov distance
        values = np.sort(np.concatenate([ours[:, column], theirs[:, column]]))
        below = [np.searchsorted(np.sort(part[:, column]), values, side="right") / 4000 for part in (ours, theirs)]
        assert np.abs(below[0] - below[1]).max() < 0.045  # p about 0.0006


def test_half_of_the_photos_are_mirrored():
    flipped = sum(cut.flip for cut in cuts(RandomResizedCrop(64), 100, 80))
    assert 1850 < flipped < 2150
    assert not any(cut.flip for cut in cuts(RandomResizedCrop(64, flip=0.0), 100, 80, 100))


@pytest.mark.parametrize(("width", "height"), [(320, 240), (240, 320), (97, 300), (224, 224)])
def test_the_central_square_is_torchvisions(torchvision, width, height):
    from PIL import Image
    from torchvision.transforms import CenterCrop as Center
    from torchvision.transforms import Resize

    coordinates = np.stack(
        [
            np.tile(np.linspace(0, 255, width), (height, 1)),
            np.tile(np.linspace(0, 255, height)[:, None], (1, width)),
            np.zeros((height, width)),
        ],
        axis=2,
    )
    photo = Image.fromarray(coordinates.astype(np.uint8))
    cut = CenterCrop(224, resize=256).cut(width, height, np.zeros(0))
    resized = Resize(256)(photo)
    assert cut.resized == (resized.height, resized.width)
    top, left = cut.offset
    ours = resized.crop((left, top, left + 224, top + 224))
    assert np.array_equal(np.asarray(ours), np.asarray(Center(224)(resized)))


def test_squeezing_takes_the_whole_photo():
    cut = Resize(32).cut(100, 50, np.zeros(0))
    assert (cut.box, cut.resized) == ((0, 0, 100, 50), (32, 32))


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda: RandomResizedCrop(0), "size=0 were asked for"),
        (lambda: RandomResizedCrop(scale=(0.5, 0.1)), r"scale=\(0\.5, 0\.1\) must be two numbers"),
        (lambda: RandomResizedCrop(ratio=(0.0, 1.0)), r"ratio=\(0, 1\) must be two numbers above 0"),
        (lambda: RandomResizedCrop(flip=1.5), r"flip=1\.5 must be a probability"),
        (lambda: CenterCrop(224, resize=200), "Choose resize of at least 224"),
        (lambda: Resize(-1), "size=-1 were asked for"),
    ],
)
def test_impossible_settings_are_refused(make, said):
    with pytest.raises(ConfigError, match=said):
        make()
