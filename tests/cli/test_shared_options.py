"""Options that several commands share: jobs, a debugger and a profile; ``tests/launch/hosts`` has those of hosts."""

import argparse
import platform
from importlib.metadata import version

import pytest

from lockstep.cli.shared_options import (
    add_launch_arguments,
    add_train_options,
    common_settings,
    debug_setting,
    write_file,
)
from lockstep.errors import ConfigError


@pytest.fixture
def parse():
    parser = argparse.ArgumentParser()
    add_launch_arguments(parser)
    add_train_options(parser, "data", "threads")
    return lambda *words: parser.parse_args(words)


def test_settings_are_collected_and_options_of_train_are_texts(parse):
    given = parse("--set", "a.b=1", "--set", "c=2", "--threads", "3")
    assert (given.set, given.threads, given.data) == (["a.b=1", "c=2"], "3", None)
    assert parse().set == []


def test_a_profile_without_steps_has_the_usual_ones(parse):
    assert (parse().profile, parse("--profile").profile) == ("", "10:5")
    assert parse("--profile", "3:2").profile == "3:2"
    with pytest.raises(ConfigError):
        parse("--profile", "first")


def test_hosts_compare_the_debugged_rank_versions_and_what_the_command_adds(parse):
    assert debug_setting(parse()) == ("debug-rank", "none")
    settings = common_settings("cpu", [debug_setting(parse("--debug-rank", "1")), ("threads", "2")])
    assert settings["debug-rank"] == "1"
    assert settings["threads"] == "2"
    assert settings["devices"] == "cpu"
    assert settings["torch"] == version("torch")
    assert platform.python_version().startswith(settings["python"] + ".")


def test_a_file_has_names_with_the_bytes_of_the_disk(tmp_path):
    """A class whose folder is named in Latin-1 ended ``report`` and ``compare`` with a traceback."""
    write_file(tmp_path / "page.html", "caf\udce9, Größe")
    assert (tmp_path / "page.html").read_bytes() == b"caf\xe9, Gr\xc3\xb6\xc3\x9fe"
