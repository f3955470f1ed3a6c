"""Packages are pinned and compared with hashes, and an audit of them is read."""

import json
import re
from pathlib import Path

from tests.pins import judge

ROOT = Path(__file__).parents[1]
OTHER_BUILDS = {"torch", "torchvision"}
"""Whose files differ with the device that they are built for."""


def pins(path):
    return {
        re.sub(r"[-_.]+", "-", line.split("==")[0]).lower(): line.split("==")[1].split()[0]
        for line in path.read_text().splitlines()
        if "==" in line
    }


def test_everything_pinned_but_the_builds_of_torch_has_hashes():
    pinned, hashed = (
        pins(ROOT / "constraints.txt"),
        {path.stem: pins(path) for path in (ROOT / "hashes").iterdir()},
    )
    together = {name: version for part in hashed.values() for name, version in part.items()}
    assert together == {name: version for name, version in pinned.items() if name not in OTHER_BUILDS}
    assert all(pinned[name] == version for part in hashed.values() for name, version in part.items())
    del hashed["docs"]  # of an environment of its own
    names = [name for part in hashed.values() for name in part]
    assert len(names) == len(set(names)), "each is in one file"


def test_an_audit_tells_vulnerable_from_unknown():
    sound, absent = {"name": "a", "version": "1", "vulns": []}, {"name": "b", "skip_reason": "not found"}
    broken = {"name": "c", "version": "2", "vulns": [{"id": "CVE-1", "fix_versions": ["3"]}]}
    lines, status = judge(json.dumps({"dependencies": [sound, absent, broken]}))
    assert (lines[0], status) == ("c 2: CVE-1, mended in 3", 1)
    assert lines[1] == "2 packages audited, 1 known vulnerabilities; 1 not in the database."
    assert judge(json.dumps({"dependencies": [sound]}))[1] == 0
    for nothing in ("", "{}", json.dumps({"dependencies": [absent]})):
        lines, status = judge(nothing)
        assert (lines[0].partition(":")[0], status) == ("Not audited", 0)
