"""Real ranks meet, are counted, and part."""

import gc
import os
import signal
import socket
import threading
import time
from pathlib import Path

import psutil
import pytest
import torch
import torch.distributed as dist
from tests.launch.hosts.host import free_port
from tests.launch.listening import listening_addresses
from tests.ranks import run_ranks

from lockstep.core.world import World
from lockstep.distributed.process_group import check_peers, open_group, open_process_group, roll_call
from lockstep.distributed.rendezvous import open_store
from lockstep.errors import ConfigError, RankError
from lockstep.runtime.heartbeat import Membership, read_beat


def total(world, offset):
    value = torch.tensor([world.rank + offset])
    dist.all_reduce(value)
    return int(value)


def is_open(world):
    return dist.is_initialized()


def fail_on_two(world):
    if world.rank == 2:
        raise ValueError("rank two says no")
    dist.barrier()


def meet_over(world, rendezvous):
    """Parts from the helper's group and meets again at another place."""
    dist.barrier()  # another rank may still be connecting
    dist.destroy_process_group()
    there = World(
        rank=world.rank,
        world_size=world.world_size,
        local_rank=world.rank,
        local_world_size=world.world_size,
        rendezvous=rendezvous,
    )
    with open_process_group(there, timeout=20, arrival_limit=20):
        return total(there, 1), sorted(set(listening_addresses(os.getpid())))


def meet_over_and_over(world, rendezvous):
    """Opens four groups at one place, one after the other, as a program does that trains four models."""
    dist.barrier()  # another rank may still be connecting
    dist.destroy_process_group()
    there = World(
        rank=world.rank,
        world_size=world.world_size,
        local_rank=world.rank,
        local_world_size=world.world_size,
        rendezvous=rendezvous,
    )
    found = []
    for offset in range(4):
        with open_process_group(there, timeout=20, arrival_limit=20):
            found.append(total(there, offset))
        if world.rank == 0:
            gc.collect()  # takes a while, so that the others are there first
    return found


def joined_then_finished(world, directory):
    dist.barrier()  # another rank may still be connecting
    dist.destroy_process_group()
    there = World(
        rank=world.rank,
        world_size=2,
        local_rank=world.rank,
        local_world_size=2,
        rendezvous=f"file://{directory}/meeting",
        run_directory=directory,
    )
    with open_process_group(there):
        inside = read_beat(Path(directory), world.rank).membership
    return [inside.name, read_beat(Path(directory), world.rank).membership.name]


def test_every_rank_takes_part_in_a_sum():
    assert run_ranks(total, 4, 10) == [46, 46, 46, 46]


def test_a_world_of_one_has_no_group():
    assert run_ranks(is_open, 1) == [False]


def test_a_failing_rank_is_raised_again_with_its_traceback():
    with pytest.raises(ValueError, match="rank two says no") as caught:
        run_ranks(fail_on_two, 3)
    assert "raised on rank 2 of 3" in caught.value.__notes__[0]


@pytest.mark.fault("X1")
def test_ranks_meet_over_a_socket_that_is_bound_to_the_named_address_only():
    results = run_ranks(meet_over, 3, f"tcp://127.0.0.1:{free_port()}")
    assert [total for total, _ in results] == [6, 6, 6]
    assert {address for _, addresses in results for address in addresses} == {"127.0.0.1"}


@pytest.mark.parametrize("scheme", ["file", "tcp"])
def test_a_program_may_open_one_group_after_another(scheme, tmp_path):
    """A script that trained one model after another ended in "Rank 0 connected twice": under torchrun always."""
    place = f"file://{tmp_path}/meeting" if scheme == "file" else f"tcp://127.0.0.1:{free_port()}"
    assert run_ranks(meet_over_and_over, 3, place) == [[3, 6, 9, 12]] * 3


def test_membership_is_told_to_the_supervisor(tmp_path):
    assert run_ranks(joined_then_finished, 2, str(tmp_path)) == [[Membership.JOINED.name, Membership.FINISHED.name]] * 2


def lonely(tmp_path, rank=0, run_id="one"):
    return World(
        rank=rank,
        world_size=4,
        local_rank=rank,
        local_world_size=4,
        rendezvous=f"file://{tmp_path}/meeting",
        run_id=run_id,
    )


@pytest.mark.fault("S1")
def test_a_missing_rank_is_named_after_the_limit(tmp_path):
    for rank in (1, 2):
        announce(lonely(tmp_path, rank))
    begin = time.monotonic()
    with pytest.raises(RankError, match=r"within 0\.3 s\. missing: rank 3; connected: 0-2\."):
        roll_call(open_store(lonely(tmp_path), 1.0), lonely(tmp_path), 0.3)
    assert time.monotonic() - begin < 3


