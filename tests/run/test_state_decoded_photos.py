"""The pixels that photos are decoded to belong to the conditions under which a run can go on."""

import logging

import numpy as np
import pytest
import torch
from PIL import Image

import lockstep
from lockstep.data import ImageFolder, Resize
from lockstep.data.images.decoding import pixels_digest
from lockstep.errors import CheckpointMismatch
from lockstep.run import run as handle


@pytest.fixture
def photos(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(4):
            Image.fromarray(np.full((9, 9, 3), 30 * number, np.uint8)).save(
                tmp_path / "photos" / name / f"{number}.jpg"
            )
    return ImageFolder(tmp_path / "photos", transform=Resize(4))


def step(photos, directory, **options):
    """One step of an own loop; what its checkpoint says."""
    torch.manual_seed(0)
    run = lockstep.init(global_batch=2, micro_batches=2, directory=str(directory), **options)
    model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(48, 2))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    batch = next(run.batches(photos))
    run.backward(batch, torch.nn.CrossEntropyLoss())
    optimizer.step()
    optimizer.zero_grad()
    run.save()
    return run.require_prepared().state.context


def test_a_run_goes_on_only_where_photos_have_the_same_pixels(photos, tmp_path, monkeypatch, caplog):
    directory = tmp_path / "run"
    with caplog.at_level(logging.INFO):
        assert step(photos, directory).photos == pixels_digest()
    assert "Photos are decoded by" in caplog.text and "Pillow" in caplog.text
    step(photos, directory, resume="auto")
    monkeypatch.setattr(handle, "decoded_as", lambda dataset: "0123456789abcdef")
    with pytest.raises(CheckpointMismatch, match=r"other pixels \([0-9a-f]{16} there, 0123456789abcdef here\)"):
        step(photos, directory, resume="auto")
    assert step(photos, directory, resume="auto", force_context=True).photos == "0123456789abcdef"
