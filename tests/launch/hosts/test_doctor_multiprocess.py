"""``lockstep doctor`` over several hosts, and on the ranks of another launcher."""

import json
import subprocess
import sys

import pytest
from tests.launch.hosts.host import LOCKSTEP


@pytest.mark.fault("M5")
@pytest.mark.slow
def test_the_ranks_of_two_hosts_are_timed_together(two_hosts):
    two_hosts.start("doctor", devices=("cpu:2", "cpu:1"))
    assert [code for code, _ in two_hosts.end()] == [0, 0], two_hosts[1].stderr
    for host in two_hosts.hosts:
        lines = (host.folder / "stdout").read_text().splitlines()
        assert any(line.startswith("ok       all-reduce     3 ranks: ") for line in lines), lines
        assert any("slowest pair" in line for line in lines)


@pytest.mark.slow
def test_ranks_that_another_launcher_started_are_timed_and_one_of_them_speaks(tmp_path):
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--no-python"]
    done = subprocess.run(
        [*launcher, *LOCKSTEP, "doctor", "--json"], capture_output=True, text=True, timeout=90, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [each["found"][:7] for each in found if each["subject"] == "all-reduce"] == ["2 ranks"]
