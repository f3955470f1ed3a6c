"""Reads files out of a folder or out of a tar archive alike, without unpacking anything to disk."""

from __future__ import annotations

import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path, PurePosixPath

from lockstep.errors import DataError

LARGEST = 4 << 30
"""Bytes that the wanted files of one archive may hold together: a small archive can unpack to any size."""
_SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.xz", ".tar.bz2")


def files_of(source: Path, wanted: Callable[[PurePosixPath], bool]) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Yields the path and content of each wanted regular file, in no particular order.

    Args:
        source: a folder, or a tar archive (also compressed).
        wanted: says from a file's path, relative to the folder or as in the archive, whether it is read.
    """
    if source.is_dir():
        for path in source.rglob("*"):
            relative = PurePosixPath(path.relative_to(source).as_posix())
            if wanted(relative) and path.is_file():
                yield relative, path.read_bytes()
        return
    if not source.is_file():
        raise DataError(f"The data folder or archive {source} does not exist.")
    if not source.name.lower().endswith(_SUFFIXES):
        raise DataError(f"{source} is neither a folder nor an archive ({', '.join(_SUFFIXES)}).")
    try:
        with tarfile.open(source, "r|*") as archive:
            left = LARGEST
            for member in archive:
                name = PurePosixPath(member.name)
                if member.isreg() and wanted(name):
                    left -= member.size
                    if left < 0:
                        raise DataError(
                            f"{source} unpacks to more than {LARGEST:,} bytes, at {member.name!r} the latest; that "
                            "much is not read into memory. Unpack it into a folder of images."
                        )
                    file = archive.extractfile(member)
                    if file is not None:
                        yield name, file.read()
    except (tarfile.TarError, EOFError, OSError) as error:
        raise DataError(f"{source} cannot be unpacked: {error}. Download it again.") from error
