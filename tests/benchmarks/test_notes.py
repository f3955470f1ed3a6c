"""Comparisons of ``benchmarks/notes``: the sides' command lines, and the job that each of them trains."""

import importlib
import sys
from pathlib import Path

import pytest

from lockstep.config.job_file import load_job, parse_set

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
NOTES = BENCHMARKS / "notes"


@pytest.fixture
def sides(monkeypatch):
    """The module of command lines; what it imports from its folder is forgotten afterwards."""
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.syspath_prepend(str(NOTES))
    yield importlib.import_module("sides")
    for name in set(sys.modules) - before:
        if name.partition(".")[0] in ("sides", "harness"):
            del sys.modules[name]


def _settings(command):
    words = command(Path("control"))
    return [parse_set(words[place + 1]) for place, word in enumerate(words) if word == "--set"]


@pytest.fixture
def photos(tmp_path):
    folder = tmp_path / "photos"
    folder.mkdir()
    return folder


def _job(command):
    return load_job(str(NOTES / "notes.toml"), _settings(command), imports=False)


def test_both_sides_train_one_batch_on_as_many_processes(sides, photos, tmp_path):
    compared = sides.compared(photos, tmp_path, 1)
    theirs = compared[sides.PLAIN](Path("control"))
    assert f"--nproc_per_node={sides.PROCESSES}" in theirs
    assert theirs[theirs.index("--global-batch") + 1] == str(sides.GLOBAL_BATCH)
    for name in (sides.FP32, sides.BF16):
        job = _job(compared[name])
        assert (job.training.global_batch, job.training.micro_batches) == (
            sides.GLOBAL_BATCH,
            sides.PROCESSES,
        )
        assert job.data.workers == 1


def test_the_sides_differ_in_precision_alone(sides, photos, tmp_path):
    compared = sides.compared(photos, tmp_path, 1)
    fp32, bf16 = _job(compared[sides.FP32]), _job(compared[sides.BF16])
    assert (fp32.training.precision, bf16.training.precision) == ("fp32", "bf16")
    assert fp32.to_json().replace('"fp32"', '"bf16"') == bf16.to_json()


def test_every_part_that_is_left_out_makes_another_job_or_command(sides, photos, tmp_path):
    whole = sides.ours(photos, tmp_path, 1)(Path("control"))
    for name, command in sides.parts(photos, tmp_path, 1).items():
        words = command(Path("control"))
        assert words != whole, name
        _job(command)  # raises where a setting is not known
