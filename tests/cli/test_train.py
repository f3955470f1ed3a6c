"""``lockstep train``: options become settings, and nothing starts before all is checked."""

import argparse
import shlex
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from lockstep.cli import main, shared_options, train
from lockstep.config.job_file import BUILT_IN_JOBS, load_job, parse_set
from lockstep.job import JobConfig
from lockstep.job.run_folder import one_recipe


@pytest.fixture
def started(monkeypatch):
    """Keeps what would be started in a list, in place of starting it."""
    orders = []
    monkeypatch.setattr(train, "supervise", lambda target, options, joined: orders.append((target, options)) or 0)
    return orders


def test_options_become_settings_and_win_over_set(command, started):
    # Fmt: skip
    status, _, errors = command(
        "train",
        "digits",
        "--devices",
        "cpu:3",
        "--strategy",
        "ddp",
        "--precision",
        "bf16",
        "--epochs",
        "4",
        "--threads",
        "2",
        "--set",
        "optimizer.lr=0.5",
        "--set",
        "training.epochs=9",
    )
    assert (status, errors) == (0, "")
    (target, options) = started[0]
    config = JobConfig.from_json(target.payload["config"])
    assert target.entry == "lockstep.job.rank:main"
    assert (config.training.epochs, config.training.precision, config.run.threads) == (4, "bf16", 2)
    assert config.optimizer.args["lr"] == 0.5
    assert options.devices.names == ("cpu",) * 3
    assert options.threads == 2
    assert Path(config.run.directory, config.run.name) == Path("runs/digits-001")
    assert Path("runs/digits-001").is_dir()


@pytest.mark.parametrize(
    ("devices", "layout"),
    [
        ("cpu:4", ("--strategy", "ddp")),
        ("cpu:2", ("--strategy", "ddp")),
        ("cpu:3", ("--strategy", "hybrid", "--mesh", "data=3,pipeline=2")),
        ("cpu:4", ("--strategy", "hybrid", "--mesh", "data=3,pipeline=2")),
        ("cpu:2", ("--strategy", "hybrid", "--mesh", "data=3,pipeline=2")),
    ],
)
def test_only_all_hosts_together_must_have_the_devices_of_the_job(
    command, started, monkeypatch, tmp_path, devices, layout
):
    """A host of 4 took the other for one of 4 too, so that 4 + 2 devices could not share six micro-batches."""
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("t" * 40)
    arguments = (
        *("train", *layout, "--devices", devices, "--set", "training.micro_batches=6"),
        *("--set", "training.global_batch=96", "--nnodes", "2", "--node-rank", "1"),
        *("--master", "127.0.0.1:5", "--token-file", str(token)),
    )
    decided, world_size = [], 6

    @contextmanager
    def join_hosts(hosts, *, ranks, settings, decide):
        decided.append(decide(world_size))
        yield SimpleNamespace(shared=decided[-1], layout=SimpleNamespace(world_size=world_size), node=1)

    monkeypatch.setattr(shared_options, "join_hosts", join_hosts)
    assert command(*arguments)[::2] == (0, "")
    assert started[0][1].devices.count == int(devices[-1])
    world_size = 8
    status, _, errors = command(*arguments)
    assert (status, len(started)) == (2, 1)
    assert "8 devices cannot share micro_batches=6" in errors or "takes 6 processes and 8 were started" in errors


def test_the_default_job_is_digits_on_two_devices(command, started):
    assert command("train")[0] == 0
    target, options = started[0]
    assert JobConfig.from_json(target.payload["config"]).job == "digits"
    assert options.devices.count == 2


