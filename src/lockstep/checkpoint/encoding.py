"""Python values as JSON that gives the very same values back, with tensors kept beside it.

Plain JSON turns tuples into lists, forgets that keys were numbers and has no infinity. Here such a value is
written as an object with one reserved key, ``{"tuple": [0.9, 0.999]}``; everything else looks as one expects.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lockstep.errors import CheckpointError, ConfigError

JSON = None | bool | int | float | str | list["JSON"] | dict[str, "JSON"]

_RESERVED = frozenset({"tuple", "dict", "float", "tensor"})


def encode(value: Any, path: str, tensors: dict[str, Tensor] | None = None) -> JSON:
    """Turns a value into JSON; tensors inside it go into ``tensors``, under a name made of ``path``.

    Args:
        value: None, bool, int, float, str, and lists, tuples, dicts and tensors of such.
        path: name of the value, for tensor names and messages.
        tensors: receives the tensors; None where no tensor may occur.
    """
    if value is None or isinstance(value, bool | str):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, Tensor) and tensors is not None:
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, list | tuple):
        items = [encode(item, f"{path}.{i}", tensors) for i, item in enumerate(value)]
        return items if isinstance(value, list) else {"tuple": items}
    if isinstance(value, Mapping):
        return _encode_mapping(value, path, tensors)
    raise ConfigError(
        f"{path!r} is a {type(value).__name__}, which a checkpoint cannot hold. "
        "Give numbers, strings, None, and lists, tuples or dicts of them."
    )


def _encode_mapping(value: Mapping[Any, Any], path: str, tensors: dict[str, Tensor] | None) -> JSON:
    encoded = {key: encode(item, f"{path}.{key}", tensors) for key, item in value.items()}
    looks_reserved = len(encoded) == 1 and next(iter(encoded)) in _RESERVED
    if all(isinstance(key, str) for key in encoded) and not looks_reserved:
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
    if key == "tensor" and tensors is not None and content in tensors:
        return tensors[str(content)]
    if key == "dict" and isinstance(content, list):
        pairs = [item for item in content if isinstance(item, list) and len(item) == 2]
        if len(pairs) == len(content):
            return {decode(name, tensors): decode(item, tensors) for name, item in pairs}
    raise CheckpointError(
        f"A checkpoint record holds {key!r} with {str(content)[:80]!r}, which has no meaning."
    )


def canonical(value: JSON) -> bytes:
    """The one way a JSON value is written in a checkpoint, so that equal content is equal bytes."""
    return json.dumps(
        value, sort_keys=True, allow_nan=False, separators=(",", ":"), ensure_ascii=False
    ).encode()
