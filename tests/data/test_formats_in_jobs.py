"""The formats and policies as a job file names them: import paths and nested tables."""

import os
import subprocess
import sys

import numpy as np
import pytest
from tests.printed import fingerprint_of

from lockstep.config.components import Component
from lockstep.job.instantiate import instantiate

JOB = """\
[model]
target = "torch.nn:Linear"
in_features = 2
out_features = 2

[data]
on_bad_sample = "skip"
workers = 0

[data.train]
target = "lockstep.data:Weighted"
weights = "balanced"
dataset = { target = "lockstep.data:CSVTable", path = "{data}/t.csv", label = "kind", classes = ["rose", "tulip"] }

[data.validation]
target = "lockstep.data:CSVTable"
path = "{data}/t.csv"
label = "kind"
classes = ["rose", "tulip"]

[optimizer]
target = "torch.optim:SGD"
lr = 0.1

[training]
epochs = 2
global_batch = 32
"""


def write_table(folder):
    numbers = np.random.default_rng(0).standard_normal((200, 2))
    rows = [f"{a:.4f},{b:.4f},{'rose' if n % 4 else 'tulip'}" for n, (a, b) in enumerate(numbers.tolist())]
    (folder / "t.csv").write_text("\n".join(["a,b,kind", *rows]) + "\n")


def test_each_format_is_made_from_an_import_path(tmp_path):
    write_table(tmp_path)
    np.save(tmp_path / "x.npy", np.zeros((30, 2), np.float32))
    np.save(tmp_path / "y.npy", np.arange(30) % 3)
    np.arange(100, dtype="<u2").tofile(tmp_path / "t.bin")
    numpy_files = {
        "target": "lockstep.data:NumpyArrays",
        "inputs": str(tmp_path / "x.npy"),
        "targets": str(tmp_path / "y.npy"),
    }
    for length, target, arguments in (
        (200, "CSVTable", {"path": str(tmp_path / "t.csv"), "label": "kind", "classes": ["rose", "tulip"]}),
        (9, "TokenFiles", {"files": [str(tmp_path / "t.bin")], "length": 10}),
        (60, "Weighted", {"dataset": numpy_files, "weights": "balanced", "samples": 60}),
        (30, "SkipBroken", {"dataset": numpy_files, "most": 0.1}),
    ):
        assert len(instantiate(Component(target=f"lockstep.data:{target}", args=arguments))) == length


@pytest.mark.slow
def test_a_job_with_policies_ends_in_the_same_fingerprint_on_one_and_on_three_devices(tmp_path):
    write_table(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    found = set()
    for devices in ("1", "3"):
        finished = subprocess.run(
            [sys.executable, "-m", "lockstep", "train", "job.toml", "--data", ".", "--devices", devices],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        found.add(fingerprint_of(finished))
    assert len(found) == 1
