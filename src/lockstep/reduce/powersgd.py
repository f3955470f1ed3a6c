"""PowerSGD: gradients of matrices exchanged as two thin factors, with error feedback. Level C.

T. Vogels, S. P. Karimireddy, M. Jaggi: PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization,
NeurIPS 2019, algorithms 1 and 2. With M the gradient sum of a rank plus what it has left out so far, (rows, columns):

    start     P = M Q              summed over ranks      (rows, r)        while backward continues
    finish    P = orthonormal basis of P's columns
              R = M^T P            summed over ranks      (columns, r)
              result  P R_sum^T, equal on every rank
              left out by this rank, and added to its next gradient:  M - P R^T
              the next step begins from Q = R_sum, its columns scaled to length 1

What all steps gave, plus what is still left out on all ranks, is exactly what all gradients sum to; a coordinate is
late, not lost. Vectors, matrices that two factors would not make smaller, 16-bit parameters and running statistics are
summed whole, in the order of the tree.

The factors too are added in a fixed order, one term for each rank. The result is not that of one device: it depends on
the number of ranks. What was left out, and Q, are not part of a checkpoint: after a resume both begin empty.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.strategy_options import REDUCERS
from lockstep.core.seeding import derive_seed
from lockstep.reduce.reducer import BucketShape, NodeLayout, Reducer, most_slots

_COMPRESSED = (torch.float32, torch.float64)


class PowerSgdReducer(Reducer):
    """Compresses matrices to factors of ``rank`` columns, around three exact reducers that do the sums.

    ``exact`` sums what is not compressed, and exchanges the headers; ``left`` sums the factors P, ``right`` R.
    """

    level = REDUCERS["powersgd"]

    def __init__(
        self,
        group: dist.ProcessGroup,
        device: torch.device,
        rank: int,
        *,
        exact: Reducer,
        left: Reducer,
        right: Reducer,
    ) -> None:
        self._rank, self._ranks = dist.get_rank(group), dist.get_world_size(group)
        self._device, self._factor_rank = device, rank
        self._exact, self._left, self._right = exact, left, right
        self._buckets: list[_PowerSgdBucket] = []
        self._nodes = self._leaves = 0

    @property
    def bytes_sent(self) -> int:  # type: ignore[override]  # a sum of three counts
        """Bytes of the whole sums and of both factors."""
        return sum(part.bytes_sent for part in (self._exact, self._left, self._right))

    def allocate(self, buckets: list[BucketShape], header: int, leaves: int) -> None:
        """See ``Reducer.allocate``."""
        slots = most_slots(leaves, self._ranks)
        self._buckets = [
            _PowerSgdBucket(shape, slots, self._factor_rank, number, self._device)
            for number, shape in enumerate(buckets)
        ]
        self._exact.allocate([BucketShape(b.rest, b.dtype) for b in self._buckets], header, leaves)
        for reducer, side in ((self._left, 0), (self._right, 1)):
            reducer.allocate([BucketShape(b.factors[side], b.dtype) for b in self._buckets], 1, self._ranks)
        self._no_header = torch.zeros(1, dtype=torch.float64, device=self._device)

    def begin(self, leaves: int) -> None:
        """See ``Reducer.begin``. What was left out of a longer or shorter step is scaled to this one."""
        self._nodes = len(NodeLayout.of(leaves, self._ranks).ranks[self._rank])
        if self._leaves not in (0, leaves):
            for bucket in self._buckets:
                bucket.scale_left_out(leaves / self._leaves)
        self._leaves = leaves
        self._exact.begin(leaves)
        self._left.begin(self._ranks)

    def staging(self, bucket: int, slot: int, turn: int | None = None) -> Tensor:
        """See ``Reducer.staging``."""
        return self._buckets[bucket].staging[slot]

    def start(self, bucket: int) -> None:
        """See ``Reducer.start``."""
        own = self._buckets[bucket]
        own.copy_rest([self._exact.staging(bucket, slot) for slot in range(self._nodes)])
        self._exact.start(bucket)
        own.project_right(self._nodes, self._left.staging(bucket, 0))
        self._left.start(bucket)

    def finish(self, header: Tensor) -> Tensor:
        """See ``Reducer.finish``."""
        headers = self._exact.finish(header)
        self._left.finish(self._no_header)
        self._right.begin(self._ranks)
        for number, bucket in enumerate(self._buckets):
            bucket.project_left(self._left.total(number), self._right.staging(number, 0))
            self._right.start(number)
        self._right.finish(self._no_header)
        for number, bucket in enumerate(self._buckets):
            bucket.restore(self._exact.total(number), self._right.total(number))
        return headers

    def total(self, bucket: int) -> Tensor:
        """See ``Reducer.total``."""
        return self._buckets[bucket].total

    def renew(self, bucket: int) -> None:
        """See ``Reducer.renew``."""
        self._buckets[bucket].total = torch.zeros_like(self._buckets[bucket].total)

    def release(self) -> None:
        """See ``Reducer.release``."""
        for part in (self._exact, self._left, self._right):
            part.release()


class _PowerSgdBucket:
    """One bucket: matrices that are compressed, and the rest, each in its place."""

    def __init__(self, shape: BucketShape, slots: int, rank: int, number: int, device: torch.device) -> None:
        self.dtype = shape.dtype
        self.staging = torch.zeros(slots, shape.numel, dtype=shape.dtype, device=device)
        self.total = torch.zeros(shape.numel, dtype=shape.dtype, device=device)
        self._matrices: list[_Matrix] = []
        self._rest: list[slice] = []
        generator = torch.Generator().manual_seed(derive_seed(0, "powersgd", number))
        position = 0
        for member in shape.members or ((shape.numel,),):
            size = torch.Size(member).numel()
            place = slice(position, position + size)
            rows = member[0] if member else 1
            columns = size // max(rows, 1)
            if shape.dtype in _COMPRESSED and (rows + columns) * rank < rows * columns:
                first = torch.randn(columns, rank, generator=generator, dtype=shape.dtype).to(device)
                self._matrices.append(_Matrix(place, rows, columns, first))
            else:
                self._rest.append(place)
            position += size
        self._rest_packed = _places(place.stop - place.start for place in self._rest)
        self._lefts = _places(m.rows * m.rank for m in self._matrices)
        self._rights = _places(m.columns * m.rank for m in self._matrices)

    @property
    def rest(self) -> int:
        """Number of values that are summed whole."""
        return sum(place.stop - place.start for place in self._rest)

    @property
    def factors(self) -> tuple[int, int]:
        """Sizes of the left and the right factors."""
        return sum(m.rows * m.rank for m in self._matrices), sum(m.columns * m.rank for m in self._matrices)

    def copy_rest(self, targets: list[Tensor]) -> None:
        for node, target in zip(self.staging, targets):
            for here, there in zip(self._rest, self._rest_packed):
                target[there] = node[here]

    def project_right(self, nodes: int, target: Tensor) -> None:
        """Adds this rank's nodes to what it has left out, and writes P."""
        for matrix, place in zip(self._matrices, self._lefts):
            for node in self.staging[:nodes]:
                matrix.left_out.add_(node[matrix.place].view_as(matrix.left_out))
            target[place] = (matrix.left_out @ matrix.right).view(-1)

    def project_left(self, summed: Tensor, target: Tensor) -> None:
        """Takes the sum of all P, and writes R."""
        for matrix, left, right in zip(self._matrices, self._lefts, self._rights):
            matrix.left = torch.linalg.qr(summed[left].view(matrix.rows, matrix.rank)).Q
            target[right] = (matrix.left_out.t() @ matrix.left).view(-1)
            matrix.left_out.sub_(matrix.left @ target[right].view(matrix.columns, matrix.rank).t())

    def restore(self, rest: Tensor, summed: Tensor) -> None:
        """Writes the total from what was summed whole and the sum of all R."""
        for here, there in zip(self._rest, self._rest_packed):
            self.total[here] = rest[there]
        for matrix, place in zip(self._matrices, self._rights):
            right = summed[place].view(matrix.columns, matrix.rank)
            self.total[matrix.place] = (matrix.left @ right.t()).view(-1)
            matrix.right = torch.nn.functional.normalize(right, dim=0)

    def scale_left_out(self, factor: float) -> None:
        for matrix in self._matrices:
            matrix.left_out.mul_(factor)


class _Matrix:
    """One compressed gradient: its place in the bucket, and what is kept of it from step to step."""

    def __init__(self, place: slice, rows: int, columns: int, right: Tensor) -> None:
        self.place, self.rows, self.columns, self.rank = place, rows, columns, right.shape[1]
        self.right = right
        self.left = right.new_zeros(rows, self.rank)
        self.left_out = right.new_zeros(rows, columns)


def _places(sizes: Iterable[int]) -> list[slice]:
    """The slices of parts of these sizes, one after the other."""
    places: list[slice] = []
    for size in sizes:
        start = places[-1].stop if places else 0
        places.append(slice(start, start + size))
    return places
