"""The secret that the hosts of one run share: read from where the user keeps it, never shown."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Mapping
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.launch.options import TOKEN_VARIABLE

DEFAULT_FILE = "~/.config/lockstep/token"
_TOKEN = re.compile(r"[!-~]{32,512}")
_LARGEST_FILE = 4096


def read_token(file: str, environment: Mapping[str, str]) -> bytes:
    """The token of ``file``, else of ``LOCKSTEP_TOKEN``, else of ``~/.config/lockstep/token``.

    Raises:
        ConfigError: there is none, it is too short, or others may read its file.
    """
    if file:
        return _checked(_from_file(Path(file).expanduser()), file)
    if TOKEN_VARIABLE in environment:
        return _checked(environment[TOKEN_VARIABLE], TOKEN_VARIABLE)
    default = Path(DEFAULT_FILE).expanduser()
    if default.exists():
        return _checked(_from_file(default), str(default))
    raise ConfigError(
        "Several hosts were asked for, and they have no token by which to know each other. "
        f"{how_to_make_one(DEFAULT_FILE)}"
    )


def how_to_make_one(file: str) -> str:
    """What to do, in one sentence."""
    return (
        f"Make one with `mkdir -p $(dirname {file}) && (umask 077; openssl rand -hex 32 > {file})` and copy the "
        f"file to every host, or give --token-file FILE or {TOKEN_VARIABLE}."
    )


def _from_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_LARGEST_FILE)
    except OSError as error:
        raise ConfigError(
            f"The token file '{path}' cannot be read: {error.strerror}. {how_to_make_one(str(path))}"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"The token file '{path}' has mode {stat.S_IMODE(mode):04o}, so others may read it. "
            f"Run `chmod 600 {path}`, and make a new token if others use this host."
        )
    return content.decode(errors="replace")


def _checked(text: str, origin: str) -> bytes:
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"The token of {origin} has {len(token)} characters; it is one line of 32 to 512 without blanks, "
            "as `openssl rand -hex 32` gives."
        )
    return token.encode()
