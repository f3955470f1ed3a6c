"""The one module that asks for the type of a device."""

import logging
import subprocess
import sys

import pytest
import torch

from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.runtime import devices


def rank_of(rank, ranks):
    """A rank of one host."""
    return World(rank=rank, world_size=ranks, local_rank=rank, local_world_size=ranks, rendezvous="file:///unused")


@pytest.fixture
def two_gpus(monkeypatch):
    """A process that sees two GPUs; returns those that were selected."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    for name in ("NCCL_HOSTID", "CUBLAS_WORKSPACE_CONFIG", "LOCKSTEP_DEVICES"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return chosen


@pytest.mark.parametrize("kind", ["mps", "xpu"])
def test_a_device_that_is_not_supported_is_refused_in_a_sentence(monkeypatch, caplog, kind):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device(kind))
    with caplog.at_level(logging.WARNING):
        assert devices.choose_device(World()) == torch.device("cpu")
    assert caplog.messages == [
        f"This host has a device of type {kind}, which Lockstep does not use yet: it trains on the CPU. NVIDIA GPUs "
        "are supported."
    ]


def test_the_other_ranks_do_not_say_it_again(monkeypatch, caplog):
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda check_available=False: torch.device("mps"))
    devices.choose_device(rank_of(1, 2))
    assert caplog.messages == []


def test_a_rank_has_the_gpu_of_its_number(two_gpus):
    assert devices.choose_device(rank_of(1, 2)) == torch.device("cuda", 1)
    assert two_gpus == [1]


def test_ranks_that_share_a_gpu_are_of_different_hosts_for_nccl(two_gpus, monkeypatch):
    monkeypatch.setenv("LOCKSTEP_DEVICES", "1,1")
    assert devices.choose_device(rank_of(1, 2)) == torch.device("cuda", 1)
    assert devices.os.environ["NCCL_HOSTID"] == "lockstep-1"


def test_more_ranks_than_gpus_are_refused(two_gpus):
    with pytest.raises(ConfigError, match="Rank 2 is number 2 on its host, which shows 2 CUDA devices"):
        devices.choose_device(rank_of(2, 3))


def test_nothing_is_queued_on_a_cpu():
    cpu = torch.device("cpu")
    assert devices.new_stream(cpu) is None
    assert devices.collectives_for(cpu) == "gloo"
    assert devices.gpu_generators([cpu]) == []
    with devices.on_stream(None), devices.selected(cpu):
        devices.wait_for(cpu)


_NO_CUDA = """
import torch

def refuse(*_):
    raise AssertionError("CUDA is opened where ranks are forked: none of them could use it")

for name in ("is_available", "device_count", "is_initialized", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, refuse)
import lockstep.job.rank, lockstep.launch.fork_server, lockstep.run, lockstep.scale.rank, lockstep.verify.rank
import lockstep.strategies.open_strategy, lockstep.runtime.lazy_compiler
import lockstep.runtime.devices
lockstep.runtime.lazy_compiler.postpone_compiler()
"""


@pytest.mark.slow
def test_what_is_imported_before_ranks_are_forked_opens_no_gpu():
    done = subprocess.run([sys.executable, "-c", _NO_CUDA], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
