import io
import os
import subprocess

import numpy as np
import pytest
import torch
from PIL import Image, UnidentifiedImageError
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lockstep.data import Digits, ImageFolder, Mixed, SkipBroken, Weighted
from lockstep.data.images.decoding import MAX_BYTES, decoded_as, open_photo, pixels_digest
from lockstep.errors import DataError


@pytest.fixture
def photos(tmp_path):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.zeros((9, 9, 3), np.uint8)).save(tmp_path / name / "0.jpg")
    return ImageFolder(tmp_path)


def test_sets_that_decode_photos_are_known_within_others(photos):
    for dataset in (
        photos,
        Subset(photos, [1]),
        SkipBroken(Mixed(Weighted(Subset(photos, [0, 1]), "balanced"), 2)),
    ):
        assert decoded_as(dataset) == pixels_digest()


def test_other_sets_depend_on_no_decoder(photos):
    tensors = TensorDataset(torch.zeros(4))
    for dataset in (tensors, Subset(tensors, [0]), Digits("train"), Weighted(tensors, [1, 1, 1, 1])):
        assert decoded_as(dataset) == ""
    assert decoded_as(ConcatDataset([photos])) == ""


@pytest.mark.fault("M9")
def test_what_is_no_file_and_what_is_too_large_is_refused_unread(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe.jpg")
    (tmp_path / "zero.jpg").symlink_to("/dev/zero")
    for name in ("pipe.jpg", "zero.jpg"):
        with pytest.raises(DataError, match="is not a regular file"):
            open_photo(tmp_path / name)
    with (tmp_path / "hole.jpg").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(DataError, match="268,435,457 bytes, more than the 268,435,456"):
        open_photo(tmp_path / "hole.jpg")


@pytest.mark.fault("M9")
@pytest.mark.parametrize("form", ["EPS", "PCX", "ICNS"])
def test_a_format_that_is_not_meant_is_refused_before_a_program_runs(form, monkeypatch):
    buffer = io.BytesIO()
    Image.new("RGB", (64, 64)).save(buffer, form)
    monkeypatch.setattr(subprocess, "check_call", pytest.fail)
    with pytest.raises(UnidentifiedImageError, match=r"found no picture in its .* bytes \(JPEG, PNG"):
        open_photo(buffer.getvalue())


@pytest.mark.parametrize("form", ["JPEG", "MPO", "PNG", "GIF", "BMP", "TIFF", "PPM", "WEBP", "TGA"])
def test_formats_of_photos_are_read(form):
    buffer = io.BytesIO()
    Image.new("RGB", (9, 8)).save(buffer, form)
    assert open_photo(buffer.getvalue()).pixels().shape == (8, 9, 3)
