"""``lockstep data`` as a command: what it prints and writes, and its exit status."""

import json

import numpy as np
import pytest
from PIL import Image

JOB = """
[model]
target = "lockstep.models:perceptron"
in_features = 192
num_classes = 2

[data]
workers = 0

[data.train]
target = "lockstep.data:ImageFolder"
root = "{data}"
size = 8

[optimizer]
target = "torch.optim:SGD"
lr = 0.1

[training]
global_batch = 4
micro_batches = 2
"""


@pytest.fixture
def photos(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    rng = np.random.RandomState(0)
    for name in ("cat", "dog"):
        (tmp_path / "pets" / name).mkdir(parents=True)
        for number in range(3):
            pixels = rng.randint(0, 256, (9, 9, 3)).astype(np.uint8)
            Image.fromarray(pixels).save(tmp_path / "pets" / name / f"{number}.png")
    return tmp_path / "pets"


def test_a_job_is_shown_and_its_batch_is_drawn(command, photos, tmp_path):
    options = ("--devices", "cpu:2", "--sheet", "a.png", "--json", "a.json")
    status, out, err = command("data", "job.toml", "--data", str(photos), *options)
    assert (status, err) == (0, "")
    assert "  cat         3  ########" in out and "unreadable: none" in out and "  rank 1       k1 " in out
    with Image.open(tmp_path / "a.png") as sheet:
        assert sheet.size == (2 * 68 + 4, 2 * 82 + 4)
    reads = json.loads((tmp_path / "a.json").read_text())["step"]["reads"]
    assert [len(names) for each in reads for names in each.values()] == [2, 2]


@pytest.mark.fault("T8")
def test_names_of_any_bytes_are_shown_and_not_obeyed(command, photos):
    (photos / "cat").rename(photos / "c\x1b[2J\udce9")
    status, out, _ = command("data", "job.toml", "--data", str(photos), "--devices", "1")
    assert status == 0 and "  c\\x1b[2J\\udce9  " in out


def test_a_broken_file_is_the_exit_status(command, photos):
    (photos / "dog" / "1.png").write_bytes(b"")
    status, out, _ = command("data", "job.toml", "--data", str(photos), "--devices", "1")
    assert status == 1 and "unreadable: 1 of 6" in out and "Sample 4 (dog/1.png) cannot be read" in out
    status, out, _ = command("data", "job.toml", "--data", str(photos), "--devices", "1", "--quick")
    assert status == 0 and "unreadable" not in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--step", "2"), "--step 2 does not exist: the steps of an epoch are 0 to 1"),
        (("--epoch", "-1"), "--epoch -1 should be 0 or more"),
        (("--sheet", "absent/a.png"), "the folder 'absent' does not exist"),
        (("--devices", "3"), "micro_batches=2"),
    ],
)
def test_mistakes_are_named(command, photos, arguments, message):
    status, _, err = command("data", "job.toml", "--data", str(photos), "--devices", "1", "--quick", *arguments)
    assert status == 2 and message in err, err
