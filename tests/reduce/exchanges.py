"""Bodies of ranks that reduce known values for many steps and compare every sum with one written by hand."""

import os
import random
import time
from pathlib import Path

import torch
import torch.distributed as dist

from lockstep.core.plan import share
from lockstep.errors import StallError
from lockstep.reduce import (
    BucketShape,
    OrderedReducer,
    RingReducer,
    SharedMemoryReducer,
    open_reducer,
    shared_memory,
)
from lockstep.reduce.reducer import NodeLayout

CPU = torch.device("cpu")
SHAPES = [
    BucketShape(1, torch.float32),
    BucketShape(7, torch.float64),
    BucketShape(1000, torch.bfloat16),
    BucketShape(33, torch.float16),
    BucketShape(4097, torch.float32),
    BucketShape(0, torch.float32),
    BucketShape(2, torch.float32),
]
HEADER = 3


def open_one(kind, world, timeout=30.0):
    """A reducer by name; ``sharded`` is shared memory in which even a bucket of one element is shared out."""
    ranks = list(range(world.world_size))
    if kind == "collectives":
        return OrderedReducer(dist.group.WORLD, dist.new_group(ranks), CPU)
    if kind == "ring":
        return RingReducer(dist.group.WORLD, CPU)
    if kind in ("bf16", "powersgd"):
        return open_reducer(kind, dist.group.WORLD, CPU, timeout, powersgd_rank=2)
    shared_memory._FOLDED_BY_ALL_BYTES = 0 if kind == "sharded" else 1 << 40
    return SharedMemoryReducer(dist.group.WORLD, timeout)


def leaf(step, bucket, k, shape):
    """The value of one micro-batch: numbers of very different sizes, so that the order of adds shows."""
    generator = torch.Generator().manual_seed(step * 10_000 + bucket * 100 + k)
    values = torch.randn(shape.numel, generator=generator) * 10.0 ** torch.randint(
        -3, 4, (shape.numel,), generator=generator
    )
    return values.to(shape.dtype)


def tree_sum(values):
    """The sum written as the recursion it is: split at the largest power of two below the length."""
    if len(values) == 1:
        return values[0].clone()
    half = 1 << ((len(values) - 1).bit_length() - 1)
    return tree_sum(values[:half]) + tree_sum(values[half:])


def reduce_steps(world, kind, all_leaves, most, pause=0.0, shapes=None):
    """Runs a step for each number of leaves. Returns what was wrong, in words; nothing if all was right."""
    shapes = shapes or SHAPES
    reducer = open_one(kind, world)
    reducer.allocate(shapes, HEADER, most)
    delay = random.Random(world.rank)
    wrong = []

    def wait():
        if pause and delay.random() < 0.5:
            time.sleep(delay.random() * pause)

    for step, leaves in enumerate(all_leaves):
        reducer.begin(leaves)
        hand_in(reducer, world, step, leaves, shapes, wait)
        headers = reducer.finish(torch.tensor([step, world.rank, leaves], dtype=torch.float64))
        wait()
        wrong += compare(reducer, headers, world, step, leaves, shapes, exact=kind != "ring")
    return wrong


def hand_in(reducer, world, step, leaves, shapes, wait):
    mine = NodeLayout.of(leaves, world.world_size).ranks[world.rank]
    for bucket, shape in enumerate(shapes):
        for slot, node in enumerate(mine):
            staging = reducer.staging(bucket, slot)
            staging.fill_(float("nan"))
            wait()
            staging.copy_(tree_sum([leaf(step, bucket, k, shape) for k in range(node.start, node.stop)]))
        reducer.start(bucket)
        wait()


def compare(reducer, headers, world, step, leaves, shapes, exact):
    expected = torch.tensor([[step, rank, leaves] for rank in range(world.world_size)], dtype=torch.float64)
    wrong = [] if torch.equal(headers, expected) else [f"step {step}: headers {headers.tolist()}"]
    for bucket, shape in enumerate(shapes):
        total = reducer.total(bucket)
        by_hand = tree_sum([leaf(step, bucket, k, shape) for k in range(leaves)])
        alike = torch.equal(total, by_hand) if exact else close(total, by_hand, step, bucket, leaves, shape)
        if not alike:
            wrong.append(f"step {step}, {leaves} leaves, bucket {bucket}: {total[:3]} and not {by_hand[:3]}")
    return wrong


def close(total, by_hand, step, bucket, leaves, shape):
    """Within the error bound of any order of sums: leaves * unit roundoff * sum of sizes."""
    sizes = sum(leaf(step, bucket, k, shape).double().abs() for k in range(leaves))
    return bool(((total.double() - by_hand.double()).abs() <= 2 * leaves * torch.finfo(shape.dtype).eps * sizes).all())


def leave_out(world, absent, timeout):
    """The ranks of ``absent`` do not come to the step; the others say what they were told."""
    reducer = open_one("shared", world, timeout)
    reducer.allocate([BucketShape(5, torch.float32)], HEADER, world.world_size)
    if world.rank in absent:
        return None
    reducer.begin(world.world_size)
    reducer.staging(0, 0).fill_(1.0)
    reducer.start(0)
    try:
        reducer.finish(torch.zeros(HEADER, dtype=torch.float64))
    except StallError as error:
        return str(error)
    return "no error"


def traces(world, kind):
    """Things that could outlive this rank: names in /dev/shm, and descriptors that programs inherit."""
    reducer = open_one(kind, world)
    reducer.allocate(SHAPES, HEADER, world.world_size)
    dist.barrier()
    names = [path.name for path in Path("/dev/shm").iterdir() if "lockstep" in path.name]
    named = [name for name in names if not name.startswith("lockstep-run-")]  # a launcher's, of another test
    memory = [int(link.name) for link in Path("/proc/self/fd").iterdir() if "memfd:lockstep" in str(link.resolve())]
    dist.barrier()
    return named, [descriptor for descriptor in memory if os.get_inheritable(descriptor)], bool(memory)


def kinds_of(world):
    from lockstep.errors import ConfigError
    from lockstep.reduce import open_reducer

    group = dist.group.WORLD
    found = [
        type(open_reducer("ordered", group, CPU, 10.0)).__name__,
        type(open_reducer("ordered", group, CPU, 10.0, shared=False)).__name__,
        type(open_reducer("ring", group, CPU, 10.0)).__name__,
    ]
    try:
        open_reducer("orderd", group, CPU, 10.0)
    except ConfigError as error:
        found.append(str(error))
    return found


def bytes_of(world, kind, leaves):
    reducer = open_one(kind, world)
    shape = BucketShape(64, torch.float32)
    reducer.allocate([shape], HEADER, leaves)
    reducer.begin(leaves)
    hand_in(reducer, world, 0, leaves, [shape], lambda: None)
    reducer.finish(torch.zeros(HEADER, dtype=torch.float64))
    assert len(share(leaves, world.world_size, world.rank)) <= leaves
    return reducer.bytes_sent
