"""The files that a job leaves in its run folder when it starts."""

import contextlib
import json
import os
import shutil
from pathlib import Path

import pytest
from PIL import Image
from tests.ranks import run_ranks

from lockstep.config.job_file import parse_set
from lockstep.core.plan import Share
from lockstep.data.images.decoding import pixels_digest
from lockstep.errors import ConfigError, DataError
from lockstep.job import load_job
from lockstep.job.assemble import assemble
from lockstep.job.rank import main, record, train
from lockstep.job.run_folder import read_starts, run_folder
from lockstep.runtime.events import Callback

SHORT = ("data.workers=0", "log.tensorboard=false", "log.progress=false", "run.name=x", "training.epochs=1")


def job(folder, *settings):
    texts = (*SHORT, f"run.directory={folder}", *settings)
    config = load_job("digits", [parse_set(text) for text in texts])
    run_folder(config).mkdir(exist_ok=True)
    return config


def body(world, config, fit):
    """Starts a job as a rank does: whether its gradients are watched, or why it is refused."""
    trainer = assemble(config, world)
    try:
        record(trainer, config, run_folder(config))
    except ConfigError as error:
        return str(error)
    if fit:
        trainer.fit()
    return bool(trainer.run._session.events.gradients_ready)


def test_every_start_is_kept_with_its_settings_and_shares(tmp_path):
    first = job(tmp_path, "checkpoint.every_steps=8", "training.gradients_every=5")
    assert run_ranks(body, 1, first, True) == [True]
    second = job(tmp_path, "training.epochs=2", "checkpoint.resume=auto", "training.strategy=fsdp")
    run_ranks(body, 2, second, False)
    starts = read_starts(tmp_path / "x")
    assert [(start.step, start.strategy, start.ranks, start.level) for start in starts] == [
        (0, "ddp", 1, "A"),
        (12, "fsdp", 2, "A"),
    ]
    assert [start.job for start in starts] == [first, second]
    assert starts[1].shares == [Share(holders=2, holder=rank, rounds=True) for rank in range(2)]
    assert starts[0].context["torch"] == starts[1].context["torch"] != ""
    lines = (tmp_path / "x" / "gradients.jsonl").read_text().splitlines()
    assert [json.loads(line)["step"] for line in lines] == [0, 5, 8, 10]


def test_a_start_notes_what_photos_are_decoded_to(tmp_path):
    """It was noted before a photo had been read, so 'lockstep compare' could not tell two decoders apart."""
    for name in ("a", "b"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (8, 8), (number, 0, 0)).save(tmp_path / "photos" / name / f"{number}.jpg")
    sets = [
        f"data.{each}={{target='lockstep.data:ImageFolder', root='{tmp_path}/photos', split='{each}'}}"
        for each in ("train", "validation")
    ]
    run_ranks(body, 1, job(tmp_path, *sets), False)
    assert read_starts(tmp_path / "x")[0].context["photos"] == pixels_digest()


def test_below_level_a_no_gradient_is_recorded_and_asking_for_them_is_refused(tmp_path):
    plain = job(tmp_path, "training.reduce=ring")
    asking = job(tmp_path, "training.reduce=ring", "training.record_micro_batches=true", "checkpoint.resume=auto")
    assert run_ranks(body, 2, plain, False) == [False, False]
    assert read_starts(tmp_path / "x")[0].level == "B"
    answers = run_ranks(body, 2, asking, False)
    assert all("gradients are recorded at level A only, and strategy 'ddp' promises level B" in a for a in answers)


@pytest.mark.parametrize("settings", [["gradients_every=0"], ["fingerprint_every=0"]])
def test_recording_can_be_left_out(tmp_path, settings):
    config = job(tmp_path, *(f"training.{each}" for each in settings))
    assert run_ranks(body, 1, config, False) == [False]
    assert read_starts(tmp_path / "x")


ONE_STEP = ("training.max_steps=1", "schedule.warmup_epochs=0")


def trained(world, config):
    with pytest.raises(DataError) as refusal:
        train(config, world)
    return str(refusal.value)


@pytest.mark.fault("K2")
@pytest.mark.parametrize(
    ("name", "place", "reason"),
    [
        ("gradients.jsonl", "A file in {folder}", "No space left on device"),
        ("outcome.json", "{folder}/.outcome.json", "Is a directory"),
    ],
)
def test_a_file_of_the_run_that_cannot_be_written_is_a_sentence(tmp_path, name, place, reason):
    """It was a traceback."""
    config = job(tmp_path, *ONE_STEP)
    if "space" in reason:
        (tmp_path / "x" / name).symlink_to("/dev/full")
    else:
        (tmp_path / "x" / name).mkdir()
    (message,) = run_ranks(trained, 1, config)
    assert message.startswith(place.format(folder=tmp_path / "x"))
    assert message.endswith(
        f" could not be written: {reason}. Make room, or make the folder writable, and go on with --resume auto."
    )


def reported(world, config):
    payload = {"config": config.to_json(), "proof": "", "profile": ""}
    with (
        Path("/dev/full").open("w") as full,
        contextlib.redirect_stdout(full),
        pytest.raises(DataError) as refusal,
    ):
        try:
            main(payload)
        finally:
            os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # for what the buffer holds
    return str(refusal.value)


@pytest.mark.fault("K2")
def test_a_summary_that_does_not_fit_says_that_the_run_is_complete(tmp_path):
    """It was a failure of rank 0, after which the run was started again."""
    (message,) = run_ranks(reported, 1, job(tmp_path, *ONE_STEP))
    assert message == (
        f"The run in '{tmp_path / 'x'}' is complete, but its summary could not be written to standard output: No space "
        "left on device."
    )


class Remover(Callback):
    """Removes a folder after each step."""

    def __init__(self, folder):
        self.folder = folder

    def on_step_end(self, batch):
        shutil.rmtree(self.folder)


def removed_meanwhile(world, config):
    train(config, world)
    return read_starts(run_folder(config))


def test_a_run_folder_that_was_removed_meanwhile_ends_with_its_job(tmp_path):
    """``lockstep report`` and ``predict`` took it for that of a script."""
    remover = f"callbacks=[{{target='{__name__}:Remover', folder='{tmp_path}/x'}}]"
    config = job(tmp_path, *ONE_STEP, "log.every=1", remover)
    (starts,) = run_ranks(removed_meanwhile, 1, config)
    assert [start.job for start in starts] == [config]
    assert (tmp_path / "x" / "log.jsonl").is_file()
    assert (tmp_path / "x" / "outcome.json").is_file()
