"""``lockstep train --strategy ...``: every strategy ends in the fingerprint of one device, from the command line."""

import pytest
from tests.printed import fingerprint_of

SHORT = (*("--epochs", "1"), *("--set", "log.tensorboard=false"), *("--set", "data.workers=0"))
LAYOUTS = [
    pytest.param(("ddp", "cpu:3"), marks=pytest.mark.slow),
    pytest.param(("dp", "cpu:3"), marks=pytest.mark.slow),
    pytest.param(("layers", "cpu:2", "--set", "layers.balance=time"), marks=pytest.mark.slow),
    pytest.param(("hybrid", "cpu:4", "--mesh", "data=2,pipeline=2"), marks=pytest.mark.slow),
    pytest.param(("fsdp", "cpu:2"), marks=pytest.mark.slow),
    pytest.param(("pipeline", "cpu:2"), marks=pytest.mark.slow),  # in make test: test_replay_multiprocess
    pytest.param(("hybrid", "cpu:4", "--mesh", "data=2,layers=2"), marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def expected():
    return {}


@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "-".join([layout[0], *layout[3:]]))
def test_a_strategy_ends_in_the_fingerprint_of_one_device(layout, process, expected):
    if not expected:
        expected["alone"] = fingerprint_of(process("train", "digits", *SHORT, "--strategy", "single", "--devices", "1"))
    strategy, devices, *more = layout
    found = process("train", "digits", *SHORT, "--strategy", strategy, "--devices", devices, *more)
    assert fingerprint_of(found) == expected["alone"]


def test_a_mesh_that_does_not_fit_the_devices_is_refused_before_anything_starts(process):
    result = process(
        "train", "digits", *SHORT, "--strategy", "hybrid", "--mesh", "data=2,layers=2", "--devices", "cpu:3"
    )
    assert result.returncode == 2
    assert "Use a multiple of 2" in result.stderr
