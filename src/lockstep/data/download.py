"""Downloads of published data sets: a file is there whole, with the published digest, or not at all."""

from __future__ import annotations

import functools
import hashlib
import http.client
import shutil
import urllib.error
import urllib.request
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

from lockstep.core.atomic import file_aside
from lockstep.data.images.image_cache import lock_file
from lockstep.errors import ConfigError, DataError
from lockstep.text import format_bytes

TIMEOUT = 30.0
"""Seconds that a server may take to accept the connection, and between two parts of its answer."""
_BLOCK = 1 << 20


@dataclass(frozen=True)
class Archive:
    """A published file."""

    url: str
    size: int
    """Bytes."""
    sha256: str

    @property
    def name(self) -> str:
        """The last part of the URL."""
        return self.url.rpartition("/")[2]


_MNIST = (
    ("train-images-idx3", 9_912_422, "440fcabf73cc546fa21475e81ea370265605f56be210a4024d2ca8f203523609"),
    ("train-labels-idx1", 28_881, "3552534a0a558bbed6aed32b30c495cca23d567ec52cac8be1a0730e8010255c"),
    ("t10k-images-idx3", 1_648_877, "8d422c7b0a1c1c79245a5bcf07fe86e33eeafee792b84584aec276f5a2dbc4e6"),
    ("t10k-labels-idx1", 4_542, "f7ae60f92e00ec6debd23a6088c31dbd2371eca3ffa0defaefb259924204aec6"),
)
PUBLISHED = {
    "cifar10": (
        Archive(
            "https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
            170_498_071,
            "6d958be074577803d12ecdefd02955f39262c83c16fe9348329d7fe0b5c001ce",
        ),
    ),
    "mnist": tuple(
        Archive(f"https://ossci-datasets.s3.amazonaws.com/mnist/{name}-ubyte.gz", size, digest)
        for name, size, digest in _MNIST
    ),
}
"""The files of each set, as ``CIFAR10`` and ``IDX`` read them."""


def download_archive(
    archive: Archive,
    folder: Path,
    *,
    mirror: str | None = None,
    tell: Callable[[str], None] = lambda words: None,
) -> Path:
    """Downloads a file into ``folder``, which is made where it is absent, and returns its path.

    A file that is there with the right digest is kept. One with another digest is kept as well, and refused. Of
    processes that download into one folder, one does and the others wait for it.

    Args:
        archive: the file.
        folder: where it is to be.
        mirror: the URL of a folder that has the file under the same name; the published URL by default.
        tell: called with a sentence on what is done.

    Raises:
        ConfigError: there is no connection or no room, the server answers with an error, the folder cannot be written
            to, or another file has the name.
        DataError: the server sent something else, of which nothing is left.
    """
    url = archive.url if mirror is None else f"{mirror.rstrip('/')}/{archive.name}"
    if not url.startswith(("https://", "http://")):
        raise ConfigError(f"--mirror {mirror} is not the address of a web server. Give one with https:// or http://.")
    target = folder / archive.name
    if _is_there(target, archive, tell):
        return target
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write to {folder}: {error.strerror}. Give another folder.") from error

    @functools.cache
    def waiting() -> None:
        tell(f"Another process downloads into {folder}; waiting for it.")

    with lock_file(folder / ".lockstep-download.lock", waiting):
        if not _is_there(target, archive, tell):
            free = shutil.disk_usage(folder).free
            if free < archive.size:
                raise ConfigError(
                    f"{archive.name} takes {format_bytes(archive.size)}, and {folder} has {format_bytes(free)} free. "
                    "Make room, or give another folder."
                )
            tell(f"Downloading {url} ({format_bytes(archive.size)}).")
            _fetch(archive, url, target)
            tell(f"{target}: complete, with the published SHA-256.")
    return target


def _is_there(target: Path, archive: Archive, tell: Callable[[str], None]) -> bool:
    """True if the file is there and is the published one; ``ConfigError`` if it is another."""
    try:
        with target.open("rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(f"{target} cannot be read: {error.strerror}. Give another folder.") from error
    if found != archive.sha256:
        raise ConfigError(
            f"{target} is another file than the published one: its SHA-256 is {found}, not {archive.sha256}. It was "
            "left as it is. Remove it, or give another folder."
        )
    tell(f"{target} is there already, with the published SHA-256: kept.")
    return True


def _fetch(archive: Archive, url: str, target: Path) -> None:
    """Writes the file aside, which only the holder of the lock does; it gets its name once it is right."""
    digest, size = hashlib.sha256(), 0
    try:
        with file_aside(target, alone=True) as aside:
            with aside.open("wb") as file, closing(_blocks(url, archive.size + 1)) as blocks:
                for block in blocks:
                    digest.update(block)
                    size += len(block)
                    file.write(block)
            if digest.hexdigest() != archive.sha256:
                shown = f"more than {archive.size:,}" if size > archive.size else f"{size:,}"
                raise DataError(
                    f"{url} is not the published file: {shown} bytes came, with SHA-256 {digest.hexdigest()}, instead "
                    f"of {archive.size:,} with {archive.sha256}. They were removed. Try again, or give another "
                    "--mirror."
                )
    except OSError as error:
        raise ConfigError(
            f"{target} cannot be written: {error.strerror}. Make room, or give another folder."
        ) from error


def _blocks(url: str, most: int) -> Generator[bytes, None, None]:
    """Yields the bytes that a server sends, up to ``most``; ``ConfigError`` where it does not."""
    request = urllib.request.Request(url, headers={"User-Agent": "lockstep"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT) as response:
            while most and (block := response.read(min(most, _BLOCK))):
                most -= len(block)
                yield block
    except urllib.error.HTTPError as error:
        error.close()
        raise ConfigError(
            f"{url} cannot be downloaded: the server answers {error.code} ({error.reason}). Give another address with "
            "--mirror."
        ) from error
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise ConfigError(
            f"{url} cannot be downloaded: {reason}. Check the network (https_proxy is followed), give another address "
            "with --mirror, or copy the file from a machine that has it."
        ) from error
