"""The proof kit for GPUs ends in a table on simulated devices."""

import json
import os
import subprocess
import sys
import threading
import time
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from tests.gpu import kit
from tests.gpu.tasks import Rows, idle_share, without_waits

from lockstep.data.reader import SampleReader
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
    assert "has no pillow, torch, numpy, safetensors, tqdm, psutil, filelock, which the kit needs" in done.stderr
    assert "Traceback" not in done.stderr


def test_no_wait_of_the_host_in_twenty_steps_and_one_on_purpose_is_found(machine):
    assert machine.run(without_waits, 1, {}, "single", {}) == [True]


@pytest.mark.slow
def test_a_wait_in_lockstep_itself_is_found(machine):
    with pytest.raises(RuntimeError, match="synchronizing CUDA operation: copy to the device, pageable in lockstep/"):
        machine.run(without_waits, 1, {}, "single", {}, "no pinned memory")


@pytest.mark.slow
def test_all_parts_together_end_in_time_and_what_failed_says_where(machine, tmp_path):
    """Part b alone takes longer; the reason of a row that is not met is in the file too."""
    command = [sys.executable, "-m", "tests.gpu.kit", "--simulated", "--parts", "bc", "--within", "60"]
    began = time.monotonic()
    subprocess.run([*command, "--out", str(tmp_path / "gpu.json")], cwd=ROOT, capture_output=True, timeout=170)
    assert time.monotonic() - began < 110
    content = json.loads((tmp_path / "gpu.json").read_text())
    assert content["about"]["device"] == "Simulated CUDA"
    rows = content["rows"]
    assert {row["part"] for row in rows} == {"b", "c"}
    assert rows[0]["verdict"] == "met"
    assert all(row["verdict"] == "skipped" for row in rows if row["part"] == "c")


def test_what_a_check_raised_is_in_the_file_with_its_traceback(tmp_path, monkeypatch):
    def fails():
        error = ValueError("short")
        error.add_note("raised on rank 1 of 2")
        raise error

    monkeypatch.setitem(kit.PARTS, "a", lambda kit: iter([("check", "", fails)]))
    monkeypatch.setattr(kit, "Machine", lambda simulated: SimpleNamespace(run=lambda *_: [1]))
    made = kit.Kit(True, 60.0, 90.0, tmp_path / "gpu.json")
    made.run("a")
    (row,) = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert (row["verdict"], row["found"]) == ("not met", "ValueError: short")
    assert row["details"] == "short\nraised on rank 1 of 2"


def test_only_checks_whose_names_match_are_made(tmp_path, monkeypatch):
    checks = [(name, "", lambda: ("found", "met")) for name in ("lstm, fp32: ddp 2", "lstm, bf16: ddp 2")]
    monkeypatch.setitem(kit.PARTS, "b", lambda kit: iter(checks))
    monkeypatch.setattr(kit, "Machine", lambda simulated: SimpleNamespace(run=lambda *_: [1]))
    made = kit.Kit(True, 60.0, 90.0, tmp_path / "gpu.json", only="fp32|tf32")
    made.run("b")
    assert [row.check for row in made.rows] == ["lstm, fp32: ddp 2"]


def test_checks_run_side_by_side_where_they_measure_nothing(tmp_path, monkeypatch):
    together = threading.Barrier(3, timeout=20)

    def meets():
        return f"{together.wait()}", "met"

    monkeypatch.setattr(kit, "Machine", lambda simulated: SimpleNamespace(run=lambda *_: [1]))
    monkeypatch.setitem(kit.PARTS, "b", lambda kit: iter([(name, "", meets) for name in "xyz"]))
    made = kit.Kit(True, 60.0, 90.0, tmp_path / "gpu.json", jobs=3)
    made.run("b")
    assert {row.verdict for row in made.rows} == {"met"}
    assert len(json.loads((tmp_path / "gpu.json").read_text())["rows"]) == 3


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="Triton is not installed (pip install triton==3.7.1)")
def test_the_sums_of_the_fused_kernel_are_compared_on_one_device():
    """In Triton's interpreter, which rounds to bfloat16 in a way of its own."""
    code = "import torch; from tests.gpu.tasks import kernel_sums; print(kernel_sums(None, 'cpu', (torch.bfloat16,)))"
    given = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stdout + done.stderr


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
    spans = [TraceSpan("stream 7", "kernel", *times) for times in ((10, 30), (0, 10), (40, 60), (45, 50), (90, 100))]
    assert idle_share(spans) == (10 + 30) / 100


def test_a_device_that_ran_nothing_has_no_idle_share():
    with pytest.raises(ValueError, match="saw nothing run"):
        idle_share([])


def test_photos_of_the_resnet_are_read_by_processes_in_both_loops():
    """Lockstep reads what is in memory itself, such as a Subset of tensors: then only the plain loop had workers."""
    data = Rows(torch.randn(4, 3, 2, 2), 16)
    assert len(data) == 16
    assert not SampleReader(data, seed=0).in_memory
    images, labels = data[[1, 6]]
    assert torch.equal(images, torch.stack([data[1][0], data[6][0]]))
    assert labels.tolist() == [1, 6]
