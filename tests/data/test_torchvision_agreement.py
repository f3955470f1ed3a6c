"""Pictures are those of torchvision's transforms within a stated bound."""

import dataclasses
import importlib.util
import io
import itertools
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data import CenterCrop, RandomResizedCrop
from lockstep.data.images.transforms import decode_into

ROUGH = np.kron(np.random.RandomState(3).randint(0, 256, (50, 70, 3)).astype(np.uint8), np.ones((5, 5, 1), np.uint8))
DRAWS = np.random.RandomState(4).random_sample((12, 23))


def jpeg(pixels):
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()


def ours(source, transform, draws):
    out = torch.empty(3, transform.size, transform.size, dtype=torch.uint8)
    decode_into(source, transform, draws, out)
    return out.permute(1, 2, 0).numpy().astype(int)


def theirs(source, cut, size):
    from torchvision.transforms import functional

    photo = Image.open(io.BytesIO(source)).convert("RGB")
    left, top, right, bottom = cut.box
    part = functional.resized_crop(photo, top, left, bottom - top, right - left, list(cut.resized))
    part = functional.crop(part, *cut.offset, size, size)
    return np.asarray(functional.hflip(part) if cut.flip else part).astype(int)


@pytest.mark.parametrize("size", [96, 224])
def test_random_crops_are_torchvisions_within_one_grey_level(torchvision, size):
    source, transform = jpeg(ROUGH), RandomResizedCrop(size, scale=(0.08, 0.3))
    for draws in DRAWS:
        wanted = theirs(source, transform.cut(350, 250, draws), size)
        assert np.abs(ours(source, transform, draws) - wanted).max() <= 1


def test_the_central_square_is_torchvisions_within_one_grey_level(torchvision):
    source, transform = jpeg(ROUGH), CenterCrop(224, resize=256)
    wanted = theirs(source, transform.cut(350, 250, np.zeros(0)), 224)
    assert np.abs(ours(source, transform, np.zeros(0)) - wanted).max() <= 1


def test_photos_that_are_decoded_small_are_torchvisions_moved_by_less_than_a_pixel(torchvision):
    """The part is rounded to pixels of the smaller scale, which are no larger than those of the picture: each pixel is
    within three grey levels of one of torchvision's there or beside it."""
    x, y = np.meshgrid(np.linspace(0, 9, 1200), np.linspace(0, 7, 900))
    waves = np.stack([127 + 120 * np.sin(3 * x), 127 + 120 * np.sin(4 * y), 127 + 60 * np.sin(x * y)], axis=2)
    source, transform = jpeg(waves.astype(np.uint8)), RandomResizedCrop(96)
    for draws in DRAWS:
        wanted = torch.from_numpy(theirs(source, transform.cut(1200, 900, draws), 96)).permute(2, 0, 1).float()
        got = torch.from_numpy(ours(source, transform, draws)).permute(2, 0, 1)
        highest = torch.nn.functional.max_pool2d(wanted, 3, stride=1)
        lowest = -torch.nn.functional.max_pool2d(-wanted, 3, stride=1)
        inner = got[:, 1:-1, 1:-1]
        assert (inner <= highest + 3).all() and (inner >= lowest - 3).all()


@pytest.fixture(scope="module")
def figure(torchvision):
    """The script that draws the figure of the docs."""
    place = Path(__file__).parents[2] / "docs" / "figures" / "pictures.py"
    spec = importlib.util.spec_from_file_location("pictures", place)
    script = importlib.util.module_from_spec(spec)
    sys.modules["pictures"] = script  # dataclasses look there
    spec.loader.exec_module(script)
    yield script
    del sys.modules["pictures"]


def test_hard_edges_that_are_decoded_small_stay_within_the_stated_bound(figure):
    """On average within 4 grey levels; 99 % of the values within 4 of what torchvision has there or beside."""
    source, crops = figure.photo(), [RandomResizedCrop(figure.SIDE, scale=(0.15, 1.0))] * 11
    scales = set()
    for transform, draws in zip([CenterCrop(figure.SIDE, resize=184), *crops], DRAWS):
        pair = figure.pair("", source, transform, draws[: transform.draws])
        scales.add(pair.scale)
        assert pair.difference.mean() <= 4.0
        assert np.percentile(pair.outside, 99) <= 4
        assert pair.outside.max() <= 40
    assert scales == {2, 4}


def test_a_picture_that_is_moved_leaves_the_bound(figure):
    rows = figure.pairs()
    moved = dataclasses.replace(rows[1], ours=np.roll(rows[1].ours, 3, axis=1))
    assert moved.difference.mean() > 4.0 and np.percentile(moved.outside, 99) > 4


def test_the_figure_in_the_docs_is_what_the_script_draws(figure, tmp_path, capsys):
    figure.main([str(tmp_path / "new.png")])
    said = capsys.readouterr().out
    assert "decoded at 1/1: difference 1 at most" in said and "decoded at 1/2" in said and "decoded at 1/4" in said
    assert figure.PLACE.stat().st_size < 150_000
    new, kept = (
        np.asarray(Image.open(path).convert("RGB")).astype(int) for path in (tmp_path / "new.png", figure.PLACE)
    )
    for row, column in itertools.product(range(3), range(3)):
        top = figure.MARGIN + figure.LINE + row * (figure.SIDE + figure.LINE + figure.MARGIN)
        left = figure.MARGIN + column * (figure.SIDE + figure.MARGIN)
        window = slice(top, top + figure.SIDE), slice(left, left + figure.SIDE)
        assert np.abs(new[window] - kept[window]).mean() < 2, "run python docs/figures/pictures.py"
