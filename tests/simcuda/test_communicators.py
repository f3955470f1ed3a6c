"""NCCL's communicators on simulated devices: all are made before the first step, in one order on all ranks."""

import pytest
import torch
import torch.distributed as dist
from tests.simcuda import nccl
from tests.simcuda.layouts import LAYOUTS
from tests.simcuda.trainings import train

from lockstep.distributed import process_group
from lockstep.distributed.process_group import open_group, open_process_group

pytestmark = pytest.mark.slow
MOST = {
    "ddp 2": 1,
    "ddp 2, sync_batch_norm": 2,
    "fsdp 2": 1,
    "tensor 2": 1,
    "parameter_server 2": 2,
    "parameter_server 4, two servers": 3,
    "pipeline 2": 4,
    "pipeline 3": 6,
    "pipeline 2, interleaved": 6,
    "data x tensor": 3,
    "data x pipeline": 6,
    "fsdp x pipeline": 6,
}
"""The communicators of the rank that has most of them, by layout."""
OTHERS = {"ddp 2, sync_batch_norm": (2, "ddp", {"sync_batch_norm": True})}


def options_of(layout):
    """Ranks, strategy and options of a layout."""
    return {**LAYOUTS, **OTHERS}[layout]


@pytest.mark.parametrize("layout", MOST)
def test_communicators_are_made_before_the_first_step(machine, layout):
    ranks, strategy, options = options_of(layout)
    model = "convolutions" if "batch_norm" in layout else "perceptron"
    found = machine.run(train, ranks, model, strategy, options)
    assert [each.added for each in found] == [()] * ranks
    assert max(len(each.wired) for each in found) == MOST[layout]


def trained_unconnected(world):
    """Trains with groups that nobody uses before they are needed; returns what was made within steps."""
    process_group.connect = lambda group, device: None
    return train(world, "perceptron", "ddp", {}).added


def test_a_communicator_that_is_made_within_a_step_is_found(machine):
    assert machine.run(trained_unconnected, 2) == [("0",)] * 2


def open_bound(world, backend="cpu:gloo,cuda:nccl"):
    """Opens the default group as a script does that gives its device."""
    device = torch.device("cuda", world.local_rank)
    torch.cuda.set_device(device)
    dist.init_process_group(
        backend,
        init_method=world.rendezvous,
        rank=world.rank,
        world_size=world.world_size,
        device_id=device,
    )


def trained_in_bound_group(world, strategy, options):
    """Trains in a group that the script has opened with its device."""
    open_bound(world)
    return train(world, "perceptron", strategy, options)


@pytest.mark.parametrize(
    "layout",
    [
        "ddp 2",
        "pipeline 3",
        *("fsdp 2", "parameter_server 4, two servers", "data x pipeline", "data x tensor"),
    ],
)
def test_a_script_may_have_given_its_device(machine, trained, layout):
    """Every group is split from its group then, and ranks send to each other over the communicators of groups."""
    ranks, strategy, options = options_of(layout)
    found = machine.run(trained_in_bound_group, ranks, strategy, options)
    (reference,) = trained("single", "perceptron")
    if "tensor" not in layout:
        assert {each.fingerprint for each in found} == {reference.fingerprint}
    assert [each.added for each in found] == [()] * ranks
    assert [each.races for each in found] == [{}] * ranks


def opened_in_two_orders(world):
    """Opens two groups in another order on rank 0 than on the others."""
    nccl.FIRST_USE_SECONDS = 0.5
    torch.cuda.set_device(world.local_rank)
    with open_process_group(world, backend="cpu:gloo,cuda:nccl", timeout=20):
        members = [[0, 1], [0, 1, 2]]
        for each in members if world.rank else members[::-1]:
            open_group(each, device=torch.device("cuda", world.local_rank))


def test_groups_that_are_opened_in_two_orders_are_a_deadlock(machine):
    with pytest.raises(RuntimeError, match=r"opened here with ranks .* elsewhere with .*: deadlock"):
        machine.run(opened_in_two_orders, 3)


def bound_alone(world):
    """Gives its device, where the others do not."""
    nccl.FIRST_USE_SECONDS = 0.5
    if world.rank == 0:
        open_bound(world)
    else:
        torch.cuda.set_device(world.local_rank)
        dist.init_process_group("nccl", init_method=world.rendezvous, rank=world.rank, world_size=world.world_size)


def test_a_group_with_a_device_waits_for_the_communicator_of_all_its_ranks(machine):
    with pytest.raises(RuntimeError, match="'0' is used first here, and not by its other ranks: deadlock"):
        machine.run(bound_alone, 2)


def part_over_gloo(world, bound):
    """A script opens a gloo group of some ranks, after the default group."""
    nccl.FIRST_USE_SECONDS = 0.5
    if bound:
        open_bound(world)
        dist.new_group([0, 1], backend="gloo")
        return True
    with open_process_group(world, backend="cpu:gloo,cuda:nccl", timeout=20):
        dist.new_group([0, 1], backend="gloo")
    return True


def test_a_gloo_group_of_some_ranks_is_why_lockstep_gives_no_device(machine):
    with pytest.raises(RuntimeError, match="'split 1' is used first here"):
        machine.run(part_over_gloo, 3, True)
    assert machine.run(part_over_gloo, 3, False) == [True] * 3


def hooked(world):
    """Trains DistributedDataParallel with the ordered hook; returns the communicators."""
    from torch.nn.parallel import DistributedDataParallel

    from lockstep.reduce import OrderedHookState, ordered_hook

    torch.cuda.set_device(world.local_rank)
    with open_process_group(world, backend="cpu:gloo,cuda:nccl", timeout=20):
        wrapped = DistributedDataParallel(torch.nn.Linear(3, 2).cuda(), device_ids=[world.local_rank], init_sync=False)
        wrapped.register_comm_hook(OrderedHookState(), ordered_hook)
        for _ in range(3):
            wrapped(torch.ones(4, 3, device="cuda")).sum().backward()
        return nccl.communicators()


def test_the_hook_of_torchs_own_class_needs_one_communicator(machine):
    assert machine.run(hooked, 2) == [("0",)] * 2
