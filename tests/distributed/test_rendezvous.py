"""The address of the rendezvous, what is said of one that is invalid, and the group of a script."""

import gc
import weakref

import pytest
import torch.distributed as dist
from torch.distributed.rendezvous import _rendezvous_handlers

from lockstep.core.world import World
from lockstep.distributed.rendezvous import meeting_address, open_store, register_env_rendezvous
from lockstep.errors import ConfigError, LockstepError


def world(rendezvous):
    return World(rank=0, world_size=2, local_world_size=2, rendezvous=rendezvous)


def test_the_address_is_that_of_the_url_or_of_the_environment(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.2")
    monkeypatch.setenv("MASTER_PORT", "7")
    assert meeting_address(world("tcp://[fd00::1]:29500")) == ("fd00::1", 29500)
    assert meeting_address(world("env://")) == ("10.0.0.2", 7)
    assert meeting_address(world("file:///tmp/meeting")) is None


@pytest.mark.parametrize("address", ["tcp://10.0.0.1", "tcp://:1", "tcp://a:port"])
def test_an_address_without_host_or_port_is_refused(address):
    with pytest.raises(ConfigError, match="needs a host and a port"):
        meeting_address(world(address))


def test_an_environment_without_an_address_is_refused(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR is ''"):
        open_store(world("env://"), 1.0)


@pytest.mark.fault("S2")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_name_that_a_rank_does_not_know_is_told_with_what_to_set(rank):
    """As the names of nodes that only the cluster's controller knows: the other ranks were told to look at rank 0."""
    of_rank = World(rank=rank, world_size=2, local_world_size=2, rendezvous="tcp://nowhere:29500")
    with pytest.raises(LockstepError, match=r"Name or service not known\. Set MASTER_ADDR"):
        open_store(of_rank, 0.0)


def test_an_unknown_scheme_is_refused():
    with pytest.raises(ConfigError, match="'udp://a:1' is not known"):
        open_store(world("udp://a:1"), 1.0)


def test_the_group_of_a_script_outlives_it(tmp_path, monkeypatch):
    """Its destructor waited for a thread that waited for Python's lock: a script on three ranks hung at its end."""
    monkeypatch.setitem(_rendezvous_handlers, "env", None)
    alone = World(launcher="lockstep", rendezvous=f"file://{tmp_path}/store", run_id="test")
    register_env_rendezvous(alone)
    dist.init_process_group("gloo")
    group = weakref.ref(dist.group.WORLD)
    dist.destroy_process_group()
    gc.collect()
    assert group() is not None
