"""The memory that ranks share, where it is refused."""

import resource

import pytest
import torch.distributed as dist
from tests.ranks import run_ranks

from lockstep.distributed.shared_memory import is_available, share_memory
from lockstep.errors import ConfigError


def refused(world):
    if not world.is_main:  # the main one fails before it tells the others where the memory is
        return ""
    hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    with pytest.raises(ConfigError) as refusal:
        share_memory(1 << 20, dist.group.WORLD)
    resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
    return str(refusal.value)


@pytest.mark.fault("T2")
@pytest.mark.skipif(not is_available(), reason="ranks share memory on x86-64 Linux")
def test_memory_that_a_limit_refuses_is_an_error_with_the_limits():
    message, _ = run_ranks(refused, 2)
    assert message.startswith("Ranks of this host share 1.05 MB of memory, and that was refused: File too large.")
    assert "ulimit -f" in message
