"""The proof kit for GPUs ends in a table on simulated devices."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.gpu.tasks import idle_share

from lockstep.profile.trace import TraceSpan

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["ac", "d", "e", "f", "g"])
def test_a_part_ends_in_a_table_on_simulated_devices(machine, tmp_path, parts):
    command = [sys.executable, "-m", "tests.gpu.kit", "--simulated", "--parts", parts]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "gpu.json")], cwd=ROOT, capture_output=True, text=True, timeout=170
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert {row["part"] for row in rows} == set(parts)
    assert {row["verdict"] for row in rows} <= {"met", "measured", "skipped"}
    assert " 0 not met" in done.stdout.splitlines()[-1]


def test_a_python_without_what_the_kit_needs_is_told_which_packages():
    command = [sys.executable, "-S", "-m", "tests.gpu.kit"]  # without site-packages
    done = subprocess.run(command, cwd=ROOT, env={}, capture_output=True, text=True)
    assert done.returncode == 1
    assert (
        "has no pillow, torch, numpy, safetensors, tqdm, psutil, filelock, which the kit needs" in done.stderr
    )
    assert "Traceback" not in done.stderr


def sleeps(world):
    """Takes long."""
    time.sleep(30)


@pytest.mark.slow
def test_a_check_is_not_waited_for_beyond_the_time_of_its_part(machine):
    machine.deadline = time.monotonic() + 1.5
    try:
        with pytest.raises(AssertionError, match="had not ended after 1"):
            machine.run(sleeps, 1)
    finally:
        machine.deadline = None


def test_the_idle_share_counts_what_no_span_covers():
    spans = [
        TraceSpan("stream 7", "kernel", *times)
        for times in ((10, 30), (0, 10), (40, 60), (45, 50), (90, 100))
    ]
    assert idle_share(spans) == (10 + 30) / 100


def test_a_device_that_ran_nothing_has_no_idle_share():
    with pytest.raises(ValueError, match="saw nothing run"):
        idle_share([])
