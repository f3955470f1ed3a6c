"""The sources of the hosts' secret, and texts that are refused as one."""

import pwd

import pytest

from lockstep.distributed.authentication import read_token
from lockstep.errors import ConfigError

TOKEN = "0123456789abcdef" * 4


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "token"
    path.touch(0o600)
    path.write_text(f"{TOKEN}\n")
    return path


def test_the_file_that_was_asked_for_comes_before_the_variable(file):
    assert read_token(str(file), {"LOCKSTEP_TOKEN": "x" * 40}) == TOKEN.encode()


def test_the_variable_comes_before_the_default_file():
    assert read_token("", {"LOCKSTEP_TOKEN": TOKEN}) == TOKEN.encode()


def test_the_default_file_is_in_the_home_folder(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    place = tmp_path / ".config" / "lockstep"
    place.mkdir(parents=True)
    file.rename(place / "token")
    assert read_token("", {}) == TOKEN.encode()


def test_the_configuration_folder_of_the_user_comes_before_the_home_folder(file, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "settings" / "lockstep").mkdir(parents=True)
    file.rename(tmp_path / "settings" / "lockstep" / "token")
    assert read_token("", {"XDG_CONFIG_HOME": str(tmp_path / "settings")}) == TOKEN.encode()
    with pytest.raises(ConfigError, match=f"openssl rand -hex 32 > {tmp_path}/other/lockstep/token"):
        read_token("", {"XDG_CONFIG_HOME": str(tmp_path / "other")})


def test_without_a_token_the_way_to_make_one_is_told(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError, match=r"openssl rand -hex 32 > ~/\.config/lockstep/token"):
        read_token("", {})


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660])
def test_a_file_that_others_may_read_is_refused(file, mode):
    file.chmod(mode)
    with pytest.raises(ConfigError, match=f"has mode 0{mode:o}, so other users may read it. Run `chmod 600 {file}`"):
        read_token(str(file), {})


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_token(str(tmp_path / "none"), {})


@pytest.mark.parametrize("text", ["", "short", "a" * 31, "two words " * 5, "a" * 513])
def test_what_could_be_guessed_or_mistyped_is_refused(text):
    with pytest.raises(ConfigError, match=r"LOCKSTEP_TOKEN has \d+ characters; it must be one line of 32 to 512"):
        read_token("", {"LOCKSTEP_TOKEN": text})


@pytest.mark.fault("T7")
def test_a_user_without_a_home_is_told_how_to_give_a_token(monkeypatch):
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr(pwd, "getpwuid", {}.__getitem__)
    with pytest.raises(ConfigError, match="give --token-file FILE or LOCKSTEP_TOKEN"):
        read_token("", {})
