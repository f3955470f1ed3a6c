"""WebDataset-style tar shards, read by number and without unpacking."""

from __future__ import annotations

import hashlib
import os
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.data.encoded import EncodedPairs
from lockstep.data.image_transforms import ImageTransform
from lockstep.data.labels import check_labels
from lockstep.data.tar_index import TarIndex, open_index
from lockstep.errors import ConfigError, DataError
from lockstep.permutation import Indices

INDEX_NAME = "lockstep-index"
_OPEN_SHARDS = 64
_LONGEST_LABEL = 20


class TarShards(EncodedPairs):
    """Samples in tar files: members that share a path up to the file name's first dot, one after the other.

        shard-000.tar   train/0001.jpg  train/0001.cls | train/0002.jpg  train/0002.cls | ...

    ``dataset[i]`` is the pair ``(picture, label)``: the member ``input`` and the whole number in the member ``label``.
    With ``decode`` it is instead whatever that makes of ``{"jpg": bytes, "cls": bytes, ...}``. The headers of the
    shards are read once; where each member stands is then kept in an index file, see ``lockstep.data.tar_index``.

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
        transform: ImageTransform | Callable[[Any], Any] | None = None,
        decode: Callable[[dict[str, bytes]], Any] | None = None,
        classes: int | Sequence[str] | None = None,
        index: str | Path | None = None,
    ) -> None:
        if decode is not None and transform is not None:
            raise ConfigError(
                "TarShards was given decode and transform. decode makes the whole sample; leave one out."
            )
        super().__init__(transform)
        self.shards = _shards(path)
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
            self.classes = tuple(map(str, range(classes))) if isinstance(classes, int) else tuple(classes)
            check_labels(self, len(self.classes))

    def __len__(self) -> int:
        return len(self._index.shard)

    def __getitem__(self, index: int) -> Any:
        """The sample. Random numbers come from torch's generator."""
        if self.decode is None:
            return super().__getitem__(index)
        kinds = self._index.kinds
        members = range(int(self._index.first[index]), int(self._index.first[index + 1]))
        return self.decode(
            {str(kinds[self._index.kind[each]]): self._content(index, each) for each in members}
        )

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
        return f"{shard}, {self._index.keys[index].decode()}"

    def _stored(self) -> tuple[str, list[Path], list[str]]:
        chosen = hashlib.blake2b(self._inputs.tobytes(), digest_size=16).hexdigest()
        return self.shards[0].parent.name or "shards", self.shards, [chosen]

    def _input(self, index: int) -> bytes:
        return self._content(index, int(self._inputs[index]))

    def _target(self, index: int) -> int:
        return int(self.labels[index])

    def _column(self, endings: Sequence[str]) -> Indices:
        """The one member of each sample that has one of the endings."""
        index: TarIndex = self._index
        wanted = {place for place, ending in enumerate(index.kinds.tolist()) if ending in endings}
        kinds, first = index.kind.tolist(), index.first.tolist()
        found = []
        for sample in range(len(self)):
            members = [
                member for member in range(first[sample], first[sample + 1]) if kinds[member] in wanted
            ]
            if len(members) != 1:
                raise DataError(
                    f"The sample {self.sample_path(sample)} has {len(members)} members that end in "
                    f"{' or '.join(endings)}, and exactly one is needed. Endings in these shards: "
                    f"{', '.join(sorted(index.kinds.tolist()))}. Name them with input= and label=."
                )
            found += members
        return np.array(found, dtype=np.int64)

    def _label(self, sample: int, member: int) -> int:
        content = self._content(sample, member) if self._index.size[member] <= _LONGEST_LABEL else b""
        if not content.strip().isdigit():
            raise DataError(
                f"The label of {self.sample_path(sample)} is {content!r} and should be a whole number in digits."
            )
        return int(content)

    def _content(self, sample: int, member: int) -> bytes:
        shard = int(self._index.shard[sample])
        size = int(self._index.size[member])
        content = os.pread(self._descriptor(shard), size, int(self._index.offset[member]))
        if len(content) != size:
            raise DataError(
                f"{self.shards[shard]} has become shorter since it was opened. Leave shards as they are."
            )
        return content

    def _descriptor(self, shard: int) -> int:
        if shard not in self._files:
            self._files[shard] = os.open(self.shards[shard], os.O_RDONLY | os.O_CLOEXEC)
            if len(self._files) > _OPEN_SHARDS:
                os.close(self._files.popitem(last=False)[1])
        self._files.move_to_end(shard)
        return self._files[shard]


def _shards(path: str | Path | Sequence[str | Path]) -> list[Path]:
    if not isinstance(path, (str, Path)):
        shards = [Path(each) for each in path]
    elif Path(path).is_dir():
        shards = sorted(each for each in Path(path).iterdir() if each.suffix.lower() == ".tar")
    else:
        shards = [Path(path)]
    if not shards:
        raise DataError(
            f"{path} holds no files that end in .tar. Unpack .tar.gz shards to .tar: they are read by place."
        )
    return shards
