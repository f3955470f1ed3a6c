"""A script as it is read from disk; whatever is in the file, the answer is a script or one sentence."""

from __future__ import annotations

import io
import tokenize
import warnings
from pathlib import Path

from lockstep.errors import ConfigError
from lockstep.lint.script import Script

MOST_BYTES = 5_000_000


def read_text(path: str) -> str:
    """The text of a Python file. ``ConfigError`` for a folder, a notebook, a binary or an unknown encoding."""
    file = Path(path)
    if file.suffix == ".ipynb":
        raise ConfigError(
            f"{path} is a notebook. Write its cells to a script first: jupyter nbconvert --to script {path}"
        )
    try:
        if file.is_dir():
            raise ConfigError(f"{path} is a folder. Name the files, for example {path.rstrip('/')}/*.py.")
        if not file.is_file():
            raise ConfigError(f"{path} is not there, or is no file. Give the path of a Python script.")
        with file.open("rb") as opened:
            data = opened.read(MOST_BYTES + 1)
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
    if len(data) > MOST_BYTES:
        raise ConfigError(f"{path} has more than {MOST_BYTES:,} bytes; no script is that long.")
    return _decode(path, data)


def parse(text: str, path: str) -> Script:
    """The script. ``ConfigError`` with the line where Python itself does not understand the text."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return Script(text)
    except SyntaxError as error:
        where = f":{error.lineno}" if error.lineno else ""
        raise ConfigError(f"{path}{where} is not Python 3 that can be parsed: {error.msg}.") from error
    except ValueError as error:
        raise ConfigError(f"{path} is not Python source: {error}.") from error
    except (RecursionError, MemoryError) as error:
        raise ConfigError(f"{path} is nested too deeply to be read.") from error


def _decode(path: str, data: bytes) -> str:
    if b"\0" in data:
        raise ConfigError(f"{path} holds zero bytes, so it is no Python source. Save it as UTF-8.")
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(data).readline)
        text = data.decode(encoding)
    except (SyntaxError, UnicodeError, LookupError) as error:
        raise ConfigError(f"{path} cannot be decoded: {error}. Save it as UTF-8.") from error
    return text.replace("\r\n", "\n").replace("\r", "\n")
