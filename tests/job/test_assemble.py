import os
import shutil
import subprocess
import sys
import tarfile
import types

import numpy as np
import pytest
from PIL import Image
from tests.printed import fingerprint_of
from torch.utils.data import Subset

from lockstep.cli import main
from lockstep.config.components import Component
from lockstep.config.job import DataConfig
from lockstep.config.job_file import load_job, parse_set
from lockstep.data import Digits, ImageFolder, Mixed, RandomResizedCrop, TarShards
from lockstep.errors import ConfigError
from lockstep.job.assemble import check_classes, use_image_cache
from lockstep.runtime.control import Stopped, StopReason

NOISE = np.random.RandomState(2).randint(0, 256, (64, 64, 3)).astype(np.uint8)
JOB = """\
[model]
target = "own_net:net"

[data]
workers = 1

[data.train]
target = "lockstep.data:ImageFolder"
root = "{data}"
split = "train"
transform = { target = "lockstep.data:RandomResizedCrop", size = 16 }

[data.validation]
target = "lockstep.data:ImageFolder"
root = "{data}"
split = "validation"
transform = { target = "lockstep.data:CenterCrop", size = 16 }

[optimizer]
target = "torch.optim:SGD"
lr = 0.1

[training]
epochs = 2
global_batch = 8
micro_batches = 4
"""
NET = """
from torch import nn

def net():
    return nn.Sequential(nn.Conv2d(3, 4, 3, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 2))
"""


@pytest.fixture
def photos(tmp_path):
    root = tmp_path / "photos"
    for name, shift in (("a", 0), ("b", 100)):
        (root / name).mkdir(parents=True)
        for number in range(15):
            Image.fromarray(np.roll(NOISE, number, axis=0)[: 30 + number] // 2 + shift).save(
                root / name / f"{number}.jpg"
            )
    return root


def config(cache):
    return DataConfig(train=Component(target="lockstep.data:ImageFolder"), cache=cache, workers=0)


def handle(reason=StopReason.NONE):
    marks = []
    heartbeat = types.SimpleNamespace(mark=marks.append, stop_reason=reason)
    run = types.SimpleNamespace(
        is_main=True,
        options=types.SimpleNamespace(threads=1),
        world=types.SimpleNamespace(local_world_size=1),
        _session=types.SimpleNamespace(heartbeat=heartbeat),
    )
    return run, marks


def test_a_set_of_photos_is_found_within_others(photos, tmp_path):
    inner = ImageFolder(photos, transform=RandomResizedCrop(16))
    run, marks = handle()
    use_image_cache(Subset(Mixed(Subset(inner, range(20)), 2), range(9)), "data.train", config(str(tmp_path)), run)
    assert inner.cache.file.parent == tmp_path and set(marks) == {"prepare"}


@pytest.mark.parametrize("cache", [False, ""])
def test_nothing_is_kept_unasked(photos, cache):
    inner = ImageFolder(photos)
    use_image_cache(inner, "data.train", config(cache), handle()[0])
    assert inner.cache is None


def test_true_is_the_users_cache_folder(photos, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "home"))
    inner = ImageFolder(photos)
    use_image_cache(inner, "data.train", config(True), handle()[0])
    assert inner.cache.file.parent == tmp_path / "home" / "lockstep"


def test_other_sets_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"data\.cache is given, and data\.train is a Digits"):
        use_image_cache(Digits("train"), "data.train", config(True), handle()[0])


def test_photos_in_shards_are_kept_and_shards_without_photos_are_refused(photos, tmp_path):
    with tarfile.open(tmp_path / "one.tar", "w") as tar:
        for number in range(4):
            (tmp_path / f"{number}.cls").write_text("0")
            tar.add(photos / "a" / f"{number}.jpg", f"{number}.jpg")
            tar.add(tmp_path / f"{number}.cls", f"{number}.cls")
    inner = TarShards(tmp_path / "one.tar", transform=RandomResizedCrop(16))
    use_image_cache(inner, "data.train", config(str(tmp_path / "kept")), handle()[0])
    assert inner.cache.file.parent == tmp_path / "kept"
    refusal = r"for data\.train it cannot be: TarShards cannot cache decoded photos, because its transform is None"
    with pytest.raises(ConfigError, match=refusal):
        use_image_cache(TarShards(tmp_path / "one.tar"), "data.train", config(True), handle()[0])


