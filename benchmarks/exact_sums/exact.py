"""A matrix product whose result does not depend on the order of its sums: operands are split, products are exact.

The method is Ozaki's (Ozaki, Ogita, Oishi, Rump: "Error-free transformations of matrix multiplication by using
fast routines of matrix multiplication", Numerical Algorithms 59, 2012). Every row of an operand is written as a sum of
slices; a slice holds ``bits`` bits below a power of two that is above the row's largest absolute value. The product of
two slices, with ``k`` terms in each sum, is exact in fp64 where ``2 * bits + log2(k) <= 53``: whatever BLAS library,
thread or instruction adds the terms, in any order, the sum is the same number. What remains are sums of a few
matrices, element by element, in a fixed order.

A prototype of the study in docs/decisions/0038-exact-sums.md. It is not part of Lockstep.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

SIGNIFICAND = 53
"""Bits of an fp64 number."""


def slices(rows: Tensor, count: int, bits: int, largest: Tensor | None = None) -> list[Tensor]:
    """Splits ``rows`` (m x k, fp32) into ``count`` fp64 matrices; what is below the last slice is cut off.

    ``largest`` (m x 1) is the largest absolute value of each row, where the row goes on in other micro-batches.
    """
    rest = rows.double()
    if largest is None:
        largest = rest.abs().amax(dim=1, keepdim=True)
    _, exponent = torch.frexp(largest.double())
    found = []
    for number in range(count):
        # Adding 1.5 * 2**(52 + unit) rounds to a multiple of 2**unit, and subtracting it is exact.
        unit = exponent - bits * (number + 1)
        shift = 1.5 * power_of_two(unit + SIGNIFICAND - 1)
        head = (rest + shift).sub_(shift)
        found.append(head)
        if number + 1 < count:
            rest = rest - head
    return found


def power_of_two(exponent: Tensor) -> Tensor:
    """``2**exponent`` in fp64, exact: the bits are written, since libraries' power functions may round."""
    return ((exponent.long() + 1023) << (SIGNIFICAND - 1)).view(torch.float64)


def bits_for(terms: int, count: int) -> int:
    """Bits of a slice such that a sum of ``terms`` products is exact in fp64, products of one kind added together."""
    return (SIGNIFICAND - 1 - math.ceil(math.log2(terms * count))) // 2


def sums(
    left: Tensor,
    right: Tensor,
    count: int,
    *,
    terms: int | None = None,
    largest: tuple[Tensor, Tensor] | None = None,
) -> list[Tensor]:
    """The exact sums of ``left @ right.T`` (m x k, n x k), one fp64 matrix for each unit, the largest unit first.

    Slices ``i`` and ``j`` are multiplied where ``i + j < count``; those with the same ``i + j`` have the same unit.
    Sums of several micro-batches may be added, in any order, and stay exact, where all were made with the same
    ``terms``, the number of products in all of them, and the same ``largest``, the largest absolute values of all.
    """
    bits = bits_for(terms or left.shape[1], count)
    of_left, of_right = largest or (None, None)
    lefts, rights = slices(left, count, bits, of_left), slices(right, count, bits, of_right)
    found = []
    for kind in range(count):
        part = lefts[0] @ rights[kind].T
        for number in range(1, kind + 1):
            part.addmm_(lefts[number], rights[kind - number].T)
        found.append(part)
    return found


def joined(parts: list[Tensor]) -> Tensor:
    """Adds the sums of all units, the smallest first: a fixed order, element by element."""
    total = parts[-1].clone()
    for part in reversed(parts[:-1]):
        total.add_(part)
    return total


def product(left: Tensor, right: Tensor, count: int) -> Tensor:
    """``left @ right.T`` (m x k, n x k), fp64, from ``count`` slices of each operand."""
    return joined(sums(left, right, count))


class ExactLinear(torch.autograd.Function):
    """``inputs @ weight.T`` with all three matrix products of forward and backward pass exact."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, count: int) -> Tensor:
        ctx.save_for_backward(inputs, weight)
        ctx.count = count
        return product(inputs, weight, count).float()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, weight = ctx.saved_tensors
        (above,) = gradients
        of_inputs = product(above, weight.T.contiguous(), ctx.count).float()
        of_weight = product(above.T.contiguous(), inputs.T.contiguous(), ctx.count).float()
        return of_inputs, of_weight, None


def integer_product(left: Tensor, right: Tensor, count: int) -> Tensor:
    """``left @ right.T`` with slices of 7 bits in int8, whose products are exact in int32 for up to 2**16 terms.

    The same method on integer units (Ootomo, Ozaki, Yokota: "DGEMM on integer matrix multiplication unit", 2024).
    """
    bits = 7
    exponents = [torch.frexp(rows.abs().amax(dim=1, keepdim=True))[1] for rows in (left, right)]
    lefts, rights = (_integer_slices(rows, e, count, bits) for rows, e in zip((left, right), exponents, strict=True))
    total: Tensor | None = None
    for kind in reversed(range(count)):
        parts = [torch._int_mm(lefts[number], rights[kind - number].T) for number in range(kind + 1)]
        part = sum(parts[1:], parts[0]).double()
        total = part if total is None else part.add_(total, alpha=2.0**-bits)
    assert total is not None
    return total.mul_(power_of_two(exponents[0] - (bits - 1))).mul_(power_of_two(exponents[1].T - (bits - 1)))


def _integer_slices(rows: Tensor, exponent: Tensor, count: int, bits: int) -> list[Tensor]:
    # |rows| < 2**exponent, so the first slice is an integer of at most 2**(bits - 1) = 64; a rest is half a unit.
    rest = rows.double() * power_of_two(bits - 1 - exponent)
    found = []
    for _ in range(count):
        head = rest.round()
        found.append(head.to(torch.int8))
        rest = (rest - head) * 2.0**bits
    return found
