"""The ``Dockerfile``: what it copies and calls exists, and it is built where a builder runs."""

import fnmatch
import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

from lockstep.cli import main

ROOT = Path(__file__).parents[1]
BUILDERS = (["docker", "build"], ["podman", "build"], ["buildah", "build"])


def instructions():
    """The instructions, as (name, text)."""
    lines = [line for line in (ROOT / "Dockerfile").read_text().splitlines() if not line.startswith("#")]
    whole = re.sub(r"\s*\\\n\s*", " ", "\n".join(lines))
    return [tuple(line.split(maxsplit=1)) for line in whole.splitlines() if line]


def texts(name):
    return [text for each, text in instructions() if each == name]


def is_sent(path):
    """True if a path is in the builder's context."""
    rules = [rule for rule in (ROOT / ".dockerignore").read_text().splitlines() if rule and rule[0] != "#"]
    sent = True
    for rule in rules:
        if fnmatch.fnmatch(path, rule.removeprefix("!").removeprefix("**/")):
            sent = rule.startswith("!")
    return sent


def test_what_is_copied_exists_and_is_sent_to_the_builder():
    copied = [name for text in texts("COPY") for name in text.split()[:-1]]
    assert all((ROOT / name).exists() and is_sent(name) for name in copied)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert {project["readme"], *project["license-files"], "setup.py", "src"} <= set(copied), "the build needs these"
    assert not is_sent("tests") and not is_sent(".git") and not is_sent("runs")


def test_the_install_names_an_extra_and_pins_that_exist():
    (install,) = [text for text in texts("RUN") if "pip install" in text]
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    asked = re.search(r'pip install "\.\[(\w+)\]" -c (\S+)', install)
    assert asked[1] in extras
    assert f"> {asked[2]}" in install and "torch==" in (ROOT / "constraints.txt").read_text()


def test_it_runs_as_an_ordinary_user_whom_the_manifests_name(capsys):
    (user,) = texts("USER")
    assert f"--uid {user} " in " ".join(texts("RUN")) and int(user) > 0
    main(["kubernetes", "digits", "--kind", "job", "--image", "any", "--claim", "any"])
    assert f"runAsUser: {user}\n" in capsys.readouterr().out


def test_its_command_is_one_of_lockstep(capsys):
    (words,) = map(json.loads, texts("CMD"))
    scripts = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert words[0] in scripts
    main(words[1:])
    assert "torch" in capsys.readouterr().out


def builder():
    """The words of a builder that works here; skips with the reason where none does."""
    reasons = []
    for words in BUILDERS:
        if shutil.which(words[0]) is None:
            reasons.append(f"{words[0]} is not installed")
            continue
        asked = subprocess.run([words[0], "info"], capture_output=True, text=True)
        if asked.returncode == 0:
            return words
        reasons.append(f"{words[0]}: {(asked.stderr.strip() or 'no answer').splitlines()[0]}")
    pytest.skip("no builder of images runs here: " + "; ".join(reasons))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_it_builds_and_trains():
    words, name = builder(), "lockstep-test"
    subprocess.run([*words, "-t", name, "."], cwd=ROOT, check=True, timeout=1700)
    train = ["lockstep", "train", "digits", "--epochs", "1"]
    done = subprocess.run([words[0], "run", "--rm", name, *train], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "fingerprint" in done.stdout
    subprocess.run([words[0], "rmi", name], capture_output=True)
