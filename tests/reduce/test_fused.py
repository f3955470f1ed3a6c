"""The fused kernel adds what the collectives add, bit for bit: on host memory in Triton's interpreter, and as compiled.

The interpreter does not round to bfloat16 as devices do, so sums of bfloat16 are small integers here.
"""

import collections
import importlib.util
import logging
import os
import re
from itertools import chain

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.ranks import run_ranks
from tests.reduce import exchanges

from lockstep.core.summation_tree import fold, merges_after_nodes
from lockstep.distributed.shared_memory import share_memory
from lockstep.reduce.reducer import BucketShape, NodeLayout

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed (pip install triton==3.7.1)"
)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16)
NUMBERS = (1, 16, 33, 1111, 4097)


@settings(deadline=None)
@given(st.integers(1, 40), st.integers(1, 12))
def test_nodes_merge_as_the_tree_has_it(leaves, holders):
    """Replayed on a stack of names, the merges give the nesting that ``fold`` gives."""
    nodes = [*chain.from_iterable(NodeLayout.of(leaves, holders).ranks)]
    stack = []
    for node, merges in zip(nodes, merges_after_nodes(nodes, leaves)):
        stack.append(str(node))
        for _ in range(merges):
            right = stack.pop()
            stack[-1] = f"({stack[-1]} {right})"
    assert stack == [fold({node: str(node) for node in nodes}, leaves, lambda a, b: f"({a} {b})")]


def values_of(numel, dtype, generator):
    """Numbers of very different sizes, so that the order of adds shows."""
    if dtype is torch.bfloat16:
        return torch.randint(-4, 5, (numel,), generator=generator).to(dtype)
    sizes = 10.0 ** torch.randint(-3, 4, (numel,), generator=generator)
    return (torch.randn(numel, generator=generator) * sizes).to(dtype)


def interpreted(world, ranks):
    """Adds the shards of so many ranks one after another, in one process; returns what had other bits."""
    os.environ["TRITON_INTERPRET"] = "1"
    from lockstep.reduce.fused import add_shard, shard_edge

    wrong, generator = [], torch.Generator().manual_seed(ranks)
    for leaves in (1, 2, 3, ranks, 2 * ranks + 1, 13):
        layout = NodeLayout.of(leaves, ranks)
        nodes = [*chain.from_iterable(layout.ranks)]
        for dtype in DTYPES:
            for numel in NUMBERS:
                values = [values_of(numel, dtype, generator) for _ in nodes]
                expected = fold({n: v.clone() for n, v in zip(nodes, values)}, leaves, torch.add)
                sums = [torch.zeros(numel + 1, dtype=dtype) for _ in range(ranks)]
                table = torch.tensor([each.data_ptr() for each in (*values, *sums)])
                for rank in range(ranks):
                    edges = [shard_edge(numel, ranks, edge) for edge in (rank, rank + 1)]
                    add_shard(table, merges_after_nodes(nodes, leaves), ranks, edges, dtype)
                bits = expected.view(torch.uint8)
                if any(not torch.equal(each[:-1].view(torch.uint8), bits) or each[-1] for each in sums):
                    wrong.append((leaves, dtype, numel))
    return wrong


@needs_triton
@pytest.mark.parametrize("ranks", range(1, 9))
def test_a_shard_is_added_in_the_order_of_the_tree(ranks):
    assert run_ranks(interpreted, 1, ranks) == [[]]


@pytest.mark.parametrize("numel", [0, 1, 15, 16, 17, 100, 4097])
@pytest.mark.parametrize("ranks", [1, 2, 3, 7, 8])
def test_shards_begin_at_multiples_of_sixteen_and_cover_a_bucket(numel, ranks):
    pytest.importorskip("triton", reason="Triton is not installed")
    from lockstep.reduce.fused import shard_edge

    edges = [shard_edge(numel, ranks, edge) for edge in range(ranks + 1)]
    assert edges[0] == 0
    assert edges[-1] == numel
    assert edges == sorted(edges)
    assert all(edge % 16 == 0 or edge == numel for edge in edges)


class HostMemory:
    """``PeerMemory`` of ranks of one host, on a CPU."""

    def __init__(self, size, group, device, timeout):
        ranks, self._group = dist.get_world_size(group), group
        self._memory = share_memory(size * ranks, group)
        whole = torch.frombuffer(self._memory, dtype=torch.uint8)
        self.own = whole[size * dist.get_rank(group) :][:size]
        self.addresses = [whole.data_ptr() + size * rank for rank in range(ranks)]

    def barrier(self):
        dist.barrier(group=self._group)


SHAPES = [
    BucketShape(1, torch.float32),
    BucketShape(7, torch.float64),
    BucketShape(33, torch.float16),
    BucketShape(4097, torch.float32),
    BucketShape(0, torch.float32),
]


def reduced(world, leaves, most):
    """Steps of the fused reducer over shared memory; returns what was wrong."""
    os.environ["TRITON_INTERPRET"] = "1"
    from lockstep.reduce import fused

    fused._KINDS.pop(torch.float64)  # such a bucket goes over collectives
    own, gather = (dist.new_group([*range(world.world_size)]) for _ in range(2))

    def open_one(kind, world):
        made = fused.FusedReducer(dist.group.WORLD, exchanges.CPU, lambda size: HostMemory(size, own, None, 0.0))
        made._gather_group = gather  # collectives on a CPU need two groups
        return made

    exchanges.open_one = open_one
    return exchanges.reduce_steps(world, "fused", leaves, most, 0.002, SHAPES)


