"""What a process frees stays with it, and none of its results change."""

import subprocess
import sys

import pytest

_BEGIN = """
import resource, threading, torch
from lockstep.run.session import keep_freed_memory
torch.set_num_threads(1)
def faults():
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    blocks = [torch.ones(megabytes * 262144) for megabytes in (100, 40, 3, 3)]
    total = sum(block.sum(dtype=torch.float64).item() for block in blocks)
    assert total == 146 * 262144, total
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before
"""


def _printed(code):
    done = subprocess.run([sys.executable, "-c", _BEGIN + code], capture_output=True, text=True, check=True)
    return [int(word) for word in done.stdout.split()]


@pytest.mark.slow
def test_memory_of_one_step_serves_the_next():
    code = "assert keep_freed_memory()\nprint(*[faults() for _ in range(8)])"
    first, *others = _printed(code)
    assert first > 10_000, "the first step asks the system for its pages"
    assert sum(others[3:]) < first / 100, "one of those before may still fill a gap that the first had left"


@pytest.mark.slow
def test_without_it_every_step_asks_the_system_again():
    """The reason for all this; when it fails, glibc has learnt to keep large blocks and the module can go."""
    first, second, third = _printed("print(faults(), faults(), faults())")
    assert min(second, third) > first / 4


def test_a_thread_gets_blocks_larger_than_its_own_heap():
    code = """
assert keep_freed_memory()
found = []
thread = threading.Thread(target=lambda: found.extend([faults(), faults()]))
thread.start(); thread.join()
print(*found)
"""
    assert len(_printed(code)) == 2
