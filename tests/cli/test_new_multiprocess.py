"""``lockstep new``: what it asks, what it writes, and that this trains at once with one fingerprint in any layout."""

import io
import re
import subprocess
import sys

import numpy as np
import pytest
from tests.config.test_starter import TABLE, write_photos

from lockstep.cli import main

LOCKSTEP = [sys.executable, "-m", "lockstep"]


class Terminal(io.StringIO):
    """Someone who types these lines."""

    def isatty(self):
        return True


def fingerprint_of(*words, folder):
    done = subprocess.run([*words], cwd=folder, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-2000:]
    return re.search(r"^fingerprint +(\w{64})", done.stdout, re.M)[1]


def write_data(folder, kind):
    if kind == "images":
        return write_photos(folder / "data")
    if kind == "table":
        (folder / "data.csv").write_text(TABLE)
        return folder / "data.csv"
    if kind == "text":
        (folder / "data.txt").write_text("The quick brown fox jumps over the lazy dog. " * 40)
        return folder / "data.txt"
    rng = np.random.RandomState(0)
    np.savez(folder / "data.npz", x=rng.rand(30, 4), y=rng.rand(30))
    return folder / "data.npz"


def test_it_asks_five_questions_and_takes_the_default_where_nothing_is_typed(tmp_path, monkeypatch, capsys):
    (tmp_path / "t.csv").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", Terminal("t.csv\n\nb\n3\n\n"))
    assert main(["new"]) == 0
    output = capsys.readouterr().out
    assert output.count("?") == 5
    assert "predicts 'b': a number" in output
    assert "epochs = 3" in (tmp_path / "train_t.toml").read_text()
    assert "'b', columns=['a', 'kind']" in (tmp_path / "train_t.py").read_text()


def test_nothing_is_written_over(tmp_path, monkeypatch, capsys):
    (tmp_path / "t.csv").write_text(TABLE)
    (tmp_path / "train_t.py").write_text("mine")
    monkeypatch.chdir(tmp_path)
    assert main(["new", "t.csv", "--yes"]) == 2
    assert "'train_t.py' exists, and is not written over" in capsys.readouterr().err
    assert (tmp_path / "train_t.py").read_text() == "mine"
    assert not (tmp_path / "train_t.toml").exists()


def test_data_whose_path_no_job_file_can_hold_is_refused_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "caf\udce9.csv").write_text(TABLE)
    assert main(["new", "caf\udce9.csv", "--yes"]) == 2
    assert "A name in the path of the data is not in UTF-8" in capsys.readouterr().err
    assert [path.suffix for path in tmp_path.iterdir()] == [".csv"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        (["--kind", "tables"], "--kind 'tables' is not known. Did you mean 'table'"),
        (["--goal", "class"], "--goal 'class' is not known. Did you mean 'classes'"),
        (["--epochs", "none"], "--epochs 'none' should be a whole number"),
        (["--name", "torch"], "Python has a module of that name already"),
        (["--name", "a b"], "should be letters, digits and underscores"),
        (["--kind", "text", "--target", "a"], "--target names a column of a table"),
    ],
)
def test_an_option_that_does_not_fit_is_refused(tmp_path, monkeypatch, capsys, options, match):
    (tmp_path / "t.csv").write_text(TABLE)
    monkeypatch.chdir(tmp_path)
    assert main(["new", "t.csv", "--yes", *options]) == 2
    assert match in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["t.csv"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table", "tensors", "text", "images"])
@pytest.mark.timeout(600)
def test_job_and_script_train_at_once_and_two_processes_end_in_the_bits_of_one(tmp_path, kind):
    data = write_data(tmp_path, kind)
    subprocess.run([*LOCKSTEP, "new", str(data), "--epochs", "1"], cwd=tmp_path, check=True, timeout=60)
    job = [*LOCKSTEP, "train", "train_data.toml", "--set", "log.tensorboard=false", "--devices"]
    assert fingerprint_of(*job, "cpu:1", folder=tmp_path) == fingerprint_of(*job, "cpu:2", folder=tmp_path)
    alone = fingerprint_of(sys.executable, "train_data.py", folder=tmp_path)
    two = [*LOCKSTEP, "run", "--devices", "cpu:2", "train_data.py"]
    assert alone == fingerprint_of(*two, folder=tmp_path)


def test_a_folder_of_images_says_what_would_be_trained(tmp_path, monkeypatch, capsys):
    write_photos(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    assert main(["train", "photos", "--dry-run", "--devices", "cpu:1"]) == 0
    said = capsys.readouterr().err
    assert "12 photos in 2 classes: cat, dog." in said
    assert "lockstep new photos" in said


def test_a_folder_of_images_whose_weights_are_given_is_not_said_to_begin_with_random_ones(
    tmp_path, monkeypatch, capsys
):
    write_photos(tmp_path / "photos")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "resnet18.pth").touch()
    options = ("--dry-run", "--devices", "cpu:1", "--set", "weights.path=resnet18.pth")
    assert main(["train", "photos", *options]) == 0
    assert "--set changes that: weights.path=resnet18.pth." in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_folder_of_images_trains_and_two_processes_end_in_the_bits_of_one(tmp_path):
    write_photos(tmp_path / "photos")
    job = [*LOCKSTEP, "train", "photos", "--epochs", "1", "--devices"]
    assert fingerprint_of(*job, "cpu:1", folder=tmp_path) == fingerprint_of(*job, "cpu:2", folder=tmp_path)
