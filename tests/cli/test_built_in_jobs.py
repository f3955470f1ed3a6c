"""Lockstep's own jobs, trained for an epoch on a few samples in the real formats."""

import gzip

import numpy as np
import pytest
from PIL import Image

QUICK = (
    "--epochs",
    "1",
    "--devices",
    "cpu:2",
    "--set",
    "log.tensorboard=false",
    "--set",
    "training.micro_batches=2",
)


def write_flowers(folder):
    rng = np.random.default_rng(0)
    for name in ("daisy", "dandelion", "roses", "sunflowers", "tulips"):
        (folder / name).mkdir(parents=True)
        for number in range(5):
            pixels = rng.integers(0, 256, (48, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.jpg")


def write_idx(folder):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for prefix, count in (("train", 64), ("t10k", 16)):
        images = rng.integers(0, 256, (count, 28, 28), dtype=np.uint8)
        header = np.array([0x803, count, 28, 28], ">u4").tobytes()
        (folder / f"{prefix}-images-idx3-ubyte").write_bytes(header + images.tobytes())
        labels = (np.arange(count) % 10).astype(np.uint8)
        with gzip.open(folder / f"{prefix}-labels-idx1-ubyte.gz", "wb") as file:
            file.write(np.array([0x801, count], ">u4").tobytes() + labels.tobytes())


def write_cifar(folder):
    folder.mkdir()
    rng = np.random.default_rng(0)
    for name in [*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin"]:
        records = rng.integers(0, 10, (4, 3073), dtype=np.uint8)
        (folder / name).write_bytes(records.tobytes())


SMALL = {
    "flowers": (
        write_flowers,
        "global_batch=8",
        [
            "data.train.transform.size=32",
            "data.validation.transform={target='lockstep.data:CenterCrop', size=32}",
        ],
    ),
    "mnist": (write_idx, "global_batch=32", []),
    "cifar10": (
        write_cifar,
        "global_batch=8",
        ["data.train.images_per_file=4", "data.validation.images_per_file=4"],
    ),
}


@pytest.mark.parametrize("job", [pytest.param(job, marks=[pytest.mark.slow] * (job != "mnist")) for job in SMALL])
def test_a_built_in_job_trains_on_data_in_its_format(process, tmp_path, job):
    write, batch, options = SMALL[job]
    write(tmp_path / "data")
    sets = [word for option in [f"training.{batch}", *options] for word in ("--set", option)]
    result = process("train", job, "--data", "data", *QUICK, *sets)
    assert result.returncode == 0, result.stderr
    assert "fingerprint" in result.stdout
    assert (tmp_path / "runs" / f"{job}-001" / "model.safetensors").is_file()


def test_the_flowers_job_is_the_one_of_the_notes(command, tmp_path):
    """ResNet-34, five classes, 80/20 by seed, 224 pixels, SGD with momentum, cosine with a final factor."""
    from lockstep.config.job_file import Override
    from lockstep.job import load_job

    write_flowers(tmp_path / "data")
    config = load_job("flowers", [Override(path=("data", "root"), value=str(tmp_path / "data"), origin="--data")])
    assert config.model.target == "lockstep.models:resnet34"
    assert config.model.args["num_classes"] == 5
    assert config.data.train.args["held_out"] == config.data.validation.args["held_out"] == 0.2
    assert config.data.train.args["seed"] == config.data.validation.args["seed"] == config.training.seed
    assert config.data.train.args["transform"]["size"] == 224
    assert config.data.train.args["transform"]["flip"] == 0.5
    assert config.optimizer.args["momentum"] == 0.9
    assert (config.schedule.kind, config.schedule.final_factor) == ("cosine", 0.1)
    status, output, _ = command("train", "flowers", "--data", "data", "--dry-run", "--devices", "cpu:2")
    assert status == 0
    assert "20 samples; evaluation: 5 samples" in output