@pytest.mark.fault("S4")
def test_two_runs_at_one_place_do_not_merge(tmp_path):
    announce(lonely(tmp_path))
    with pytest.raises(ConfigError, match=r"Rank 1 of run 'two' .* belongs to run 'one'"):
        roll_call(open_store(lonely(tmp_path), 1.0), lonely(tmp_path, 1, "two"), 0.2)


@pytest.mark.fault("S4")
def test_one_rank_cannot_be_claimed_twice(tmp_path):
    announce(lonely(tmp_path))
    with pytest.raises(ConfigError, match=r"Rank 0 connected twice .* env -u RANK -u WORLD_SIZE PROGRAM"):
        roll_call(open_store(lonely(tmp_path), 1.0), lonely(tmp_path), 0.2)


def announce(world):
    """One rank arrives, and does not find all others."""
    with pytest.raises(RankError):
        roll_call(open_store(world, 1.0), world, 0.05)


@pytest.mark.fault("S3")
def test_a_port_that_is_taken_is_a_sentence():
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        world = World(world_size=2, local_world_size=2, rendezvous=f"tcp://127.0.0.1:{port}")
        with pytest.raises(ConfigError, match=rf"cannot listen on 127\.0\.0\.1:{port}: Address already in use"):
            open_store(world, 1.0)


@pytest.mark.fault("S2")
def test_a_store_that_cannot_be_reached_is_a_sentence():
    world = World(
        rank=1,
        world_size=2,
        local_rank=1,
        local_world_size=2,
        launcher="lockstep",
        rendezvous=f"tcp://127.0.0.1:{free_port()}",
    )
    began = time.monotonic()
    with pytest.raises(RankError, match=r"Rank 1 could not connect to the store at 127\.0\.0\.1:") as raised:
        open_store(world, 0.5)
    assert time.monotonic() < began + 5, "torch by itself tries it twice, each time as long as it is told"
    assert str(raised.value).endswith("unset RANK and WORLD_SIZE.")


@pytest.mark.parametrize("rendezvous", ["http://here", "tcp://here", "tcp://here:port", "file://"])
def test_an_unknown_meeting_place_is_refused(rendezvous):
    with pytest.raises(ConfigError, match="rendezvous"):
        open_store(World(world_size=2, local_world_size=2, rendezvous=rendezvous), 1.0)


def test_an_environment_without_an_address_is_refused(monkeypatch):
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR is ''"):
        open_store(World(world_size=2, local_world_size=2, rendezvous="env://"), 1.0)


def with_another_secret(world, folder):
    """Rank 1 does not know the secret of the others; what each rank says."""
    Path(folder, f"key-{world.rank}").mkdir()
    Path(folder, f"key-{world.rank}", "rank-key").write_text("another" if world.rank == 1 else "one")
    os.environ["LOCKSTEP_RUN_DIRECTORY"] = f"{folder}/key-{world.rank}"
    with pytest.raises(RankError) as refused:
        check_peers(limit=20)
    return str(refused.value)


@pytest.mark.fault("X6")
def test_a_peer_that_does_not_know_the_secret_of_the_run_is_named(tmp_path):
    said = run_ranks(with_another_secret, 3, str(tmp_path))
    named = [text.partition(" does not.")[0].partition("lead to ")[2] for text in said]
    assert named == ["rank 1", "ranks 0, 2", "rank 1"]


def silent_on_one(world):
    if world.rank == 1:
        signal.pause()
    check_peers(limit=0.2)


@pytest.mark.fault("X6")
def test_a_peer_that_proves_nothing_is_not_waited_for_without_end():
    with pytest.raises(RankError, match=r"not every other rank has proven itself within 0\.2 s"):
        run_ranks(silent_on_one, 2)


def taken_for_a_rank(world):
    """Another program connects to the port of each new group before rank 1 does, until it is taken for rank 1."""
    store = dist.distributed_c10d._get_default_store()
    for trial in range(40):  # each time it may be rank 1 that listens
        if world.rank == 1:
            store.get(f"stranger-{trial}")
        else:
            known = listening()
            stranger = threading.Thread(target=connect, args=(known, store, f"stranger-{trial}"))
            stranger.start()
        open_group()


def listening():
    return {c.laddr.port for c in psutil.Process().net_connections() if c.status == psutil.CONN_LISTEN}


def connect(known, store, key):
    while not (new := listening() - known):
        time.sleep(0.001)
    for number in range(4):
        CONNECTED.append(socket.create_connection(("127.0.0.1", new.copy().pop())))
        CONNECTED[-1].sendall(number.to_bytes(8, "little") + os.urandom(100))
    store.set(key, "connected")


CONNECTED = []


@pytest.mark.slow
@pytest.mark.fault("X6")
def test_a_stranger_that_is_taken_for_a_rank_ends_the_run_before_anything_is_sent_to_it():
    with pytest.raises(RankError, match="has proven itself"):
        run_ranks(taken_for_a_rank, 2, timeout=100)
