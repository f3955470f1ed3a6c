import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Subset, TensorDataset

from lockstep.data import Digits, ImageFolder, Mixed, SkipBroken, Weighted
from lockstep.data.images.decoding import decoded_as, pixels_digest


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
