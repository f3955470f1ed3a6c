"""Job files: found, read, overridden and checked, with every mistake named where it stands."""

import os
from pathlib import Path

import pytest

from lockstep.config.components import Component
from lockstep.config.job_file import Override, built_in_jobs, find_job, load_job, parse_set, toml_value
from lockstep.data.download import PUBLISHED
from lockstep.errors import ConfigError


def message(call, *arguments, **options):
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **options)
    return str(caught.value)


def test_a_plain_job_is_loaded_and_takes_the_name_of_its_file(load):
    config = load()
    assert config.job == "work"
    assert config.model == Component(target="torch.nn:Linear", args={"in_features": 4, "out_features": 2})
    assert config.optimizer.args == {"lr": 0.1}
    assert config.loss.target == "torch.nn:CrossEntropyLoss"
    assert config.training.epochs == 3
    assert config.training.global_batch == 128


@pytest.mark.fault("S6", "S7")
def test_every_mistake_is_reported_with_its_file_and_line(job_file):
    path = job_file(
        """\
[model]
target = "resnet34"
[data]
train = { target = "a:b", transform = [{ target = "c:d" }, { target = "c.d" }] }
worker = 3
[training]
epochs = "ten"
devices = 2
precision = "fp61"
[optimizer]
lr = 0.1
[modle]
"""
    )
    lines = message(load_job, str(path)).splitlines()
    assert lines[0] == "The job has 8 mistakes."
    assert {line.strip() for line in lines[1:]} == {
        f"{path}:2: model.target should be an import path like 'package.module:name' and is 'resnet34'.",
        f"{path}:4: data.train.transform.1.target should be an import path like 'package.module:name' and"
        " is 'c.d'. Did you mean 'c:d'?",
        f"{path}:5: data.worker is not a known setting. Did you mean 'workers'?",
        f"{path}:7: training.epochs should be an integer and is 'ten'.",
        f"{path}:8: training.devices is not a known setting. Did you mean 'run.devices'?",
        f"{path}:9: training.precision 'fp61' is not known. Did you mean 'fp16'? Known: bf16, fp16, fp32, tf32.",
        f"{path}:10: optimizer.target is missing: give an import path 'package.module:name'.",
        f"{path}:12: modle is not a known setting. Did you mean 'model'?",
    }


def test_mistakes_in_components_are_reported_with_those_in_settings_in_the_order_of_the_file(job_file):
    path = job_file(
        """\
[model]
target = "torch.nn:Linear"
in_featurs = 4
in_features = 4
out_features = 2
[training]
epoch = 3
[data.train]
target = "lockstep.data:Digit"
[optimizer]
target = "torch.optim:SDG"
[modle]
"""
    )
    lines = message(load_job, str(path)).splitlines()[1:]
    assert [line.strip().removeprefix(f"{path}:").partition(" is ")[0] for line in lines] == [
        "3: model.in_featurs",
        "7: training.epoch",
        "9: data.train.target",
        "11: optimizer.target",
        "12: modle",
    ]


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ("training.epochs=1.5", "training.epochs should be an integer and is 1.5."),
        ("training.epochs=true", "training.epochs should be an integer and is true."),
        ("training.drop_last=1", "training.drop_last should be true or false and is 1."),
        ("training.clip_norm=nan", "training.clip_norm should be more than 0 and is nan."),
        ("data.timeout=inf", "data.timeout should be more than 0 and at most 1,000,000,000 and is inf."),
        ("weights.freeze=fc", "weights.freeze should be a list of strings and is 'fc'."),
        ("weights.freeze=[1]", "weights.freeze should be a list of strings and is a list."),
        ("run.devices=1.5", "run.devices should be an integer or a string and is 1.5."),
        ("training=3", "training should be a table and is 3."),
        ("optimzer.lr=1", "optimzer is not a known setting. Did you mean 'optimizer'?"),
        ("model=3", "model should be a table with a target and is 3."),
        (
            "optimizer.since=1979-05-27",
            "optimizer.since should be a string, number, boolean, list or table and is 1979-05-27 (date).",
        ),
        ("optimizer.lr=nan", "optimizer.lr should be a string, number, boolean, list or table and is nan."),
        (
            "training.epochs.first=1",
            "training.epochs.first cannot be set: training.epochs is a single value.",
        ),
    ],
)
def test_a_wrong_value_is_told_with_what_was_found(load, option, expected):
    assert message(load, option) == f"--set {option}: {expected}"


