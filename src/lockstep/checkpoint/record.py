"""Values as JSON, from which the very same values are read back; what JSON lacks is an object with one reserved key.

(0.9, 0.999)      {"tuple": [0.9, 0.999]}
{1: 2}            {"dict": [[1, 2]]}
a tensor          {"tensor": NAME}         the tensors themselves are kept beside the JSON
"""

from __future__ import annotations

import json
import math
from collections import Counter, deque
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lockstep.core.values import MOST_BITS
from lockstep.errors import CheckpointError, ConfigError

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]

_RESERVED = frozenset({"tuple", "dict", "float", "float64", "tensor", "dtype", "deque", "counter"})


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
    if isinstance(value, int) and value.bit_length() <= MOST_BITS:
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