def test_a_run_that_is_resumed_goes_on_in_its_folder(command, started):
    command("train")
    Path("runs/digits-001/step-00000010").mkdir()
    command("train", "--resume", "auto")
    config = JobConfig.from_json(started[1][0].payload["config"])
    assert (config.run.name, config.checkpoint.resume) == ("digits-001", "auto")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("digist",), "Did you mean 'digits'?"),
        (
            ("--set", "optimizer.lrr=1"),
            "optimizer.lrr is not an argument of torch.optim:SGD. Did you mean 'lr'?",
        ),
        (("--set", "training.epohcs=1"), "Did you mean 'epochs'?"),
        (("--epochs", "many"), "--epochs many: training.epochs should be an integer and is 'many'."),
        (("--strategy", "fspd"), "training.strategy 'fspd' is not known. Did you mean 'fsdp'?"),
        (("--precision", "fp61"), "Did you mean 'fp16'?"),
        (("--devices", "9"), "9 devices cannot share micro_batches=8"),
        (("--devices", "cpu:2", "--strategy", "single"), "strategy 'single' uses one"),
        (("--resume", "nowhere"), "which does not exist"),
        (("--data", "."), "no argument of job 'digits' uses it"),
        (("flowers",), "Give it with --data DIR"),
        (("flowers", "--data", "nowhere"), "does not exist"),
        (("--set", "model.target=lockstep.models:digit_net"), "Did you mean 'digits_net'?"),
        (("--set", "optimizer.lr"), "--set optimizer.lr=0.1"),
    ],
)
@pytest.mark.fault("S6", "M8")
def test_mistakes_end_with_status_two_and_nothing_is_started_or_written(command, started, arguments, expected):
    status, output, errors = command("train", *arguments)
    assert (status, output) == (2, "")
    assert expected in errors
    assert not started
    assert not list(Path().iterdir())


def test_single_uses_one_device_of_those_that_auto_finds(command, started):
    command("train", "--strategy", "single", "--devices", "cpu")
    assert started[0][1].devices.count == 1


def test_a_mistake_on_the_real_command_line(process):
    result = process("train", "digits", "--epohcs", "3")
    assert result.returncode == 2
    assert result.stdout == ""
    assert result.stderr.startswith("lockstep: --epohcs is not an argument")


NAMED = (BUILT_IN_JOBS / "digits.toml").read_text().replace("[run]", '[run]\nname = "mine"')
NAMED += '[checkpoint]\nresume = "auto"\n'


@pytest.mark.parametrize(
    ("words", "proof"),
    [
        ("digits --devices cpu:4", "digits --strategy ddp --devices cpu:1"),
        ("digits --devices cpu:1", "digits --strategy ddp --devices cpu:2"),
        ("--profile 3:2 digits --devices cpu:1", "digits --strategy ddp --devices cpu:2"),
        ("digits --debug-rank 1 --debug-port=0 --devices cpu:2", "digits --strategy ddp --devices cpu:1"),
        ("digits --strategy single --devices cpu:1", "digits --strategy ddp --devices cpu:2"),
        ("digits --strategy=fsdp --devices cpu:2", "digits --strategy single --devices cpu:1"),
        (
            "digits --strategy hybrid --mesh data=2,layers=2 --devices=cpu:4 --resume auto --epochs 3",
            "digits --epochs 3 --strategy single --devices cpu:1",
        ),
        (
            "digits --set run.name=digits-7 --resume auto --set optimizer.lr=0.2 --devices cpu:2",
            "digits --set optimizer.lr=0.2 --strategy ddp --devices cpu:1",
        ),
        (
            "digits --per-device-batch 64 --devices cpu:4",
            "digits --set training.global_batch=256 --strategy ddp --devices cpu:1",
        ),
        (
            "named.toml --devices cpu:2",
            "named.toml --set run.name= --set checkpoint.resume= --strategy ddp --devices cpu:1",
        ),
        (
            "digits --set training.micro_batches=1 --set training.global_batch=64 --devices cpu:1",
            "digits --set training.micro_batches=1 --set training.global_batch=64 --strategy single --devices cpu:1",
        ),
    ],
)
def test_the_proof_starts_as_it_stands_with_the_same_recipe(command, started, tmp_path, words, proof):
    (tmp_path / "named.toml").write_text(NAMED)
    status, _, errors = command("train", *words.split())
    shown = "lockstep: 4 devices x 64 samples" if "--per-device-batch" in words else ""
    if "--resume auto" in words or "named.toml" in words:
        shown = "lockstep: nothing to resume: no run of this job in"
    assert (status, errors[: len(shown) or None]) == (0, shown)
    payload = started[0][0].payload
    assert payload["proof"] == f"lockstep train {proof}"
    status, _, errors = command(*shlex.split(payload["proof"])[1:])
    assert (status, errors) == (0, "")
    jobs = [JobConfig.from_json(target.payload["config"]) for target, _ in started]
    assert one_recipe([SimpleNamespace(step=0, job=job) for job in jobs])
    assert jobs[0].run != jobs[1].run


