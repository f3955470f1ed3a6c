"""Targets are sent to the ranks as JSON, and what cannot be sent is refused before anything starts."""

import json
import textwrap
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.launch.targets import EntryTarget, FunctionTarget, ScriptTarget, from_json, to_json


@pytest.mark.parametrize(
    "target",
    [
        ScriptTarget(path=__file__, arguments=("--lr", "0.1")),
        EntryTarget(entry="json:dumps", payload={"a": [1, None]}),
        FunctionTarget.from_function(textwrap.dedent, ("  x",), {}),
    ],
    ids=lambda target: type(target).__name__,
)
def test_a_target_is_equal_after_json(target):
    assert from_json(json.loads(json.dumps(to_json(target)))) == target


@pytest.mark.skipif(not Path("/proc/self/environ").is_file(), reason="there is no /proc here")
def test_a_script_that_a_process_is_given_is_no_file_of_every_rank():
    """Of ``lockstep run /dev/stdin < train.py`` rank 0 alone read anything, and waited a minute for the others."""
    with pytest.raises(ConfigError, match="'/proc/self/environ' is not a file"):
        ScriptTarget(path="/proc/self/environ")


def test_a_script_must_be_a_file(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.py' is not a file\. Check the path\."):
        ScriptTarget(path=str(tmp_path / "absent.py"))
    (tmp_path / "present.py").touch()
    with pytest.raises(ConfigError, match=r"presnt\.py' is not a file\. Did you mean '.*/present\.py'\?"):
        ScriptTarget(path=str(tmp_path / "presnt.py"))
    with pytest.raises(ConfigError, match=r"'python3' is not a file\. Leave that word out"):
        ScriptTarget(path="python3", arguments=("train.py",))


@pytest.mark.skipif(not Path("/proc/self/mem").is_file(), reason="there is no /proc here")
def test_a_script_that_cannot_be_read_is_refused_before_a_rank_starts(tmp_path):
    """``verify --script`` ended with a traceback of a rank. This file is one that root cannot read either."""
    (tmp_path / "train.py").symlink_to("/proc/self/mem")
    with pytest.raises(OSError, match="Input/output error"):
        ScriptTarget(path=str(tmp_path / "train.py"))


@pytest.mark.parametrize(("name", "content"), [("train.pyc", b"\xa7\r\r\n\0"), ("train.ipynb", b"{}")])
def test_a_script_must_be_python_source(tmp_path, name, content):
    """A notebook without cells ran as an expression and ended well, others in NameError: name 'null' is not defined."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=f"{name}' is not Python source. A notebook becomes a script by jupyter"):
        ScriptTarget(path=str(tmp_path / name))


def test_a_job_is_no_script(tmp_path):
    """Its first table ended in NameError: name 'model' is not defined."""
    (tmp_path / "job.toml").write_text("[model]\n")
    with pytest.raises(
        ConfigError, match=r"job\.toml' is a job, not a script. To train it: lockstep train '.*/job\.toml'"
    ):
        ScriptTarget(path=str(tmp_path / "job.toml"))


def test_a_lambda_is_refused():
    with pytest.raises(ConfigError, match="top level of a file, not a lambda"):
        FunctionTarget.from_function(lambda: 1, (), {})


def test_arguments_that_cannot_be_pickled_are_refused():
    with pytest.raises(ConfigError, match="arguments for dedent cannot be sent"):
        FunctionTarget.from_function(textwrap.dedent, (lambda: 1,), {})


@pytest.mark.parametrize(("words", "said"), [(["-m"], "needs the name"), (["-m", "absent.train"], "no module")])
def test_a_module_that_is_not_there_is_refused(words, said):
    with pytest.raises(ConfigError, match=said):
        ScriptTarget.from_words(words)


def test_a_package_is_run_by_its_main_module(tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "__main__.py").touch()
    monkeypatch.chdir(tmp_path)
    target = ScriptTarget.from_words(["-m", "package", "--lr", "1"])
    assert (target.module, target.arguments) == ("package.__main__", ("--lr", "1"))
