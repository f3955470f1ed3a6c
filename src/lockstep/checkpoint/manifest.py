"""The files of a checkpoint: the manifest with their sizes and SHA-256, the tensors, and the JSON record beside them.

    manifest.json                         every file with size and SHA-256, itself sealed by a digest
    state.json                            the record; values that JSON lacks are objects with one reserved key, as
                                          ``{"tuple": [0.9, 0.999]}``, so that the very same values are read back
    model.safetensors                     the whole model, written by one process
    model-00002-of-00004.safetensors      what the second of four processes held: rows (dim 0) of some tensors

The rows of a tensor lie in the files in their order; a tensor of one file only is whole there. ``optimizer`` likewise.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import stat
from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]

_RESERVED = frozenset({"tuple", "dict", "float", "float64", "tensor", "dtype", "deque", "counter"})

_MOST_BITS = 14_000
"""Of an int, in the digits that Python reads."""


def encode(value: Any, path: str, tensors: dict[str, Tensor] | None = None, *, ordered: bool = False) -> JSON:
    """Turns a value into JSON; tensors inside it go into ``tensors``, under a name made of ``path``.

    Args:
        value: None, bool, int, float, str, number types, and lists, tuples, deques, dicts and tensors of such.
        path: name of the value, for tensor names and messages.
        tensors: receives the tensors; None where no tensor may occur.
        ordered: dicts come back in the order that they have, else in that of their keys.

    Raises:
        ConfigError: a value is something else, has too many digits, or holds itself.
    """
    try:
        return _encode(value, path, tensors, ordered)
    except RecursionError as error:
        raise ConfigError(f"{path!r} holds itself, or is nested too deeply for a checkpoint.") from error


def _encode(value: Any, path: str, tensors: dict[str, Tensor] | None, ordered: bool) -> JSON:
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int) and value.bit_length() <= _MOST_BITS:
        return int(value)
    if isinstance(value, np.float64):  # another than a float where it meets numbers of 32 bits
        return {"float64": repr(float(value))}
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, Tensor) and tensors is not None and value.layout is torch.strided:
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}.{i}", tensors, ordered) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if type(value) is deque:
        return {"deque": [value.maxlen, _encode(list(value), path, tensors, ordered)]}
    if isinstance(value, torch.dtype):
        return {"dtype": str(value).removeprefix("torch.")}
    if isinstance(value, Mapping):
        found = _encode_mapping(value, path, tensors, ordered)
        return {"counter": found} if type(value) is Counter else found  # its update() adds
    kind = f"a {type(value).__name__}" if not isinstance(value, int) else "a number of too many digits"
    kind += f" of layout {value.layout}" if isinstance(value, Tensor) and tensors is not None else ""
    raise ConfigError(
        f"{path!r} is {kind}, which a checkpoint cannot hold. "
        "Give numbers, strings, None, and lists, tuples or dicts of them."
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor] | None, ordered: bool) -> JSON:
    encoded = {key: _encode(item, f"{path}.{key}", tensors, ordered) for key, item in value.items()}
    looks_reserved = len(encoded) == 1 and next(iter(encoded)) in _RESERVED
    is_plain = all(isinstance(key, str) for key in encoded) and not looks_reserved
    if is_plain and (not ordered or list(encoded) == sorted(encoded)):  # `canonical` writes them sorted
        return encoded
    return {"dict": [[encode(key, path), item] for key, item in encoded.items()]}


def decode(value: JSON, tensors: Mapping[str, Tensor] | None = None) -> Any:
    """Turns the JSON of ``encode`` back into the value; tensors are looked up by name in ``tensors``."""
    if isinstance(value, list):
        return [decode(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (key, content), *_ = value.items()
        if key in _RESERVED:
            return _decode_reserved(key, content, tensors)
    return {key: decode(item, tensors) for key, item in value.items()}


def _decode_reserved(key: str, content: JSON, tensors: Mapping[str, Tensor] | None) -> Any:
    if key == "tuple" and isinstance(content, list):
        return tuple(decode(item, tensors) for item in content)
    if key == "float" and content in ("inf", "-inf", "nan"):
        return float(str(content))
    if key == "float64" and isinstance(content, str):
        with suppress(ValueError):
            return np.float64(float(content))
    if key == "tensor" and tensors is not None and content in tensors:
        return tensors[str(content)]
    if key == "deque" and isinstance(content, list) and len(content) == 2:
        return deque(decode(content[1], tensors), content[0])  # type: ignore[arg-type]  # its items and its size
    if key == "counter" and isinstance(content, dict):
        return Counter(decode(content, tensors))
    if key == "dtype" and isinstance(dtype := getattr(torch, str(content), None), torch.dtype):
        return dtype
    if key == "dict" and isinstance(content, list):
        pairs = [item for item in content if isinstance(item, list) and len(item) == 2]
        if len(pairs) == len(content):
            return {decode(name, tensors): decode(item, tensors) for name, item in pairs}
    raise CheckpointError(
        f"Unknown tag {key!r} with {str(content)[:80]!r} in a checkpoint record. Use another checkpoint."
    )


def canonical(value: JSON) -> bytes:
    """A JSON value as bytes; equal values give equal bytes."""

    def text(ensure_ascii: bool) -> str:
        return json.dumps(value, sort_keys=True, allow_nan=False, separators=(",", ":"), ensure_ascii=ensure_ascii)

    try:
        return text(False).encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as in the name of a file that is not in UTF-8
        return text(True).encode()


MODEL = "model.safetensors"
OPTIMIZER = "optimizer.safetensors"
RECORD = "state.json"


def file_names(shard: int = 0, shards: int = 1) -> tuple[str, str]:
    """The files of the model's and of the optimizers' tensors that one of ``shards`` processes writes."""
    if shards == 1:
        return MODEL, OPTIMIZER
    number = f"-{shard + 1:05d}-of-{shards:05d}."
    return MODEL.replace(".", number), OPTIMIZER.replace(".", number)


def tensor_files(names: Collection[str]) -> tuple[list[str], list[str]] | None:
    """The files of the model's and of the optimizers' tensors, in order; None where a checkpoint has other files."""
    shards = (len(names) - 1) // 2
    pairs = [file_names(shard, shards) for shard in range(shards)]
    expected = {RECORD, *(name for pair in pairs for name in pair)}
    if shards < 1 or set(names) != expected:
        return None
    return [model for model, _ in pairs], [optimizer for _, optimizer in pairs]


def load_tensors(paths: Iterable[Path]) -> dict[str, Tensor]:
    """The tensors of some files, on the CPU; ``CheckpointError`` where rows of one do not fit together.

    They lie in the files, which are mapped into memory, until they are read.
    """
    rows: dict[str, list[Tensor]] = {}
    for path in paths:
        for name, tensor in safetensors.torch.load_file(path).items():
            rows.setdefault(name, []).append(tensor)
    return {name: _joined(name, parts) for name, parts in rows.items()}


def _joined(name: str, rows: list[Tensor]) -> Tensor:
    if len(rows) == 1:
        return rows[0]
    if len({(part.dtype, part.shape[1:], part.dim() > 0) for part in rows}) > 1 or not rows[0].dim():
        forms = ", ".join(f"{part.dtype} {list(part.shape)}" for part in rows)
        raise CheckpointError(f"The rows of {name!r} do not make up one tensor: {forms}. Use another checkpoint.")
    return JoinedRows(rows)


class JoinedRows(Tensor):
    """A tensor whose rows lie in several files: some of them can be taken without reading the others.

    Whatever else is done with it is done with an ordinary tensor of all rows, made for that alone.
    """

    _parts: list[Tensor]

    def __new__(cls, parts: list[Tensor]) -> JoinedRows:
        """Makes one of parts that agree in all but their first dimension."""
        shape = (sum(part.shape[0] for part in parts), *parts[0].shape[1:])
        made = Tensor._make_subclass(cls, torch.empty(shape, dtype=parts[0].dtype, device="meta"))
        made._parts = parts
        return made

    def __init__(self, parts: list[Tensor]) -> None:
        """See ``__new__``."""

    def rows(self, taken: slice) -> Tensor:
        """Some consecutive rows; a view where they lie in one file."""
        start, stop, _ = taken.indices(self.shape[0])
        found, begin = [], 0
        for part in self._parts:
            own = part[max(start - begin, 0) : max(stop - begin, 0)]
            begin += part.shape[0]
            if own.shape[0]:
                found.append(own)
        return found[0] if len(found) == 1 else torch.cat(found) if found else self._parts[0][:0]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        """Answers what needs no values; everything else is asked of an ordinary tensor."""
        if getattr(func, "__self__", func) in _OF_SHAPE:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is Tensor.__getitem__ and isinstance(args[1], slice) and args[1].step is None:
            return args[0].rows(args[1])

        def whole(value: Any) -> Any:
            return torch.cat(value._parts) if isinstance(value, JoinedRows) else value

        with torch._C.DisableTorchFunctionSubclass():
            return func(*tree_map(whole, args), **tree_map(whole, dict(kwargs or {})))


_OF_SHAPE: frozenset[Any] = frozenset(
    {Tensor.shape, Tensor.dtype, Tensor.ndim, Tensor.nbytes, Tensor.dim, Tensor.numel, Tensor.size}
)
"""The attributes that a tensor without values has as well."""


MANIFEST = "manifest.json"
FORMAT = 1

_FILE_NAME = re.compile(r"[a-z][a-z0-9_-]{0,63}\.(?:safetensors|json)")
_SMALL = 1 << 22
_LARGEST_RECORD = 1 << 28


@dataclass(frozen=True)
class FileEntry:
    """One file of a checkpoint."""

    size: int
    sha256: str

    @classmethod
    def of(cls, path: Path) -> FileEntry:
        """Reads the size and the digest of a file."""
        return cls(path.stat().st_size, digest(path))


@dataclass(frozen=True)
class Manifest:
    """The files of a checkpoint and its step."""

    step: int
    files: dict[str, FileEntry]

    def to_bytes(self) -> bytes:
        """The content of ``manifest.json``."""
        files: JSON = {name: asdict(entry) for name, entry in self.files.items()}
        return seal({"format": FORMAT, "step": self.step, "files": files})

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """Reads ``manifest.json``; ``CheckpointError`` if any byte of it was changed."""
        body = read_sealed(folder / MANIFEST)
        if body.get("format") != FORMAT:
            raise CheckpointMismatch(
                f"{folder} is in checkpoint format {body.get('format')}, and this version reads {FORMAT}. "
                "Read it with the version of Lockstep that wrote it."
            )
        step, files = body.get("step"), body.get("files")
        if not isinstance(step, int) or step < 0 or not isinstance(files, dict):
            raise CheckpointError(f"{folder / MANIFEST} does not list a step and files. Use another checkpoint.")
        return cls(step, {name: _entry(folder, name, entry) for name, entry in files.items()})

    def verify(self, folder: Path) -> None:
        """Reads all bytes of every file; ``CheckpointError`` names the first that differs from its entry."""
        if tensor_files(self.files) is None:
            raise CheckpointError(f"{folder / MANIFEST} does not list the files of a checkpoint: {sorted(self.files)}.")
        for name, entry in self.files.items():
            path = folder / name
            size = regular_size(path)
            if size != entry.size:
                raise CheckpointError(
                    f"{path} has {size} bytes instead of {entry.size}: it was truncated or replaced. "
                    "Use another checkpoint."
                )
            if name == RECORD and size > _LARGEST_RECORD:
                raise CheckpointError(
                    f"{path} has {size} bytes; the limit for a record is {_LARGEST_RECORD}. It was not read."
                )
            if digest(path) != entry.sha256:
                raise CheckpointError(
                    f"{path} does not match the SHA-256 in its manifest: at least one byte has "
                    "changed since it was written. Use another checkpoint."
                )


def _entry(folder: Path, name: str, entry: JSON) -> FileEntry:
    if not _FILE_NAME.fullmatch(name):
        raise CheckpointError(f"{folder / MANIFEST} lists a file with the invalid name {name!r}; it was not read.")
    if isinstance(entry, dict):
        size, sha256 = entry.get("size"), entry.get("sha256")
        if isinstance(size, int) and size >= 0 and isinstance(sha256, str):
            return FileEntry(size, sha256)
    raise CheckpointError(f"{folder / MANIFEST} lists {name} without its size and SHA-256.")


def seal(body: dict[str, JSON]) -> bytes:
    """JSON with its own SHA-256 in it, in the canonical form that ``read_sealed`` requires."""
    return canonical({"body": body, "sha256": hashlib.sha256(canonical(body)).hexdigest()}) + b"\n"


def read_sealed(path: Path) -> dict[str, JSON]:
    """Reads the output of ``seal``; ``CheckpointError`` if it is missing, too large, or changed in any byte."""
    if regular_size(path) > _SMALL:
        raise CheckpointError(
            f"{path} is larger than {_SMALL} bytes, the limit for a manifest. It was not read. Use another checkpoint."
        )
    content = path.read_bytes()
    try:
        body = json.loads(content)["body"]
        intact = isinstance(body, dict) and seal(body) == content
    except (ValueError, KeyError, TypeError, RecursionError):
        intact = False
    if not intact:
        raise CheckpointError(
            f"{path} was changed after it was written: its own SHA-256 does not match. Use another checkpoint."
        )
    assert isinstance(body, dict)
    return body


def regular_size(path: Path) -> int:
    """The size of a readable file; ``CheckpointError`` for a missing one, a link, or anything else."""
    try:
        found = path.lstat()
    except FileNotFoundError:
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete. Use another checkpoint.") from None
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error
    if not stat.S_ISREG(found.st_mode):
        raise CheckpointError(f"{path} is not a regular file but a link, folder or device; it was not read.")
    if not os.access(path, os.R_OK):
        raise CheckpointError(f"{path} cannot be read: Permission denied.")
    return found.st_size


def digest(path: Path) -> str:
    """SHA-256 of a file's content, in hexadecimal."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    with os.fdopen(descriptor, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
