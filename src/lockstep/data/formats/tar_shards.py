"""WebDataset-style tar shards, read by number and without unpacking.

The positions of all members are found once and kept in an index file, a ``RecordFile`` of the arrays of ``TarIndex``.
It is used while each shard has the name, size and time of change recorded in it; otherwise it is built again. Where the
folder is read-only, the index is built in memory for each run.
"""

from __future__ import annotations

import hashlib
import os
import tarfile
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from lockstep.core.plan import Indices
from lockstep.data.formats.arrow_files import files_of_kind
from lockstep.data.images.cache_file import RecordFile, writing
from lockstep.data.images.encoded import EncodedPairs
from lockstep.data.images.image_cache import StoredPhotos
from lockstep.data.images.transforms import Transform
from lockstep.data.labels import check_labels, class_names
from lockstep.errors import ConfigError, DataError

_BLOCK = 512
Numbers = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TarIndex:
    """Members in the order of the shards; those from ``first[i]`` to ``first[i + 1]`` make sample ``i``."""

    shards: Numbers
    """Of shape (shards, 2): size in bytes and time of change in nanoseconds."""
    names: npt.NDArray[np.str_]
    """File names of the shards."""
    first: Numbers
    """Of shape (samples + 1,): the first member of each sample, and their number."""
    shard: Numbers
    """Of shape (samples,): the shard that a sample is in."""
    keys: npt.NDArray[np.bytes_]
    """Of shape (samples,): the path that a sample's members share, in UTF-8."""
    kinds: npt.NDArray[np.str_]
    """The endings that occur, such as ``jpg`` and ``cls``."""
    kind: Numbers
    """Of shape (members,): a position in ``kinds``."""
    offset: Numbers
    """Of shape (members,): where the content begins in its shard."""
    size: Numbers
    """Of shape (members,): bytes of the content."""


def open_index(shards: Sequence[Path], index_file: Path) -> TarIndex:
    """The index of the shards: the one in ``index_file`` if it is theirs, else a new one, which is kept there.

    ``DataError`` names a shard that is missing, compressed, cut off, or holds links.
    """
    for shard in shards:
        if not shard.is_file():
            raise DataError(f"The shard {shard} does not exist.")
    state = np.array([(shard.stat().st_size, shard.stat().st_mtime_ns) for shard in shards], dtype=np.int64)
    names = np.array([shard.name for shard in shards])
    # There may be none, none that is whole, or one with other arrays.
    with suppress(OSError, ValueError, TypeError):
        found = TarIndex(**RecordFile(index_file).arrays)
        if np.array_equal(found.names, names) and np.array_equal(found.shards, state):
            return found
    index = _scanned(shards, names, state)
    # without the lock of a file beside the shards; in a folder that cannot be written to, the index stays in memory
    with suppress(OSError), writing(index_file, alone=False) as writer:
        writer.finish(vars(index))
    return index


def _scanned(shards: Sequence[Path], names: npt.NDArray[np.str_], state: Numbers) -> TarIndex:
    kinds: dict[str, int] = {}
    first: list[int] = []
    where: list[int] = []
    keys: list[bytes] = []
    members: list[tuple[int, int, int]] = []
    for number, shard in enumerate(shards):
        last, seen = "", set[str]()
        for name, offset, size in _members(shard):
            key, ending = _split(name)
            if key != last or not seen:
                last, seen = key, set()
                first.append(len(members))
                where.append(number)
                keys.append(key.encode(errors="surrogateescape"))
            if ending in seen:
                raise DataError(
                    f"{shard} holds {name!r} twice in a row, so its sample is ambiguous. Pack each file once."
                )
            seen.add(ending)
            members.append((kinds.setdefault(ending, len(kinds)), offset, size))
    table = np.array(members, dtype=np.int64).reshape(-1, 3)
    return TarIndex(
        shards=state,
        names=names,
        first=np.array([*first, len(members)], dtype=np.int64),
        shard=np.array(where, dtype=np.int64),
        keys=np.array(keys, dtype=np.bytes_),
        kinds=np.array(list(kinds), dtype=np.str_),
        kind=table[:, 0].copy(),
        offset=table[:, 1].copy(),
        size=table[:, 2].copy(),
    )


