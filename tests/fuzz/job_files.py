"""Damaged job files, read, and where they are jobs shown by the command that would run them."""

import contextlib
import io
import os
import random
import subprocess
import sys
import tomllib

from tests.fuzz.damage import damaged_text

from lockstep.cli import main
from lockstep.config.job import JobConfig
from lockstep.config.job_file import BUILT_IN_JOBS, load_job
from lockstep.errors import EXIT_CONFIG, EXIT_DATA, EXIT_DONE, EXIT_NON_FINITE, ConfigError

SOURCES = [path.read_text() for path in sorted(BUILT_IN_JOBS.glob("*.toml"))]
COMMAND = 0.05
"""How often the command is asked whatever the file is."""


def attempt(rng, folder):
    """Reads one damaged job; it must be one, or be refused in a sentence that names the file."""
    path = folder / "job.toml"
    path.write_bytes(damaged_text(rng.choice(SOURCES), rng).encode(errors="replace"))
    try:
        config = load_job(str(path), imports=False)
    except ConfigError as error:
        assert str(path) in str(error)
        if rng.random() >= COMMAND:
            raise
    else:
        assert JobConfig.from_json(config.to_json()) == config
    return asked(path, folder)


def asked(path, folder):
    """The answer of ``lockstep train JOB --dry-run`` to a file: a plan, or one sentence with its exit code."""
    before = sorted(folder.iterdir())
    said, wrong = io.StringIO(), io.StringIO()
    with contextlib.chdir(folder), contextlib.redirect_stdout(said), contextlib.redirect_stderr(wrong):
        code = main(["train", str(path), "--dry-run"])
    assert sorted(folder.iterdir()) == before, "a dry run wrote something"
    assert code in (0, 2, 3), (code, wrong.getvalue())
    if code == 0:
        assert said.getvalue().strip()
        return "a job"
    assert wrong.getvalue().startswith("lockstep: "), wrong.getvalue()
    return "refused"


def taken(seed, count, folder):
    """Damaged files of the digits job that are jobs all the same, and say something else than it does."""
    digits = (BUILT_IN_JOBS / "digits.toml").read_text()
    rng, path = random.Random(seed), folder / "candidate.toml"
    found = [tomllib.loads(digits)]
    while len(found) <= count:
        text = damaged_text(digits, rng)
        path.write_bytes(text.encode(errors="replace"))
        with contextlib.suppress(ConfigError):
            load_job(str(path), imports=False)
            if tomllib.loads(text) not in found:
                found.append(tomllib.loads(text))
                yield text


def run(text, folder):
    """Trains a job for one epoch on one process; returns the exit code, which is one that has a meaning here."""
    folder.mkdir()
    path = folder / "job.toml"
    path.write_text(text)
    ended = subprocess.run(
        [sys.executable, "-m", "lockstep", "train", str(path), "--epochs=1", "--devices=cpu:1"],
        cwd=folder,
        env={**os.environ, "TMPDIR": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode in (EXIT_DONE, EXIT_CONFIG, EXIT_DATA, EXIT_NON_FINITE), (text, ended.stderr)
    assert "Traceback (most" not in ended.stderr, (text, ended.stderr)
    # The logs of a run that has not begun are kept among the temporary files.
    assert {each.name for each in folder.glob("[!l]*")} <= {"job.toml", "runs"}
    assert {each.name[:14] for each in folder.glob("l*")} <= {"lockstep-logs-"}
    return ended.returncode
