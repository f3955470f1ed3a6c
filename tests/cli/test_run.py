import argparse
import os
import sys

import pytest

from lockstep.cli import run
from lockstep.errors import ConfigError


def parse(*words):
    parser = argparse.ArgumentParser()
    run.add_arguments(parser)
    return parser.parse_args(words)


def test_what_follows_the_script_belongs_to_the_script():
    given = parse("--devices", "cpu:2", "train.py", "--devices", "7", "--lr", "0.1")
    assert (given.devices, given.script, given.arguments) == (
        "cpu:2",
        "train.py",
        ["--devices", "7", "--lr", "0.1"],
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["absent.py"], "script 'absent.py' is not a file"),
        (["--devices", "many", "{script}"], "devices should be a number, 'auto'"),
        (["--threads", "0", "{script}"], "threads should be at least 1 and at most 4096 and is 0"),
        (["--grace", "-1", "{script}"], "grace should be at least 0 and at most 1,000,000,000 and is -1"),
    ],
)
def test_a_mistake_is_refused_before_anything_starts(words, message, tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    with pytest.raises(ConfigError, match=message):
        run.main(parse(*[word.format(script=script) for word in words]))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("line", "modules"),
    [
        ("import torch", ()),
        ("import lockstep", ("lockstep.run",)),
        ("model = torch.compile(model)", ("torch._dynamo",)),
        ("import lockstep; DistributedDataParallel(model)", ("lockstep.run", "torch._dynamo")),
    ],
)
def test_what_every_rank_would_import_is_imported_once(line, modules, tmp_path, monkeypatch):
    script, seen = tmp_path / "train.py", []
    script.write_text(line)
    monkeypatch.setattr(run, "supervise", lambda target, options, joined: seen.append(options) or 0)
    assert run.main(parse("--devices", "cpu:1", str(script))) == 0
    assert seen[0].preload == modules


@pytest.mark.parametrize(
    ("text", "words", "told"),
    [
        ("import torch", ("--devices", "cpu:2"), True),
        ("import torch", ("--devices=cpu:2",), True),
        ("import torch", ("--lr", "0.1"), False),
        ('"""lockstep run --devices 2 train.py"""\nimport torch', ("--devices", "cpu:2"), True),
        ("parser.add_argument('--devices')", ("--devices", "cpu:2"), False),
        ("class Options:\n    stall_limit: int", ("--stall-limit", "2"), False),
    ],
)
def test_options_behind_a_script_that_does_not_mention_them_are_told(text, words, told, tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    script.write_text(text)
    monkeypatch.setattr(run, "supervise", lambda target, options, joined: 0)
    assert run.main(parse(str(script), *words)) == 0
    heard = capsys.readouterr().err
    assert ("comes after" in heard and f"lockstep run {words[0].partition('=')[0]} ..." in heard) == told


def joined(monkeypatch, *words):
    """The exit status of ``lockstep run`` in a rank of another launcher, which it ends."""
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])
    monkeypatch.setattr(sys, "argv", list(sys.argv))
    monkeypatch.setattr(run, "arm_future_children", lambda: None)  # it would stay for the whole test process
    monkeypatch.setattr(run, "end_process", sys.exit)
    with pytest.raises(SystemExit) as ended:
        run.main(parse(*map(str, words)))
    return ended.value.code


def test_a_script_runs_in_the_rank_that_another_launcher_started(tmp_path, monkeypatch, capsys):
    script = tmp_path / "train.py"
    script.write_text("import sys, os\nprint(__name__, sys.argv[1:], os.getpid())")
    for name, value in (("RANK", "1"), ("WORLD_SIZE", "2"), ("LOCAL_RANK", "1"), ("LOCAL_WORLD_SIZE", "2")):
        monkeypatch.setenv(name, value)
    assert joined(monkeypatch, script, "--lr", "1") == 0
    assert capsys.readouterr().out == f"__main__ ['--lr', '1'] {os.getpid()}\n"


def test_the_local_rank_of_torchs_former_launcher_is_the_scripts(command, tmp_path, monkeypatch):
    script, seen = tmp_path / "train.py", []
    script.write_text("")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(run, "supervise", lambda target, options, joined: seen.append(target) or 0)
    assert command("--local-rank=1", "run", "--devices", "cpu:1", str(script), "--lr", "1")[0] == 0
    assert seen[0].arguments == ("--local-rank=1", "--lr", "1")


def test_the_steps_of_a_timeline_reach_the_ranks_of_any_launcher(tmp_path, monkeypatch, capsys):
    script, seen = tmp_path / "train.py", []
    script.write_text("import os\nprint(os.environ['LOCKSTEP_PROFILE'])")
    monkeypatch.setattr(run, "supervise", lambda target, options, joined: seen.append(options) or 0)
    assert run.main(parse("--devices", "cpu:1", "--profile", "3:2", str(script))) == 0
    assert seen[0].profile == "3:2"
    for name, value in (("RANK", "0"), ("WORLD_SIZE", "1"), ("LOCAL_RANK", "0"), ("LOCKSTEP_PROFILE", "")):
        monkeypatch.setenv(name, value)
    assert joined(monkeypatch, "--profile", "3:2", script) == 0
    assert capsys.readouterr().out == "3:2\n"


def test_a_command_without_a_script_asks_for_no_more_than_that(command):
    status, _, errors = command("run", "--devices", "2")
    assert status == 2
    assert "The following arguments are required: SCRIPT. See 'lockstep run --help'." in errors
