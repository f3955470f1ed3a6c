"""The proof kit for GPUs ends in a table on simulated devices."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent.parent


@pytest.mark.slow
@pytest.mark.parametrize("parts", ["ac", "d", "e", "f"])
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
