"""Says whether a data set decodes photos, and so what else its bits depend on."""

from __future__ import annotations

from typing import Any

from torch.utils.data import Subset

from lockstep.data.decoding.choice import pixels_digest


def decoded_as(dataset: Any) -> str:
    """``pixels_digest()`` of a set that decodes photos, also within ``Subset`` and our sets around sets; else empty.

    A set says so with the attribute ``decodes_photos``.
    """
    while not hasattr(dataset, "decodes_photos"):
        inner = getattr(dataset, "dataset", None)
        if inner is None or not (type(dataset) is Subset or hasattr(dataset, "inner_batch")):
            return ""
        dataset = inner
    return pixels_digest() if dataset.decodes_photos else ""
