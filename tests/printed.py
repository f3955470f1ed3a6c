"""The lines that ``lockstep train`` prints at its end."""

import re


def fingerprint(output):
    """The fingerprint among the last lines; there must be one."""
    (found,) = re.findall(
        r"^fingerprint +([0-9a-f]{64})(?:   \(on every x86-64 CPU with AVX2\))?$", output, re.MULTILINE
    )
    return found


def fingerprint_of(finished):
    """The same of a process that has ended, and well."""
    assert finished.returncode == 0, finished.stderr
    return fingerprint(finished.stdout)
