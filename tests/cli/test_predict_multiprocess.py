"""``lockstep predict``: trained on photos once, predicted on one and on two processes, and computed by hand."""

import csv
import dataclasses
import re
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from lockstep.cli import main
from lockstep.cli.predict import data_of
from lockstep.config.components import Component
from lockstep.config.job_file import load_job, parse_set
from lockstep.data.images.transforms import IMAGENET_MEAN, IMAGENET_STD
from lockstep.job.prediction import class_names
from lockstep.models import perceptron

LOCKSTEP = [sys.executable, "-m", "lockstep"]
CLASSES = ("daisy", "rose", "tulip")
JOB = """
[model]
target = "lockstep.models:perceptron"
in_features = 192
hidden = [16]
num_classes = 3

[data]
workers = 1

[data.train]
target = "lockstep.data:ImageFolder"
root = "{data}"
split = "train"
transform = { target = "lockstep.data:RandomResizedCrop", size = 8 }

[data.validation]
target = "lockstep.data:ImageFolder"
root = "{data}"
split = "validation"
transform = { target = "lockstep.data:CenterCrop", size = 8, resize = 8 }

[optimizer]
target = "torch.optim:SGD"
lr = 0.1

[training]
epochs = 1
global_batch = 12
micro_batches = 4

[run]
name = "photos"

[log]
tensorboard = false
progress = false
"""


def write_photos(folder, count, seed, colour=None):
    rng = np.random.RandomState(seed)
    folder.mkdir(parents=True)
    for number in range(count):
        pixels = rng.randint(0, 256, (8, 8, 3)).astype(np.uint8)
        Image.fromarray(pixels if colour is None else pixels // 4 + np.uint8(colour)).save(folder / f"{number}.png")


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A run on three classes of photos, and other photos without classes."""
    folder = tmp_path_factory.mktemp("predict")
    for label, name in enumerate(CLASSES):
        write_photos(folder / "flowers" / name, 8, label, colour=60 * label)
    write_photos(folder / "new" / "deep" / "er", 5, 9)
    write_photos(folder / "new" / "b", 4, 10)
    (folder / "job.toml").write_text(JOB)
    command = [*LOCKSTEP, "train", "job.toml", "--data", "flowers", "--devices", "cpu:1"]
    trained = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert trained.returncode == 0, trained.stderr
    return folder


@pytest.fixture
def predict(home, monkeypatch, capfd):
    monkeypatch.chdir(home)

    def run(*arguments):
        status = main(["predict", "runs/photos", *arguments])
        told = capfd.readouterr()
        return status, told.out + told.err

    return run


def rows_of(path):
    with path.open(newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_new_photos_get_the_numbers_of_a_computation_by_hand_on_any_number_of_processes(home, predict):
    for devices, more in (("cpu:1", ()), ("cpu:2", ()), ("cpu:2", ("--strategy", "pipeline"))):
        out = home / f"{devices[-1]}{len(more)}.csv"
        status, told = predict("--data", "new", "--devices", devices, "--out", str(out), *more)
        assert status == 0 and told.startswith(f"9 samples -> {out}"), told
    assert (home / "10.csv").read_bytes() == (home / "20.csv").read_bytes() == (home / "22.csv").read_bytes()
    rows = rows_of(home / "10.csv")
    names = [f"b/{number}.png" for number in range(4)] + [f"deep/er/{number}.png" for number in range(5)]
    assert [row["sample"] for row in rows] == names
    model = perceptron(in_features=192, hidden=[16], num_classes=3)
    model.load_state_dict(load_file(home / "runs/photos/model.safetensors"))
    mean, std = (torch.tensor(numbers)[:, None, None] for numbers in (IMAGENET_MEAN, IMAGENET_STD))
    for index, row in enumerate(rows):
        pixels = torch.from_numpy(np.array(Image.open(home / "new" / names[index]))).permute(2, 0, 1)
        with torch.no_grad():
            wanted = model(((pixels / 255 - mean) / std)[None]).softmax(1)[0]
        found = torch.tensor([float(row[f"probability_{name}"]) for name in CLASSES])
        assert int(row["index"]) == index and row["class"] == CLASSES[int(wanted.argmax())]
        assert torch.allclose(found, wanted, atol=1e-5)


def test_without_a_folder_the_held_out_photos_are_predicted_into_the_run_folder(home, predict):
    assert predict("--devices", "1", "--best")[0] == 0
    rows = rows_of(home / "runs/photos/predictions.csv")
    held_out = [name for name in CLASSES for _ in range(2)]
    assert [row["sample"].partition("/")[0] for row in rows] == held_out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--out", "a.txt"), r"--out a\.txt should end in \.csv or \.parquet"),
        (("--out", "absent/a.csv"), r"the folder absent does not exist"),
        (("--data", "absent"), r"--data absent: there is no such"),
        (("--strategy", "pipline"), r"Did you mean 'pipeline'"),
        (("--devices", "5"), r"micro_batches"),
    ],
)
def test_mistakes_are_named_before_a_process_is_started(predict, arguments, message):
    status, told = predict(*arguments)
    assert status == 2 and re.search(message, told), told


def test_a_run_that_has_not_ended_has_the_names_of_the_classes_that_it_trains_on(home, monkeypatch, tmp_path):
    """They were numbers, or those of the other folder that was predicted."""
    monkeypatch.chdir(home)
    job = load_job("job.toml", [parse_set(f"data.root={home}/flowers"), parse_set("run.name=other")])
    assert class_names(tmp_path, job) == CLASSES
    train = dataclasses.replace(job.data.train, args={"root": str(tmp_path / "gone")})
    data = dataclasses.replace(job.data, train=train)
    assert class_names(tmp_path, dataclasses.replace(job, data=data)) == ()


def test_weights_that_are_missing_are_named(home, predict, tmp_path):
    (tmp_path / "job.json").write_bytes((home / "runs/photos/job.json").read_bytes())
    assert main(["predict", str(tmp_path)]) == 2


def test_photos_of_another_folder_are_read_within_the_limits_of_the_job_and_by_its_loader(tmp_path):
    """A file that the job's limit allows was refused, and a loader of the user's was left out."""

    def asked(target, **args):
        validation = Component(target=target, args={"root": "/old/val", **args})
        job = SimpleNamespace(job="j", data=SimpleNamespace(validation=validation, root="/old"))
        return data_of(job, str(tmp_path))

    limited = asked("lockstep.data:ImageFolder", size=8, max_file_size=10**9, split="validation")
    assert limited.target == "lockstep.data:PhotoFiles"
    assert limited.args == {"root": str(tmp_path), "size": 8, "max_file_size": 10**9}
    own = asked("torchvision.datasets:ImageFolder", loader={"object": "my_photos:grey"})
    assert own.target == "torchvision.datasets:ImageFolder"
    assert own.args == {"root": f"{tmp_path}/val", "loader": {"object": "my_photos:grey"}}