@needs_triton
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(5, marks=pytest.mark.slow)])
def test_steps_give_the_sums_of_the_tree_for_every_number_of_leaves(world_size):
    leaves = [*range(1, 8), *range(7, 0, -1)]
    assert run_ranks(reduced, world_size, leaves, 7, timeout=120) == [[]] * world_size


def trained(world):
    """The fingerprint of a short training on a CPU, whose gradients several ranks sum by the fused reducer."""
    os.environ["TRITON_INTERPRET"] = "1"
    from tests.simcuda.trainings import train

    from lockstep.reduce import fused
    from lockstep.strategies import open_strategy

    if world.world_size == 1:
        return train(world, "convolutions", "single", {}).fingerprint
    own, gather = (dist.new_group([*range(world.world_size)]) for _ in range(2))

    def open_reducer(name, group, device, *given, **named):
        made = fused.FusedReducer(group, device, lambda size: HostMemory(size, own, None, 0.0))
        made._gather_group = gather
        return made

    open_strategy.open_reducer = open_reducer
    return train(world, "convolutions", "ddp", {}).fingerprint


@needs_triton
def test_a_training_ends_in_the_bits_of_one_device():
    (expected,) = run_ranks(trained, 1, timeout=120)
    for ranks in (2, 3):
        assert run_ranks(trained, ranks, timeout=120) == [expected] * ranks


def opened(world, plant):
    """The name of the reducer that is opened after its trial, and what was logged."""
    os.environ["TRITON_INTERPRET"] = "1"
    from lockstep.reduce import fused

    fused._KINDS.pop(torch.bfloat16)  # see the module
    fused._TRIAL_NUMBERS = (1, 33, 1111)
    own = dist.new_group([*range(world.world_size)])

    class Memory(HostMemory):
        def __init__(self, size, group, device, timeout):
            super().__init__(size, own, device, timeout)

    if plant == "another order":
        fused.merges_after_nodes = reversed_merges
    lines = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    fused.logger.addHandler(handler)
    fused.logger.setLevel(logging.INFO)
    ordered = exchanges.open_one("collectives", world)
    reducer = fused.open_fused(ordered, dist.group.WORLD, exchanges.CPU, 30.0, Memory)
    return type(reducer).__name__, lines


def reversed_merges(nodes, leaves):
    """Adds from the right."""
    count = len([*nodes])
    return (0,) * (count - 1) + (count - 1,)


@needs_triton
def test_the_kernel_is_taken_if_its_sums_were_those_of_the_collectives():
    first, second = run_ranks(opened, 2, "", timeout=120)
    assert first == (
        "FusedReducer",
        ["Gradients are summed by the fused kernel, after its sums were those of the collectives."],
    )
    assert second == ("FusedReducer", [])


@needs_triton
def test_a_kernel_with_other_sums_is_not_taken_on_any_rank():
    first, second = run_ranks(opened, 2, "another order", timeout=120)
    assert first[0] == second[0] == "OrderedReducer"
    assert re.search(r"summed by collectives, not by the fused kernel: a sum of \d+ numbers", first[1][0])


class NoDriver:
    """Stands for the driver of a GPU, so that Triton compiles what it would launch."""

    def __init__(self, capability):
        self._capability = capability

    def get_current_device(self):
        return 0

    def get_current_stream(self, device=None):
        return 0

    def get_active_torch_device(self):
        return torch.device("cuda", 0)

    def get_current_target(self):
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", self._capability, 32)


def compiled(world):
    """How often the compiled kernel adds, by GPU, edges and number type; without a GPU."""
    from triton.runtime import driver

    from lockstep.reduce import fused

    found = {}
    for capability in (80, 90):
        driver.set_active(NoDriver(capability))
        fused._add_shard.device_caches.clear()
        for edges in ((0, 4096), (16, 33), (0, 1)):
            for dtype in DTYPES:
                arguments = (torch.int64, *edges, (0, 1, 0, 2), 2, *fused._KINDS[dtype], 1024)
                text = fused._add_shard.warmup(*arguments, grid=(1,)).asm["ptx"]
                names = re.findall(r"\b((?:add|sub|mul|fma)\.[\w.]*)", text)
                floats = [name for name in names if re.search(r"\.b?f\d+", name)]
                found[capability, edges, str(dtype)] = dict(collections.Counter(floats))
    return found


@needs_triton
def test_the_compiled_kernel_adds_once_for_each_merge_and_flushes_nothing():
    """Three merges of 1024 numbers by 128 threads: 24 adds, or 12 and more of two numbers, maybe as an fma with 1."""
    (found,) = run_ranks(compiled, 1, timeout=120)
    for (_, _, dtype), counts in found.items():
        ((name, count),) = counts.items()
        assert "ftz" not in name
        assert 12 <= count < 24 if "x2" in name else count == 24, counts
        assert name.startswith("add.") or (dtype == "torch.bfloat16" and name.startswith("fma.rn.bf16"))