_LONGEST_NAME = 1 << 20
_EXTENDED = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.XGLTYPE, tarfile.SOLARIS_XHDTYPE),
)


class BoundedTarInfo(tarfile.TarInfo):
    """A header whose long names and attributes, which ``tarfile`` reads into memory, may have 1 MiB."""

    def _proc_member(self, archive: tarfile.TarFile) -> tarfile.TarInfo:
        """Reads what follows a header; ``tarfile.ReadError`` if it announces more. Python means it to be overridden."""
        if self.type in _EXTENDED and self.size > _LONGEST_NAME:
            raise tarfile.ReadError(f"a member's name or attributes have {self.size:,} bytes")
        read: tarfile.TarInfo = cast(Any, super())._proc_member(archive)
        return read


def _members(shard: Path) -> list[tuple[str, int, int]]:
    """Name, place and size of each file in a shard; only the headers are read."""
    found = []
    try:
        with cast(Any, tarfile.open(shard, "r:", tarinfo=BoundedTarInfo)) as archive:
            for member in archive:
                if member.isdir():
                    continue
                if not member.isreg() or member.issparse():
                    raise DataError(
                        f"{shard} holds {member.name!r}, which is a link or a special file. Pack regular files only."
                    )
                if member.offset_data + member.size > shard.stat().st_size:
                    raise DataError(f"{shard} is truncated within {member.name!r}. Download it again.")
                found.append((member.name, member.offset_data, member.size))
                archive.members = []  # or tarfile keeps every header in memory
            end = archive.offset
    except (tarfile.TarError, EOFError, OSError, ValueError) as error:
        raise DataError(
            f"{shard} cannot be read as a tar file without compression: {error}. "
            "Unpack a .tar.gz to .tar, or download the shard again."
        ) from error
    with shard.open("rb") as file:
        file.seek(end)
        if not found or file.read(_BLOCK) != b"\0" * _BLOCK:
            raise DataError(
                f"{shard} has no end mark after its {len(found)} members, so it is truncated, damaged or empty. "
                "Download it again."
            )
    return found


def _split(name: str) -> tuple[str, str]:
    """``("train/001", "seg.png")`` of ``train/001.seg.png``: the ending begins at the file name's first dot."""
    path = PurePosixPath(name)
    stem, _, ending = path.name.partition(".")
    return str(path.with_name(stem)) if stem else str(path), ending.lower()


INDEX_NAME = "lockstep-index"
_OPEN_SHARDS = 64
_LONGEST_LABEL = 20


