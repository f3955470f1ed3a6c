"""The history of a run in its folder."""

import dataclasses
import json
from pathlib import Path

import pytest

from lockstep.config.job_file import load_job
from lockstep.errors import ConfigError
from lockstep.job.run_folder import FILE, Start, decides_result, one_recipe, read_starts, settings_that_differ

DIGITS = load_job("digits", [])


def start(step, **sections):
    """A start with some settings changed, as in ``training={"clip_norm": 1.0}``."""
    changed = {name: dataclasses.replace(getattr(DIGITS, name), **values) for name, values in sections.items()}
    return Start(
        step=step,
        strategy="ddp",
        shares=[],
        level="A",
        device="cpu",
        context={},
        job=dataclasses.replace(DIGITS, **changed),
    )


def test_a_run_that_only_moved_to_other_devices_has_one_recipe():
    moved = start(9, run={"devices": "cpu:4", "name": "x"}, training={"strategy": "fsdp"}, checkpoint={"keep": 9})
    assert one_recipe([start(0), moved])


def test_how_samples_are_read_is_no_part_of_the_recipe():
    assert one_recipe([start(0), start(9, data={"workers": 3, "prefetch": 4, "timeout": 9.0, "cache": True})])


@pytest.mark.parametrize(
    "changed",
    [
        {"data": {"on_bad_sample": "skip"}},
        *({"training": {"clip_norm": 0.5}}, {"training": {"epochs": 9}}, {"run": {"threads": 2}}),
        {"tensor": {"shards": 2}},
    ],
)
def test_a_run_whose_settings_changed_on_the_way_has_not(changed):
    assert not one_recipe([start(0), start(9, **changed)])


def test_a_run_that_was_forced_to_go_on_elsewhere_has_not():
    """It named a command that ends in another fingerprint."""
    forced = start(9, checkpoint={"force_context": True})
    assert one_recipe([start(0), forced])
    assert not one_recipe([start(0), dataclasses.replace(forced, context={"torch": "2.9"})])


def test_a_run_that_began_from_the_checkpoint_of_another_has_not():
    assert not one_recipe([start(9)])


@pytest.mark.fault("T6")
def test_a_record_of_starts_of_any_depth_is_refused(tmp_path):
    for text in ("[" * 100_000, '{"starts":' * 100_000, '{"starts": [3]}', "\udcff"):
        (tmp_path / FILE).write_bytes(text.encode(errors="surrogatepass"))
        with pytest.raises(ConfigError, match="is not what 'lockstep train' wrote"):
            read_starts(tmp_path)


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="there is no /proc here")
def test_a_record_of_starts_that_cannot_be_read_is_not_called_another(tmp_path):
    (tmp_path / FILE).symlink_to("/proc/self/mem")  # which root cannot read either
    with pytest.raises(OSError, match="Input/output error"):
        read_starts(tmp_path)


def test_a_file_is_no_run_folder_and_is_in_one(tmp_path):
    """Of ``runs/a/job.json`` it was asked whether ``runs/a/log.jsonl`` was meant."""
    for name in (FILE, "log.jsonl"):
        (tmp_path / name).touch()
    with pytest.raises(ConfigError, match=f"It is a file. Give the folder that it is in: {tmp_path}.$"):
        read_starts(tmp_path / FILE)


@pytest.mark.fault("T6")
@pytest.mark.parametrize(("name", "value"), [("strategy", None), ("step", "x"), ("context", 3)])
def test_a_start_with_values_of_other_types_is_refused(tmp_path, name, value):
    (tmp_path / FILE).write_text(json.dumps({"starts": [{**start(0).as_table(), name: value}]}))
    with pytest.raises(ConfigError, match=f"is not what 'lockstep train' wrote.*{name} is {value!r}"):
        read_starts(tmp_path)


@pytest.mark.parametrize(
    ("setting", "decides"),
    [
        ("optimizer.lr", True),
        ("training.seed", True),
        ("training.strategy", False),
        ("run.devices", False),
        ("run.threads", True),
        ("tensor.shards", True),
        ("fsdp.reshard_after_forward", False),
        ("checkpoint.every_epochs", False),
        ("model.target", True),
        ("data.workers", False),
        ("job", False),
    ],
)
def test_settings_of_the_recipe_are_told_from_those_of_the_layout(setting, decides):
    assert decides_result(setting) == decides


def test_settings_that_differ_are_told_with_their_values():
    other = start(
        0,
        training={"global_batch": 16, "sync_batch_norm": True},
        optimizer={"args": {"lr": 0.05}},
        run={"name": "other", "directory": "elsewhere", "devices": 1},
    )
    head, *rows = settings_that_differ({"a": start(0), "b": other, "c": start(0)})
    assert head == ("setting", "a", "b", "c")
    assert rows == [
        ("optimizer.lr", "0.1", "0.05", "0.1"),
        ("optimizer.momentum", "0.9", "-", "0.9"),
        ("optimizer.nesterov", "true", "-", "true"),
        ("optimizer.weight_decay", "0.0005", "-", "0.0005"),
        ("run.devices", "2", "1", "2"),
        ("training.global_batch", "128", "16", "128"),
        ("training.sync_batch_norm", "false", "true", "false"),
    ]
    assert settings_that_differ({"a": start(0), "b": start(9)}) == [("setting", "a", "b")]