def test_a_job_without_a_model_is_told_what_is_missing(load):
    text = "[data.train]\ntarget = 'a:b'\n"
    assert "model is missing: a job needs a table [model]" in message(load, text=text)


def test_syntax_errors_name_the_line(job_file):
    path = job_file("[model]\ntarget = my:Net\n")
    assert message(load_job, str(path)).startswith(f"{path}:2: Invalid value, in `target = my:Net`.")


@pytest.mark.parametrize(
    "content", [b"\xff\xfe", b"a = [" + b"[" * 50_000, b"a = " + b"9" * 5_000, b"a = 1\0", b"a = 1\na = 2"]
)
def test_a_file_that_cannot_be_read_is_a_config_error(tmp_path, content):
    path = tmp_path / "job.toml"
    path.write_bytes(content)
    assert str(path) in message(load_job, str(path))


def test_the_mark_with_which_some_editors_begin_a_file_is_ignored(tmp_path):
    (tmp_path / "job.toml").write_bytes(b"\xef\xbb\xbf[modle]\n")
    assert "job.toml:1: modle is not a known setting" in message(load_job, str(tmp_path / "job.toml"))


def test_a_file_that_is_not_utf8_is_told_so(tmp_path):
    """The words were Python's: 'utf-8' codec can't decode byte 0xf6 in position 11."""
    path = tmp_path / "job.toml"
    path.write_bytes('job = "größe"\n'.encode("latin-1"))
    assert "cannot be read: it is not in UTF-8 (byte 10 is 0xf6); save it so." in message(load_job, str(path))


def test_a_folder_a_missing_file_and_an_unknown_name_are_told_apart(tmp_path):
    assert "has 0 folders with photos" in message(load_job, str(tmp_path))
    assert "Did you mean 'digits'?" in message(load_job, "digist")
    assert "neither a file nor a built-in job" in message(load_job, str(tmp_path / "none.toml"))
    (tmp_path / "points.toml").touch()
    for asked in ("point.toml", "points.tml", "points"):
        assert f"Did you mean '{tmp_path / 'points.toml'}'?" in message(load_job, str(tmp_path / asked))
    script = tmp_path / "train.py"
    script.write_text("import torch\n")
    assert f"To verify it: lockstep verify --script '{script}'." in message(load_job, str(script))


@pytest.mark.parametrize("job", PUBLISHED)
def test_a_built_in_job_without_its_data_names_the_command_that_downloads_it(job):
    assert f"Give it with --data DIR; 'lockstep download {job}' writes one." in message(load_job, job)
    assert "Give it with --data DIR." in message(load_job, "flowers")


def test_the_folder_of_a_run_is_no_job(tmp_path):
    (tmp_path / "job.json").write_text("{}")
    assert f"lockstep train JOB --resume {tmp_path}" in message(load_job, str(tmp_path))


def test_a_file_name_that_is_no_plain_name_becomes_one(job_file):
    assert load_job(str(job_file(name="my first job!.toml")), imports=False).job == "my-first-job"


def test_what_no_job_can_be_is_refused_unread(tmp_path):
    large, pipe = tmp_path / "large.toml", tmp_path / "pipe.toml"
    with large.open("wb") as file:
        file.truncate(50 << 30)
    os.mkfifo(pipe)
    assert "it has 53,687,091,200 bytes, and no job is larger than 1,048,576" in message(load_job, str(large))
    for endless in (pipe, "/dev/zero"):
        assert "it is not a regular file" in message(load_job, str(endless))


