"""What differs between the tensors a model has and those it is given."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor

_LISTED = 20


@dataclass(frozen=True)
class Differences:
    """The names by which two sets of tensors differ; empty (and false) where they match."""

    missing: tuple[str, ...]
    """Names the model has and the file lacks."""
    unexpected: tuple[str, ...]
    """Names the file has and the model lacks."""
    reshaped: tuple[str, ...]
    """Names of both, with other shapes; each with the two shapes."""
    retyped: tuple[str, ...]
    """Names of both, with equal shapes and other dtypes; each with the two dtypes."""

    def __bool__(self) -> bool:
        return bool(self.missing or self.unexpected or self.reshaped or self.retyped)

    def describe(self) -> str:
        """One line per kind of difference, with at most 20 names each and the number of the others."""
        kinds = [
            ("missing", self.missing),
            ("unexpected", self.unexpected),
            ("other shape", self.reshaped),
            ("other dtype", self.retyped),
        ]
        return "\n".join(f"  {kind} ({len(names)}): {shorten(names)}" for kind, names in kinds if names)


def compare(given: Mapping[str, Tensor], wanted: Mapping[str, Tensor], *, dtypes: bool = True) -> Differences:
    """Compares names, shapes and (unless ``dtypes`` is false) dtypes, never values."""
    shared = [name for name in wanted if name in given]
    reshaped = [name for name in shared if given[name].shape != wanted[name].shape]
    equal_shape = [name for name in shared if given[name].shape == wanted[name].shape]
    return Differences(
        missing=tuple(name for name in wanted if name not in given),
        unexpected=tuple(name for name in given if name not in wanted),
        reshaped=tuple(
            f"{name} {list(given[name].shape)} instead of {list(wanted[name].shape)}" for name in reshaped
        ),
        retyped=tuple(
            f"{name} {given[name].dtype} instead of {wanted[name].dtype}"
            for name in equal_shape
            if dtypes and given[name].dtype != wanted[name].dtype
        ),
    )


def shorten(names: Iterable[str], limit: int = _LISTED) -> str:
    """Joins names with commas; beyond ``limit`` only counts them."""
    listed = list(names)
    rest = len(listed) - limit
    return ", ".join(listed[:limit]) + (f" and {rest} more" if rest > 0 else "")
