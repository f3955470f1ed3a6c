"""Bodies of ranks that reduce gradients with the reducers that round or compress them."""

import torch
import torch.distributed as dist
from tests.reduce.exchanges import CPU, HEADER, leaf, tree_sum

from lockstep.reduce import BucketShape, open_reducer
from lockstep.reduce.reducer import NodeLayout

MEMBERS = ((24, 3, 4), (12,), (), (16, 16), (3, 2), (0, 3), (40, 20))
LEAVES = [8, 8, 3, 8, 1, 5, 8, 8, 2, 8, 8, 8, 7, 8]


def gradients(dtype=torch.float32):
    return BucketShape(sum(torch.Size(m).numel() for m in MEMBERS), dtype, MEMBERS)


def step_of(reducer, world, step, leaves, shapes, value=leaf):
    """One step; gives this rank's nodes of each bucket as they were handed in."""
    reducer.begin(leaves)
    handed = []
    for bucket, shape in enumerate(shapes):
        nodes = []
        for slot, node in enumerate(NodeLayout.of(leaves, world.world_size).ranks[world.rank]):
            nodes.append(tree_sum([value(step, bucket, k, shape) for k in range(node.start, node.stop)]))
            reducer.staging(bucket, slot).copy_(nodes[-1])
        reducer.start(bucket)
        handed.append(nodes)
    headers = reducer.finish(torch.full((HEADER,), float(world.rank), dtype=torch.float64))
    assert headers[:, 0].tolist() == list(range(world.world_size))
    return handed


def equal_everywhere(tensor):
    """True if all ranks hold the same bits."""
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, tensor.contiguous())
    return all(torch.equal(part, tensor) for part in parts)


def bf16_steps(world):
    """The faults of some steps, in words: bits that differ over ranks, or an error above the stated bound."""
    reducer = open_reducer("bf16", dist.group.WORLD, CPU, 30.0)
    shapes = [gradients(), gradients(torch.float64), gradients(torch.bfloat16)]
    reducer.allocate(shapes, HEADER, max(LEAVES))
    wrong, rounded = [], False
    for step, leaves in enumerate(LEAVES):
        step_of(reducer, world, step, leaves, shapes)
        holding = NodeLayout.of(leaves, world.world_size)
        for bucket, shape in enumerate(shapes):
            total = reducer.total(bucket)
            leaf_values = [leaf(step, bucket, k, shape) for k in range(leaves)]
            nodes = [tree_sum(leaf_values[n.start : n.stop]) for rank in holding.ranks for n in rank]
            exact, sizes = tree_sum(leaf_values), sum(node.double().abs() for node in nodes)
            off = (total.double() - exact.double()).abs()
            rounded |= bool(off.any())
            if not equal_everywhere(total):
                wrong.append(f"step {step}, bucket {bucket}: ranks differ")
            float32_adds = leaves * 2**-23 * sizes if bucket == 0 else 0.0
            bound = (2 * 2**-8 + 2**-16) * sizes + float32_adds if bucket < 2 else 0.0 * sizes
            if bool((off > bound).any()):
                wrong.append(f"step {step}, bucket {bucket}: off by {float((off / sizes).max()):.2e} of the sizes")
    return wrong, rounded


def powersgd_steps(world, rank):
    """The sums that came out and those that went in, over some steps, and what is left out in the end."""
    reducer = open_reducer("powersgd", dist.group.WORLD, CPU, 30.0, powersgd_rank=rank)
    shapes = [gradients(torch.float64), BucketShape(7, torch.float32)]
    reducer.allocate(shapes, HEADER, 8)
    into, out, equal = torch.zeros(shapes[0].numel).double(), torch.zeros(shapes[0].numel).double(), True
    exact_rest = True
    for step in range(12):
        step_of(reducer, world, step, 8, shapes)
        total = reducer.total(0)
        summed = [tree_sum([leaf(step, b, k, s) for k in range(8)]) for b, s in enumerate(shapes)]
        into, out = into + summed[0], out + total
        equal &= equal_everywhere(total)
        exact_rest &= torch.equal(reducer.total(1), summed[1])
        exact_rest &= all(torch.equal(total[part], summed[0][part]) for part in reducer._buckets[0]._rest)
    left_out = torch.zeros_like(into)
    for matrix in reducer._buckets[0]._matrices:
        left_out[matrix.place] = matrix.left_out.reshape(-1)
    dist.all_reduce(left_out)
    compressed = [(matrix.rows, matrix.columns) for matrix in reducer._buckets[0]._matrices]
    return into, out, left_out, equal, exact_rest, compressed


def low_rank(step, bucket, k, shape):
    """A gradient whose matrices have rank two, the same two directions in every micro-batch."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(2, generator=torch.Generator().manual_seed(100 * step + k), dtype=torch.float64)
    parts = []
    for member in shape.members:
        rows, columns = member[0], torch.Size(member).numel() // member[0]
        left = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
        right = torch.randn(2, columns, generator=generator, dtype=torch.float64)
        parts.append((left * weights @ right).reshape(-1))
    return torch.cat(parts)


def powersgd_recovers(world):
    """The largest error of each step, relative to the sum, where two columns are enough."""
    reducer = open_reducer("powersgd", dist.group.WORLD, CPU, 30.0, powersgd_rank=2)
    shape = BucketShape(24 * 20 + 30 * 16, torch.float64, ((24, 20), (30, 4, 4)))
    reducer.allocate([shape], HEADER, 8)
    errors = []
    for step in range(4):
        step_of(reducer, world, step, 8, [shape], low_rank)
        exact = tree_sum([low_rank(step, 0, k, shape) for k in range(8)])
        errors.append(float((reducer.total(0) - exact).norm() / exact.norm()))
    return errors


def powersgd_uneven(world):
    """Steps in which some ranks have no micro-batch, and one whose gradients are all zero; whether all stays finite."""
    reducer = open_reducer("powersgd", dist.group.WORLD, CPU, 30.0, powersgd_rank=2)
    reducer.allocate([gradients()], HEADER, 8)
    finite, last = True, torch.zeros(0)
    for step, leaves in enumerate(LEAVES):
        value = leaf if step not in (1, 2) else lambda step, bucket, k, shape: torch.zeros(shape.numel)
        step_of(reducer, world, step, leaves, [gradients()], value)
        last = reducer.total(0)
        finite &= bool(last.isfinite().all()) and equal_everywhere(last)
    return finite, float(last.norm())


def bytes_sent(world, kind, shared):
    """Bytes of one step with eight micro-batches for one bucket of gradients."""
    reducer = open_reducer(kind, dist.group.WORLD, CPU, 30.0, shared, powersgd_rank=2)
    shape = BucketShape(64 * 32 + 64, torch.float32, ((64, 32), (64,)))
    reducer.allocate([shape], HEADER, 8)
    step_of(reducer, world, 0, 8, [shape])
    return reducer.bytes_sent