def test_a_job_that_is_evaluated_on_other_class_folders_is_refused(photos, tmp_path, monkeypatch, capfd):
    """The labels are numbers in the order of the folders, so the accuracy was of other classes."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "own_net.py").write_text(NET)
    shutil.copytree(photos / "b", tmp_path / "others" / "b")
    validation = f'"{tmp_path}/others"\nsplit = "all"'
    (tmp_path / "job.toml").write_text(JOB.replace('"{data}"\nsplit = "validation"', validation))
    assert main(["train", "job.toml", "--data", str(photos), "--devices", "cpu:1"]) == 2
    assert "Label 0 is 'a' in the data set that is trained on, which has 2 classes, and 'b'" in capfd.readouterr().err


TABLES = """\
[model]
target = "lockstep.models:perceptron"
in_features = 2
num_classes = 2

[data.train]
target = "lockstep.data:CSVTable"
path = "train.csv"
label = "kind"
classes = 2

[data.validation]
target = "lockstep.data:CSVTable"
path = "{data}/validation.csv"
label = "kind"
classes = 2

[optimizer]
target = "torch.optim:SGD"
lr = 0.1

[run]
name = "tables"

[training]
epochs = 1
global_batch = 2
micro_batches = 1
"""


def test_tables_whose_columns_are_in_another_order_are_refused(tmp_path, monkeypatch, capfd):
    """The model took one column for the other: the accuracy and the predictions were wrong, and nothing said so."""
    monkeypatch.chdir(tmp_path)
    for name, header in (("train", "a,b"), ("right/validation", "a,b"), ("turned/validation", "b,a")):
        file = tmp_path / f"{name}.csv"
        file.parent.mkdir(exist_ok=True)
        file.write_text(f"{header},kind\n1,2,0\n3,4,1\n")
    (tmp_path / "job.toml").write_text(TABLES)
    said = "trained on are a, b, and here they are b, a"
    for folder, status in (("turned", 2), ("right", 0)):
        assert main(["train", "job.toml", "--data", folder, "--devices", "cpu:1"]) == status
        assert (said in capfd.readouterr().err) == (folder == "turned")
    assert main(["predict", "runs/tables", "--data", "turned", "--devices", "cpu:1"]) == 2
    assert said in capfd.readouterr().err


def test_scores_without_a_class_are_told(caplog):
    """The built-in job for five kinds of flowers trained on three, and lockstep predict refused the run afterwards."""
    part = types.SimpleNamespace(model=types.SimpleNamespace(args={"num_classes": 12}))
    check_classes(part, (Digits("train"), None))
    assert "has 10 classes (0, 1, 2, 3, 4, 5, 6, 7 and 2 more)" in caplog.text
    assert "Set model.num_classes=10." in caplog.text
    caplog.clear()
    part.model.args["num_classes"] = 10
    check_classes(part, (Digits("train"), None))
    assert not caplog.text


def test_a_run_that_is_asked_to_stop_stops_decoding(photos, tmp_path):
    with pytest.raises(Stopped):
        use_image_cache(ImageFolder(photos), "data.train", config(str(tmp_path)), handle(StopReason.PREEMPTED)[0])
    assert [path.suffix for path in tmp_path.iterdir() if path.name != "photos"] == [".lock"]


@pytest.mark.parametrize(("text", "cache"), [("true", True), ("false", False), ('"kept"', "kept"), ('""', "")])
def test_a_folder_in_a_job_file_begins_at_the_file(tmp_path, text, cache):
    path = tmp_path / "job.toml"
    path.write_text(JOB.replace("workers = 1", f"workers = 1\ncache = {text}"))
    found = load_job(str(path), [parse_set(f"data.root={tmp_path}")], imports=False).data.cache
    assert found == (str(tmp_path / cache) if cache == "kept" else cache)


@pytest.mark.slow
def test_a_job_ends_in_the_same_fingerprint_with_and_without_a_cache(photos, tmp_path):
    (tmp_path / "own_net.py").write_text(NET)
    (tmp_path / "job.toml").write_text(JOB)
    environment = {name: text for name, text in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    found = set()
    for options in (
        ("--devices", "cpu:1"),
        ("--devices", "cpu:3", "--set", "data.cache=kept"),
        ("--devices", "cpu:2", "--set", "data.cache=kept", "--set", "data.workers=0"),
        ("--devices", "cpu:2", "--set", "data.workers=3"),
    ):
        finished = subprocess.run(
            [sys.executable, "-m", "lockstep", "train", "job.toml", "--data", "photos", *options],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
        )
        found.add(fingerprint_of(finished))
    assert len(found) == 1
    assert sorted(path.suffix for path in (tmp_path / "kept").iterdir()) == [
        ".lock",
        ".lock",
        ".photos",
        ".photos",
    ]
