"""A run on photos ends in the same parameters whoever reads them, before a stop and after it.

Decoded or from the cache, by 0, 1 or 3 workers, a step or several ahead: what is changed at a resume changes no bit.
"""

import itertools
import shutil

import numpy as np
import pytest
import torch
from PIL import Image
from tests.ranks import run_ranks
from torch import nn

import lockstep
from lockstep.data import ImageFolder, RandomResizedCrop

EPOCHS, STEPS, GLOBAL_BATCH = 2, 3, 10
CACHED, PLAIN = True, False
ALONE = [(CACHED, 0, 2), (PLAIN, 3, 1), (CACHED, 1, 1), (PLAIN, 0, 2), (CACHED, 3, 3), (PLAIN, 1, 2)]
"""True where the cache is used; the number of workers; the steps that they read ahead."""


@pytest.fixture(scope="module")
def photos(tmp_path_factory):
    """28 JPEGs, so that an epoch ends in a short step; some are decoded at a smaller scale."""
    root = tmp_path_factory.mktemp("photos")
    draw = np.random.default_rng(3)
    for name, number in itertools.product("ab", range(14)):
        (root / name).mkdir(exist_ok=True)
        coarse = draw.integers(0, 256, (9 + number, 14, 3)).astype(np.uint8)
        Image.fromarray(np.kron(coarse, np.ones((7, 7, 1), np.uint8))).save(root / name / f"{number}.jpg")
    return root


def train(photos, folder, way, stop=None):
    """Trains from where ``folder`` stands to the end, or up to a step; every tensor of model and optimizer."""
    cached, workers, prefetch = way
    dataset = ImageFolder(photos, transform=RandomResizedCrop(16))
    if cached:
        dataset.use_cache(photos.parent / "kept")
    run = lockstep.init(
        global_batch=GLOBAL_BATCH, micro_batches=5, directory=str(folder), resume="auto", prefetch=prefetch
    )
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 5, 3), nn.ReLU(), nn.Dropout(0.2), nn.Flatten(), nn.Linear(64, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, stepping = run.prepare(model, optimizer)
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(dataset, workers=workers):
            run.backward(batch, nn.functional.cross_entropy)
            stepping.step()
            stepping.zero_grad()
            if stop is not None and run.position.step == stop:
                run.save()
                run.close()
                return None
    state = {name: tensor.detach().numpy().copy() for name, tensor in model.state_dict().items()}
    for name, parameter in model.named_parameters():
        state[f"momentum of {name}"] = optimizer.state[parameter]["momentum_buffer"].numpy().copy()
    run.close()
    return state


def train_all(world, photos, ways):
    return [train(photos, *way) for way in ways]


def assert_equal(found, expected):
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert np.array_equal(found[name].view(np.int32), tensor.view(np.int32)), name


@pytest.fixture(scope="module")
def whole(photos, tmp_path_factory):
    """Of one process that never stopped, without cache and workers."""
    return train(photos, tmp_path_factory.mktemp("whole"), (PLAIN, 0, 1))


@pytest.mark.parametrize(
    "stop",
    [
        pytest.param(2, id="within an epoch", marks=pytest.mark.slow),
        pytest.param(STEPS, id="between epochs", marks=pytest.mark.slow),
        pytest.param(STEPS + 1, id="within the last epoch", marks=pytest.mark.slow),
    ],
)
def test_a_run_goes_on_with_or_without_the_cache_and_with_any_workers(photos, whole, tmp_path, stop):
    for number, (before, after) in enumerate(zip(ALONE, [*ALONE[1:], ALONE[0]])):
        assert train(photos, tmp_path / str(number), before, stop) is None
        assert_equal(train(photos, tmp_path / str(number), after), whole)


@pytest.mark.slow
def test_one_other_photo_would_be_noticed(photos, whole, tmp_path):
    other = tmp_path / "photos"
    shutil.copytree(photos, other)
    Image.open(photos / "a" / "0.jpg").rotate(180).save(other / "a" / "0.jpg")
    found = train(other, tmp_path / "run", (PLAIN, 0, 1))
    with pytest.raises(AssertionError):
        assert_equal(found, whole)


@pytest.mark.slow
def test_ranks_that_decode_go_on_as_more_ranks_that_do_not_and_the_reverse(photos, whole, tmp_path):
    ways = [(tmp_path / "to plain", (CACHED, 1, 2), 2), (tmp_path / "to cached", (PLAIN, 1, 1), 4)]
    assert run_ranks(train_all, 2, photos, ways) == [[None, None]] * 2
    after = [(tmp_path / "to plain", (PLAIN, 0, 1)), (tmp_path / "to cached", (CACHED, 1, 3))]
    for rank in run_ranks(train_all, 3, photos, after):
        for state in rank:
            assert_equal(state, whole)