def test_a_batch_per_device_makes_the_global_batch_and_says_what_scripts_do_with_the_learning_rate(command, started):
    status, output, errors = command("train", "--per-device-batch", "64", "--devices", "cpu:4")
    assert (status, output) == (0, "")
    assert JobConfig.from_json(started[0][0].payload["config"]).training.global_batch == 256
    assert errors == (
        "lockstep: 4 devices x 64 samples = training.global_batch 256; optimizer.lr stays 0.1, where a script with "
        "lr *= world_size has 0.4. The same on any number of devices: --set training.global_batch=256 "
        "--set optimizer.lr=0.1.\n"
    )


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("--per-device-batch 0 --devices cpu:2", "--per-device-batch is 0, and must be at least 1."),
        ("--per-device-batch 5 --devices cpu:3", "global_batch is 15, which micro_batches=8 does not divide"),
    ],
)
def test_a_batch_per_device_that_cannot_be_divided_starts_nothing(command, started, words, expected):
    status, _, errors = command("train", *words.split())
    assert status == 2
    assert expected in errors
    assert not started


def test_only_the_devices_that_share_the_batch_count_for_it(command, started):
    words = "--per-device-batch 64 --devices cpu:4 --strategy hybrid --mesh data=2,pipeline=2"
    status, _, errors = command("train", *words.split())
    assert status == 0
    assert errors.startswith("lockstep: 2 data-parallel replicas x 64 samples = training.global_batch 128; "), (
        "there are four devices"
    )
    assert JobConfig.from_json(started[0][0].payload["config"]).training.global_batch == 128


@pytest.mark.parametrize(
    ("gpus", "ranks", "place"),
    [
        (("0", "1"), 1, "--strategy ddp --devices 2"),
        (("0",), 1, "--strategy single --devices 1"),
        (("0", "1"), 2, "--strategy ddp --devices 1"),
    ],
)
def test_the_proof_asks_for_no_gpu_that_the_host_has_not(monkeypatch, gpus, ranks, place):
    monkeypatch.setattr(train, "visible_gpus", lambda: gpus)
    given = dict.fromkeys(("data", "precision", "epochs", "threads", "per_device_batch"))
    arguments = argparse.Namespace(job="digits", set=[], portable=False, **given)
    found = train.proof(load_job("digits", [parse_set("run.devices=auto")]), arguments, ranks, "cuda")
    assert found == f"lockstep train digits {place}"


def test_the_proof_of_a_named_run_asks_for_another_layout_too(tmp_path, monkeypatch):
    """The folder of the run, which exists by then, was taken for a reason against two devices."""
    monkeypatch.chdir(tmp_path)
    given = dict.fromkeys(("data", "precision", "epochs", "threads", "per_device_batch"))
    arguments = argparse.Namespace(job="digits", set=["run.name=a"], portable=False, **given)
    config = load_job("digits", [parse_set("run.name=a")])
    (tmp_path / "runs" / "a").mkdir(parents=True)
    assert train.proof(config, arguments, 1, "cpu") == "lockstep train digits --strategy ddp --devices cpu:2"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--devices", "cpu:2"), "--devices cpu:2 was given with --ray. Give a number of workers, such as 4"),
        (("--devices", "0"), "--devices 0 was given with --ray."),
        (("--devices", "1-9"), "micro_batches=8"),
        (("--nnodes", "2"), "--nnodes was given with --ray, which has none."),
        (("--profile",), "--profile was given with --ray"),
        (("--set", "run.directory=s3://bucket/runs"), "Give the run a name: --set run.name=NAME."),
        (("--epochs", "0"), "training.epochs"),
    ],
)
def test_what_ray_cannot_do_is_refused_before_it_starts(capsys, tmp_path, monkeypatch, words, said):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "digits", *words, "--ray"]) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


def test_without_ray_the_package_to_install_is_named(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "ray", None)
    assert main(["train", "digits", "--devices", "1-4", "--ray", "10.0.0.1:6379"]) == 2
    assert "pip install 'lockstep-train[ray]'" in capsys.readouterr().err
