"""Looks up the pinned packages in the database of known vulnerabilities: ``python tests/pins.py``.

Ends with 1 if one of them has a vulnerability. Where pip-audit is missing or reaches no database, it says so and ends
with 0.
"""

import json
import subprocess
import sys
from pathlib import Path

_COMMAND = ["-m", "pip_audit", "--no-deps", "--disable-pip", "--progress-spinner", "off", "--format", "json"]


def judge(answer):
    """The lines for the terminal and the exit status, from pip-audit's JSON."""
    try:
        packages = json.loads(answer)["dependencies"]
    except (ValueError, KeyError, TypeError):
        return ["Not audited: pip-audit has given no answer here (is it installed, is there a network?)."], 0
    known = [package for package in packages if "vulns" in package]
    if not known:
        return [f"Not audited: the database is not reached from here ({len(packages)} packages)."], 0
    found = [
        f"{package['name']} {package['version']}: {flaw['id']}, mended in {', '.join(flaw['fix_versions']) or 'none'}"
        for package in known
        for flaw in package["vulns"]
    ]
    unknown = len(packages) - len(known)
    last = f"{len(known)} packages audited, {len(found)} known vulnerabilities; {unknown} not in the database."
    return [*found, last], 1 if found else 0


def main():
    """Audits constraints.txt."""
    pins = Path(__file__).parents[1] / "constraints.txt"
    words = [sys.executable, *_COMMAND, "--requirement", str(pins)]
    lines, status = judge(subprocess.run(words, capture_output=True, text=True).stdout)
    print(*lines, sep="\n")
    return status


if __name__ == "__main__":
    sys.exit(main())
