"""A study of matrix products whose sums are exact: what leaves their bits, how accurate they are, what they cost.

``python benchmarks/exact_sums/run.py`` writes RESULTS.md; ``--quick`` is two short alternations, nothing written.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from exact import ExactLinear, integer_product, joined, product, sums  # noqa: E402  beside this file
from harness import report  # noqa: E402  the line above makes it importable
from harness.spread import ratios  # noqa: E402

CLAIM = (
    "Whether a matrix product can have the same bits on every machine, for every number of threads and every K, and "
    "what that costs. The decision that rests on these numbers is docs/decisions/0038-exact-sums.md."
)
WAYS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "fp32": lambda left, right: left @ right.T,
    "fp64": lambda left, right: left.double() @ right.double().T,
    "exact, 1 slice": lambda left, right: product(left, right, 1),
    "exact, 2 slices": lambda left, right: product(left, right, 2),
    "int8, 3 slices": lambda left, right: integer_product(left, right, 3),
    "int8, 4 slices": lambda left, right: integer_product(left, right, 4),
}
LAYERS = ((256, 512, 512), (1024, 512, 2048), (512, 2048, 512))
"""Rows of a batch, inputs and outputs of a Linear layer."""
OTHER_CODE = {"MKL_CBWR": "COMPATIBLE", "ONEDNN_MAX_CPU_ISA": "AVX2", "ATEN_CPU_CAPABILITY": "avx2"}
"""Makes the libraries choose the code that they would choose on a CPU without AVX-512."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="two short alternations, nothing written")
    parser.add_argument("--alternations", type=int, default=9)
    parser.add_argument("--digests", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.digests:
        print("\n".join(digest(way(*operands(0))) for way in WAYS.values()))
        return
    torch.set_num_threads(1)
    sections = [bits(), accuracy(), cost(2 if given.quick else given.alternations)]
    if given.quick:
        print("\n\n".join(sections))
    else:
        report.write(HERE / "RESULTS.md", title="Exact sums", claim=CLAIM, sections=[*sections, report.LEGEND])


def operands(seed: int, shape: tuple[int, int, int] = (96, 1000, 80), spread: float = 0.0) -> tuple[Tensor, Tensor]:
    """Two matrices (m x k, n x k) of normal numbers, each times a power of two of up to ``spread`` bits, either way."""
    source = torch.Generator().manual_seed(seed)
    m, k, n = shape
    found = []
    for rows in (m, n):
        values = torch.randn(rows, k, generator=source)
        found.append(values * 2.0 ** ((torch.rand(rows, k, generator=source) * 2 - 1) * spread).round())
    return found[0], found[1]


def digest(tensor: Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()


def bits() -> str:
    """The table of what may change without changing a bit, 20 pairs of matrices each."""
    here = subprocess.run(
        [sys.executable, __file__, "--digests"],
        env={**os.environ, **OTHER_CODE},
        check=True,
        capture_output=True,
        text=True,
    ).stdout.split()
    rows = []
    for number, (name, way) in enumerate(WAYS.items()):
        rows.append(
            [
                name,
                same(way, lambda way, left, right: with_threads(2, way, left, right)),
                same(way, lambda way, left, right: permuted(way, left, right)),
                same(way, lambda way, left, right: torch.cat([way(part, right) for part in left.split(13)])),
                "equal" if digest(way(*operands(0))) == here[number] else "other bits",
                of_micro_batches(name),
            ]
        )
    head = [
        "product",
        "2 threads",
        "terms in another order",
        "rows in parts",
        "other instructions",
        "terms in 4 micro-batches",
    ]
    return (
        "## Bits\n\nOf 20 pairs of matrices (96 x 1000 and 80 x 1000), how many have the same bits after the change. "
        "`other instructions`: one pair, with the three variables of `--portable`. `terms in 4 micro-batches`: the sum "
        "of four products of 250 terms, for the exact ones in fp64 with the scales of all 1000 terms, which the four "
        "would have to agree on before. Results other than fp32 are compared before they are rounded to fp32."
        "\n\n" + report.table(head, rows)
    )


def same(way: Callable[[Tensor, Tensor], Tensor], other: Callable[..., Tensor]) -> str:
    pairs = [operands(seed) for seed in range(20)]
    return f"{sum(torch.equal(way(*pair), other(way, *pair)) for pair in pairs)} of 20"


def with_threads(count: int, way: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    torch.set_num_threads(count)
    try:
        return way(left, right)
    finally:
        torch.set_num_threads(1)


def permuted(way: Callable[[Tensor, Tensor], Tensor], left: Tensor, right: Tensor) -> Tensor:
    order = torch.randperm(left.shape[1], generator=torch.Generator().manual_seed(5))
    return way(left[:, order].contiguous(), right[:, order].contiguous())


def of_micro_batches(name: str) -> str:
    """How many of 20 sums of four parts have the bits of the whole sum."""
    equal = 0
    for seed in range(20):
        left, right = operands(seed)
        parts = list(zip(left.split(250, dim=1), right.split(250, dim=1), strict=True))
        if name.startswith("exact"):
            count = int(name.split()[1])
            largest = (left.abs().amax(1, keepdim=True), right.abs().amax(1, keepdim=True))
            of_parts = [sums(*part, count, terms=left.shape[1], largest=largest) for part in parts]
            found = joined([sum(units[1:], units[0]) for units in zip(*of_parts, strict=True)])
        else:
            products = [WAYS[name](*part) for part in parts]
            found = sum(products[1:], products[0])
        equal += torch.equal(WAYS[name](left, right), found)
    return f"{equal} of 20"


def accuracy() -> str:
    """The table of errors against four slices of fp64, which hold 80 bits below the largest value of a row."""
    rows = []
    for name, way in WAYS.items():
        line = [name]
        for spread in (0.0, 10.0, 30.0):
            largest = 0.0
            for seed in range(5):
                left, right = operands(seed, spread=spread)
                exact = product(left, right, 4)
                bound = left.double().norm(dim=1, keepdim=True) @ right.double().norm(dim=1, keepdim=True).T
                largest = max(largest, ((way(left, right).double() - exact).abs() / bound).max().item())
            line.append(f"{largest:.1e}")
        rows.append(line)
    head = ["product", "normal numbers", "times powers of two up to 2^10 either way", "up to 2^30 either way"]
    return (
        "## Accuracy\n\nLargest error of an element, relative to the product of the norms of its row and its column, "
        "over 5 pairs of matrices (96 x 1000 and 80 x 1000). Results other than fp32 are taken before they are "
        "rounded to fp32.\n\n" + report.table(head, rows)
    )


def cost(alternations: int) -> str:
    """The table of the time of a Linear layer, forward and backward pass, against fp32."""
    rows = []
    for count, inputs, outputs in LAYERS:
        sides = layers(count, inputs, outputs)
        times: dict[str, list[float]] = {name: [] for name in sides}
        for side in sides.values():
            side()
        for _ in range(alternations):
            for name, side in sides.items():
                began = time.perf_counter()
                for _ in range(5):
                    side()
                times[name].append(time.perf_counter() - began)
        ratio = [ratios(times[name], times["fp32"]).text(1) for name in sides if name != "fp32"]
        rows.append([f"{count} x {inputs} to {outputs}", *ratio])
    head = ["layer", *(name for name in WAYS if name != "fp32")]
    return (
        "## Cost\n\nTime of forward and backward pass of a Linear layer, one thread, as a ratio to fp32; "
        f"{alternations} alternations of 5 passes. The columns of `int8` are the three products alone, without "
        "autograd.\n\n" + report.table(head, rows)
    )


def layers(count: int, inputs: int, outputs: int) -> dict[str, Callable[[], None]]:
    """One forward and backward pass of a Linear layer by each way of multiplying."""
    x = torch.randn(count, inputs, requires_grad=True)
    weight = torch.randn(outputs, inputs, requires_grad=True)
    above = torch.randn(count, outputs)
    plain = x.detach(), weight.detach()
    pairs = [plain, (above, plain[1].T.contiguous()), (above.T.contiguous(), plain[0].T.contiguous())]

    def layer(forward: Callable[[Tensor, Tensor], Tensor]) -> None:
        torch.autograd.grad(forward(x, weight), (x, weight), above)

    def integers(count: int) -> None:
        for pair in pairs:
            integer_product(*pair, count).float()

    return {
        "fp32": lambda: layer(functional.linear),
        "fp64": lambda: layer(lambda x, weight: functional.linear(x.double(), weight.double()).float()),
        "exact, 1 slice": lambda: layer(lambda x, weight: ExactLinear.apply(x, weight, 1)),
        "exact, 2 slices": lambda: layer(lambda x, weight: ExactLinear.apply(x, weight, 2)),
        "int8, 3 slices": lambda: integers(3),
        "int8, 4 slices": lambda: integers(4),
    }


if __name__ == "__main__":
    main()
