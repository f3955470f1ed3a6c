"""Mutual proof that both ends of a connection hold the same secret; the secret itself never travels.

    both   a fresh nonce
    both   HMAC-SHA256(secret, own role, own nonce, the other's nonce)

Each end has its own role, so a message cannot be reflected to its sender. Until the other end is authenticated, the
length of its messages is limited, and a message that cannot be parsed is refused. ``read_token`` reads the secret that
the supervisors of several hosts share. Ranks never see it: they get a key that is derived from it for this run alone.
"""

from __future__ import annotations

import hmac
import json
import os
import re
import secrets
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lockstep.config.checks import file_path
from lockstep.errors import ConfigError, LockstepError

NONCE_BYTES = 32
PROOF_BYTES = 32
LONGEST_GREETING = 1024
"""Maximum bytes of a message before authentication."""


class Refused(LockstepError):
    """A message that is invalid, too large, or from a sender that does not know the secret."""


class Handshake:
    """One end of the proof; ``other`` is the role of the other end."""

    def __init__(self, secret: bytes, role: str, other: str) -> None:
        self._secret, self._role, self._other = secret, role.encode(), other.encode()
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        """Sent to the other end first."""

    def proof(self, nonce: bytes) -> bytes:
        """Returns this end's proof, for the nonce of the other."""
        return sign(self._secret, b"proof", self._role, self.nonce, nonce)

    def accepts(self, nonce: bytes, proof: bytes) -> bool:
        """Checks the other end's proof; ``nonce`` is the one that it sent."""
        return hmac.compare_digest(proof, sign(self._secret, b"proof", self._other, nonce, self.nonce))

    def session_key(self, nonce: bytes) -> bytes:
        """Returns the key of this connection, the same on both ends."""
        ends = sorted([(self._role, self.nonce), (self._other, nonce)])
        return sign(self._secret, b"session", *(part for end in ends for part in end))


Part = bytes | bytearray | memoryview


def sign(key: bytes, *parts: Part) -> bytes:
    """Returns the HMAC-SHA256 of parts and of their lengths."""
    mac = hmac.new(key, digestmod="sha256")
    for part in parts:
        mac.update(len(part).to_bytes(8, "big"))
        mac.update(part)
    return mac.digest()


class Seal:
    """Signs the messages of one connection and checks those of the other end, each with its number.

    ``key`` is ``Handshake.session_key``; ``other`` is the role of the other end.
    """

    def __init__(self, key: bytes, role: str, other: str) -> None:
        self._key, self._role, self._other = key, role.encode(), other.encode()
        self._sent = self._checked = 0

    def sign(self, *parts: Part) -> bytes:
        """Returns the signature of this end's next message."""
        signature = sign(self._key, self._role, str(self._sent).encode(), *parts)
        self._sent += 1
        return signature

    def check(self, signature: Part, *parts: Part) -> None:
        """Raises ``Refused`` unless this is the signature of the other end's next message."""
        expected = sign(self._key, self._other, str(self._checked).encode(), *parts)
        self._checked += 1
        if not hmac.compare_digest(signature, expected):
            raise Refused("a message failed authentication")


_KEY_FILE = "rank-key"


TOKEN_VARIABLE = "LOCKSTEP_TOKEN"
"""Holds the secret of the supervisors of several hosts; not passed on to ranks."""
_TOKEN = re.compile(r"[!-~]{32,512}")
_LARGEST_FILE = 4096


def read_token(file: str, environment: Mapping[str, str]) -> bytes:
    """Reads the token from ``file``, else from ``LOCKSTEP_TOKEN``, else from the user's configuration folder.

    That is ``$XDG_CONFIG_HOME/lockstep/token`` or ``~/.config/lockstep/token``. ``ConfigError`` if there is none, it is
    too short, or others may read its file.
    """
    if file:
        if problem := file_path(file):
            raise ConfigError(f"--token-file {problem}")
        return _checked(_from_file(Path(file).expanduser()), file)
    if TOKEN_VARIABLE in environment:
        return _checked(environment[TOKEN_VARIABLE], TOKEN_VARIABLE)
    default = f"{environment.get('XDG_CONFIG_HOME') or '~/.config'}/lockstep/token"
    with suppress(RuntimeError):  # the user has no home
        if Path(default).expanduser().exists():
            return _checked(_from_file(Path(default).expanduser()), default)
    raise ConfigError(
        f"Several hosts need a shared token to authenticate each other, and none was found. {_how_to_make_one(default)}"
    )


def _how_to_make_one(file: str) -> str:
    """Returns the sentence that says how to make a token file."""
    return (
        f"Make one with `mkdir -p {Path(file).parent} && (umask 077; openssl rand -hex 32 > {file})` and copy the "
        f"file to every host, or give --token-file FILE or {TOKEN_VARIABLE}."
    )


def _from_file(path: Path) -> str:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode
            content = file.read(_LARGEST_FILE)
    except OSError as error:
        raise ConfigError(
            f"The token file '{path}' cannot be read: {error.strerror}. {_how_to_make_one(str(path))}"
        ) from error
    if stat.S_IMODE(mode) & 0o077:
        raise ConfigError(
            f"The token file '{path}' has mode {stat.S_IMODE(mode):04o}, so other users may read it. "
            f"Run `chmod 600 {path}`, and make a new token if other users have access to this host."
        )
    return content.decode(errors="replace")


def _checked(text: str, origin: str) -> bytes:
    token = text.strip()
    if not _TOKEN.fullmatch(token):
        raise ConfigError(
            f"The token of {origin} has {len(token)} characters; it must be one line of 32 to 512 without "
            "spaces, as `openssl rand -hex 32` prints."
        )
    return token.encode()


def write_rank_key(directory: Path, token: bytes, run_id: str) -> None:
    """Derives the key of a run's ranks from the token of the hosts and puts it into the private run directory."""
    file = directory / _KEY_FILE
    file.touch(0o600)
    file.write_bytes(sign(token, b"ranks", run_id.encode()))


def read_rank_key(run_directory: str) -> bytes:
    """Returns the key of this run's ranks, the same on all hosts; empty if no supervisor has given one."""
    file = Path(run_directory) / _KEY_FILE
    return file.read_bytes() if run_directory and file.exists() else b""


def parse_object(data: bytes | bytearray) -> dict[str, Any]:
    """Parses the JSON object in a message before authentication; raises ``Refused`` for anything else."""
    if len(data) > LONGEST_GREETING:
        raise Refused(f"a first message has {len(data)} bytes; the limit is {LONGEST_GREETING}")
    try:
        found = json.loads(data)
        json.dumps(found, ensure_ascii=False).encode()  # a lone surrogate would raise wherever it is written
    except Exception as error:  # untrusted bytes may raise anything (huge numbers, deep nesting)
        raise Refused("a first message is not JSON") from error
    if not isinstance(found, dict):
        raise Refused("a first message is not a JSON object")
    return found


def parse_hex(text: object, size: int) -> bytes:
    """Parses a field of hexadecimal digits; raises ``Refused`` unless it has ``size`` bytes."""
    try:
        data = bytes.fromhex(text) if isinstance(text, str) else b""
    except ValueError:
        data = b""
    if len(data) != size:
        raise Refused(f"a first message lacks {size} bytes in hexadecimal digits")
    return data