def test_a_file_in_the_current_folder_does_not_hide_a_built_in_job(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("digits").write_text("nonsense")
    assert find_job("digits").built_in
    assert not find_job("./digits").built_in


def test_none_leaves_a_setting_or_an_argument_out(load):
    config = load(
        "optimizer.momentum=0.9", "optimizer.momentum=none", "training.clip_norm=none", "training.epochs=none"
    )
    assert config.optimizer.args == {"lr": 0.1}
    assert (config.training.clip_norm, config.training.epochs) == (None, 10)
    assert load('optimizer.name="none"').optimizer.args["name"] == "none"


@pytest.mark.parametrize(
    ("option", "expected"),
    [
        (
            "optimizer.momentun=none",
            "optimizer.momentun is not in the job, so there is nothing to leave out.",
        ),
        ("training.epoch=none", "training.epoch is not a known setting. Did you mean 'epochs'?"),
        ("training.lr=none", "training.lr is not a known setting. Did you mean 'optimizer.lr'?"),
        ("model=none", "model is missing: a job needs a table [model]"),
    ],
)
def test_what_cannot_be_left_out_is_said(load, option, expected):
    assert f"--set {option}: {expected}" in message(load, option)


def test_set_reads_toml_values_and_bare_texts():
    assert toml_value("0.1") == 0.1
    assert toml_value("[1, 2]") == [1, 2]
    assert toml_value('{ a = "b" }') == {"a": "b"}
    assert toml_value("bf16") == "bf16"
    assert toml_value("1\nother = 2") == "1\nother = 2"
    assert parse_set("optimizer.lr = 3").path == ("optimizer", "lr")


@pytest.mark.parametrize("text", ["", "a", "=3", "a..b=3", ".=1"])
def test_set_without_a_key_and_a_value_is_refused(text):
    assert "--set optimizer.lr=0.1" in message(parse_set, text)


def test_overrides_win_over_the_file_and_later_ones_over_earlier_ones(load):
    config = load("optimizer.lr=0.5", "optimizer.lr=0.25", "run.devices=2", "schedule.kind=cosine")
    assert config.optimizer.args["lr"] == 0.25
    assert config.run.devices == 2
    assert config.schedule.kind == "cosine"


def test_an_item_of_a_list_can_be_set_by_its_number(load):
    config = load("data.train.sizes=[1, 2]", "data.train.sizes.1=5")
    assert config.data.train.args["sizes"] == [1, 5]
    assert "sizes is a list of 2" in message(load, "data.train.sizes=[1, 2]", "data.train.sizes.7=5")


def test_the_data_folder_is_filled_in_and_the_seed_given_once(load, tmp_path):
    config = load(f"data.root={tmp_path}", "data.train.root={data}/train", "data.train.seed={seed}", "training.seed=7")
    assert config.data.train.args == {"root": f"{tmp_path}/train", "seed": 7}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (["data.train.root={data}"], "Give it with --data DIR"),
        (["data.root=."], "no argument of job 'work' uses it as '{data}'"),
        (["data.root=.", "data.train.root={data}/../x"], "leaves the data folder"),
        (["data.train.root={dta}"], "Did you mean 'data'?"),
        (["data.train.steps={steps}"], "unknown placeholder"),
    ],
)
def test_placeholders_that_cannot_be_filled_are_named(load, options, expected):
    assert expected in message(load, *options)


def test_a_scheduler_of_torch_may_ask_for_the_number_of_steps(load):
    config = load("schedule.target=torch.optim.lr_scheduler:OneCycleLR", "schedule.total_steps={steps}")
    assert config.schedule.args["total_steps"] == "{steps}"


def test_relative_paths_start_at_the_job_file_or_at_the_command_line(job_file, tmp_path, monkeypatch):
    job_folder, current = tmp_path / "jobs", tmp_path / "current"
    for folder in (job_folder, current):
        folder.mkdir()
        (folder / "start.safetensors").touch()
    path = job_file(job_file().read_text() + '[weights]\npath = "start.safetensors"\n', name="jobs/own.toml")
    monkeypatch.chdir(current)
    in_file = load_job(str(path), imports=False)
    assert in_file.weights.path == str(job_folder / "start.safetensors")
    on_line = Override(path=("weights", "path"), value="start.safetensors", origin="--set")
    assert load_job(str(path), [on_line], imports=False).weights.path == str(current / "start.safetensors")
    assert in_file.code == (str(job_folder), str(current))
    text = path.read_text()
    path.write_text(f'code = ["lib"]\n{text}')  # it was taken, and not searched
    assert load_job(str(path), imports=False).code == (str(job_folder / "lib"), str(job_folder), str(current))


def test_a_loaded_job_travels_to_the_ranks_unchanged(load, tmp_path):
    config = load(f"data.root={tmp_path}", "data.train.root={data}", "weights.freeze=['*', '!fc']")
    assert type(config).from_json(config.to_json()) == config


@pytest.mark.parametrize("name", built_in_jobs())
def test_built_in_jobs_are_sound(name, tmp_path):
    needs_folder = name != "digits"
    given = [Override(path=("data", "root"), value=str(tmp_path), origin="--data")] if needs_folder else []
    config = load_job(name, given)
    assert config.job == name
    assert config.data.validation is not None