class TarShards(EncodedPairs):
    """Samples in tar files: members that share a path up to the file name's first dot, one after the other.

        shard-000.tar   train/0001.jpg  train/0001.cls | train/0002.jpg  train/0002.cls | ...

    ``dataset[i]`` is the pair ``(picture, label)``: the member ``input`` and the whole number in the member ``label``.
    With ``decode`` it is instead whatever that makes of ``{"jpg": bytes, "cls": bytes, ...}``. The headers of the
    shards are read once; where each member stands is then kept in an index file.

    Args:
        path: a folder of ``.tar`` files (in the order of their names), one file, or a list of files.
        input: the ending, or the endings, of the members that are inputs; each sample has exactly one.
        label: the ending of the members that hold a label in digits.
        transform: an ``ImageTransform``, or any callable of the input's bytes.
        decode: makes a sample of a dict of bytes; then ``input``, ``label`` and ``transform`` are not used.
        classes: how many there are, or their names; with it every label must be below.
        index: where the index is kept; ``None`` for ``lockstep-index`` beside the first shard.

    Raises:
        DataError: a shard is missing, compressed, cut off or holds links, or a sample has no input or no label.
    """

    def __init__(
        self,
        path: str | Path | Sequence[str | Path],
        *,
        input: str | Sequence[str] = ("jpg", "jpeg", "png", "webp"),
        label: str = "cls",
        transform: Transform | None = None,
        decode: Callable[[dict[str, bytes]], Any] | None = None,
        classes: int | Sequence[str] | None = None,
        index: str | Path | None = None,
    ) -> None:
        if decode is not None and transform is not None:
            raise ConfigError("TarShards was given decode and transform. decode makes the whole sample; leave one out.")
        super().__init__(transform)
        self.shards = files_of_kind(path, [".tar"], "Unpack .tar.gz shards to .tar: they are read by place.")
        self.decode = decode
        self._files: OrderedDict[int, int] = OrderedDict()
        index_file = Path(index) if index is not None else self.shards[0].parent / INDEX_NAME
        self._index = open_index(self.shards, index_file)
        if decode is None:
            wanted = (input,) if isinstance(input, str) else tuple(input)
            self._inputs = self._column(wanted)
            labels = (self._label(index, int(member)) for index, member in enumerate(self._column((label,))))
            self.labels = np.fromiter(labels, dtype=np.int64, count=len(self))
        if classes is not None:
            self.classes = class_names(classes)
            check_labels(self, len(self.classes))

    def __len__(self) -> int:
        return len(self._index.shard)

    def __getitem__(self, index: int) -> Any:
        """The sample. Random numbers come from torch's generator."""
        if self.decode is None:
            return super().__getitem__(index)
        kinds = self._index.kinds
        members = range(int(self._index.first[index]), int(self._index.first[index + 1]))
        return self.decode({str(kinds[self._index.kind[each]]): self._content(index, each) for each in members})

    def __repr__(self) -> str:
        return f"TarShards: {len(self):,} samples in {len(self.shards)} shards"

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_files": OrderedDict()}

    def __del__(self) -> None:
        for file in getattr(self, "_files", {}).values():
            os.close(file)

    def sample_path(self, index: int) -> str:
        """The shard of a sample, and its path there without the ending."""
        shard = self.shards[int(self._index.shard[index])].name
        return f"{shard}, {self._index.keys[index].decode(errors='surrogateescape')}"

    def _photos(self) -> StoredPhotos:
        name = self.shards[0].parent.name or "shards"
        chosen = hashlib.blake2b(self._inputs.tobytes(), digest_size=16).hexdigest()
        return StoredPhotos(name, len(self), self.shards, [chosen], self._picture)

    def _input(self, index: int) -> bytes:
        return self._content(index, int(self._inputs[index]))

    def _target(self, index: int) -> int:
        return int(self.labels[index])

    def _column(self, endings: Sequence[str]) -> Indices:
        """The one member of each sample that has one of the endings."""
        index: TarIndex = self._index
        is_wanted = np.isin(index.kinds, endings)[index.kind]
        counts = np.add.reduceat(is_wanted, index.first[:-1], dtype=np.int64)
        wrong = np.flatnonzero(counts != 1)
        if len(wrong):
            sample = int(wrong[0])
            raise DataError(
                f"The sample {self.sample_path(sample)} has {counts[sample]} members that end in "
                f"{' or '.join(endings)}, and exactly one is needed. Endings in these shards: "
                f"{', '.join(sorted(index.kinds.tolist()))}. Name them with input= and label=."
            )
        return np.flatnonzero(is_wanted)

    def _label(self, sample: int, member: int) -> int:
        content = self._content(sample, member) if self._index.size[member] <= _LONGEST_LABEL else b""
        if not content.strip().isdigit():
            raise DataError(
                f"The label of {self.sample_path(sample)} is {content!r} and should be an integer in digits."
            )
        return int(content)

    def _content(self, sample: int, member: int) -> bytes:
        shard = int(self._index.shard[sample])
        size = int(self._index.size[member])
        content = os.pread(self._descriptor(shard), size, int(self._index.offset[member]))
        if len(content) != size:
            raise DataError(
                f"{self.shards[shard]} was truncated after it was opened. Do not change shards while they are read."
            )
        return content

    def _descriptor(self, shard: int) -> int:
        if shard not in self._files:
            self._files[shard] = os.open(self.shards[shard], os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > _OPEN_SHARDS:
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(shard)
        return self._files[shard]
