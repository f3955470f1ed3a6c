"""The wheel and the source archive: what they hold, and that they install into an empty environment and train there.

An environment has the lowest or the highest versions that ``pyproject.toml`` allows, for each Python of this machine.
"""

import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PYTHONS = ("3.11", "3.12", "3.13")
ENVIRONMENTS = [(PYTHONS[0], "lowest"), *((python, "highest") for python in PYTHONS)]


def call(*words, **options):
    """The output of a command that must succeed."""
    done = subprocess.run(list(map(str, words)), capture_output=True, text=True, timeout=900, **options)
    assert done.returncode == 0, (words, done.stdout[-3000:], done.stderr[-3000:])
    return done.stdout


def install(environment, *packages):
    """Installs with pip; skips the test where no package index is reached."""
    words = [
        environment / "bin/python",
        "-m",
        "pip",
        "install",
        "--disable-pip-version-check",
        "--retries",
        "1",
    ]
    done = subprocess.run([*words, *packages], capture_output=True, text=True, timeout=900)
    if done.returncode and re.search("NewConnectionError|ConnectTimeout|NameResolutionError", done.stderr):
        pytest.skip("no package index is reached")
    assert done.returncode == 0, done.stderr[-3000:]


NO_PHOTO = """
from lockstep.data.images.decoding import open_photo
try:
    open_photo(b"not a photo")
except Exception as error:
    print(type(error).__name__)
"""
"""Every format is tried: an older Pillow does not know all of them."""


def environment_of(interpreter, folder):
    """An empty environment."""
    call(interpreter, "-m", "venv", folder)
    return folder


def lowest():
    """The lowest versions that the project allows, as pip takes them."""
    return [requirement.replace(">=", "==") for requirement in PROJECT["dependencies"]]


@pytest.fixture(scope="session")
def built(tmp_path_factory):
    """The wheel and the archive of this tree as it is, and the commit; the wheel is built from the archive."""
    folder = tmp_path_factory.mktemp("package")
    tree, commit = folder / "tree", "unknown"
    if (ROOT / ".git").exists():
        call("git", "clone", "--quiet", "--no-tags", ROOT, tree)
        commit = call("git", "-C", tree, "rev-parse", "HEAD").strip()[:12]
        names = call("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
        for name in names:
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            if (ROOT / name).is_file():
                shutil.copyfile(ROOT / name, tree / name)
    else:
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(".venv*", "runs", "build", "dist"))
    builder = environment_of(sys.executable, folder / "builder")
    install(builder, "build")
    call(builder / "bin/python", "-m", "build", "--outdir", folder / "dist", tree)
    (wheel,), (archive,) = (folder / "dist").glob("*.whl"), (folder / "dist").glob("*.tar.gz")
    return wheel, archive, commit


def test_the_extra_all_has_every_extra_for_users():
    """But Ray, whose version is that of the user's cluster."""
    extras = set(PROJECT["optional-dependencies"]) - {"all", "test", "check", "ray"}
    assert PROJECT["optional-dependencies"]["all"] == [f"lockstep-train[{','.join(extras_in_order(extras))}]"]


def extras_in_order(extras):
    return [name for name in PROJECT["optional-dependencies"] if name in extras]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_wheel_and_archive_hold_the_package_its_data_and_its_commit(built):
    wheel, archive, commit = built
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
        recorded = file.read("lockstep/commit.txt").decode() if commit != "unknown" else commit
        (metadata,) = (file.read(name).decode() for name in names if name.endswith("dist-info/METADATA"))
    with tarfile.open(archive) as file:
        archived = {name.partition("/")[2] for name in file.getnames()}
    tree = {
        path.relative_to(ROOT / "src").as_posix()
        for path in (ROOT / "src/lockstep").rglob("*")
        if path.suffix in (".py", ".toml", ".typed", ".npz", ".md")
    }
    record = {"lockstep/commit.txt"} if commit != "unknown" else set()
    assert {name for name in names if name.startswith("lockstep/")} >= tree | record
    assert {name.removeprefix("src/") for name in archived} >= tree | record
    assert not {name for name in archived if name.startswith("tests/")}
    assert recorded.startswith(commit)
    assert re.search(r"^Version: (.*)$", metadata, re.M)[1] == re.search(r"-(\d[^-]*)-", wheel.name)[1]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("python", "versions"), ENVIRONMENTS)
def test_it_trains_in_an_empty_environment(built, tmp_path, python, versions):
    interpreter = shutil.which(f"python{python}")
    # A version manager may have the name of one that it has not installed.
    if interpreter is None or subprocess.run([interpreter, "--version"], capture_output=True).returncode:
        pytest.skip(f"this machine has no python{python}")
    wheel, archive, commit = built
    environment = environment_of(interpreter, tmp_path / "environment")
    if versions == "lowest":
        install(environment, *lowest())
        install(environment, "--no-deps", archive)
    else:
        install(environment, "-c", ROOT / "constraints.txt", wheel)
    command, options = environment / "bin/lockstep", {"cwd": tmp_path}
    told = call(command, "--version", **options)
    torch = "2.8.0" if versions == "lowest" else "2.13.0"
    assert re.match(rf"lockstep \S+ \(commit {commit}\S*, torch {torch}\S*, Python {python}\.\d+\)\n", told)
    prints = set()
    for layout in (
        ["--devices", "cpu:1"],
        ["--devices", "cpu:2"],
        ["--devices", "cpu:3", "--strategy", "fsdp"],
    ):
        output = call(command, "train", "digits", "--epochs", "1", *layout, **options)
        prints.add(re.search(r"^fingerprint +(\w{64})", output, re.M)[1])
    assert len(prints) == 1, prints
    call(command, "verify", "digits", "--steps", "4", **options)
    assert call(environment / "bin/python", "-c", NO_PHOTO, **options) == "UnidentifiedImageError\n"
