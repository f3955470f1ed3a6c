"""The installed torch still says and names what Lockstep recognises of it."""

import multiprocessing
import re
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lockstep.errors import ConfigError
from lockstep.runtime.stack_dump import Mark
from lockstep.runtime.torch_internals import (
    FRAMES,
    LOADER_TIMED_OUT,
    LOST_PEER,
    MANY_WORKERS,
    NO_VALUES_HERE,
    OTHER_TYPE,
    OVERWRITTEN,
    USED_UP,
    FrameKind,
    kind_of_frame,
    made_optimizers,
    opened_groups,
)

TORCH = Path(torch.__file__).parent


class Stuck(Dataset):
    """A set whose device does not answer until it is told to."""

    def __init__(self):
        self.answers = multiprocessing.get_context("fork").Event()

    def __len__(self):
        return 1

    def __getitem__(self, index):
        self.answers.wait()
        return index


def test_a_loader_that_times_out_says_so():
    stuck = Stuck()
    iterator = iter(DataLoader(stuck, num_workers=1, timeout=0.1, multiprocessing_context="fork"))
    with pytest.raises(RuntimeError) as caught:
        next(iterator)
    stuck.answers.set()
    iterator._shutdown_workers()
    assert LOADER_TIMED_OUT.is_in(str(caught.value))


def test_a_loader_with_too_many_workers_says_so():
    with pytest.warns(UserWarning) as caught:
        DataLoader(Stuck(), num_workers=100_000)
    assert MANY_WORKERS.is_in(str(caught[0].message))


def test_an_operator_on_a_tensor_without_values_says_so():
    layer = nn.Linear(2, 2, device="meta")
    with pytest.raises((RuntimeError, NotImplementedError)) as caught:
        layer(torch.zeros(1, 2)).sum().item()
    assert NO_VALUES_HERE.is_in(str(caught.value))


@pytest.mark.parametrize(
    "layer", [nn.Linear(2, 2), nn.Conv1d(1, 1, 1), nn.GRU(2, 2)], ids=lambda each: type(each).__name__
)
def test_an_operator_on_tensors_of_several_types_says_so(layer):
    with pytest.raises((RuntimeError, ValueError)) as caught:
        layer(torch.zeros(1, 1, 2, dtype=torch.float64))
    assert OTHER_TYPE.is_in(str(caught.value))


def test_a_backward_pass_whose_tensor_was_written_to_says_so():
    output = nn.Linear(2, 2)(torch.ones(1, 2)).sigmoid()
    loss = output.sum()
    output.add_(1)
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert OVERWRITTEN.is_in(str(caught.value))


def test_a_second_backward_pass_through_one_graph_says_so():
    loss = nn.Linear(2, 2)(torch.ones(1, 2)).sigmoid().sum()
    loss.backward()
    with pytest.raises(RuntimeError) as caught:
        loss.backward()
    assert USED_UP.is_in(str(caught.value))


def test_other_messages_are_not_taken_for_these():
    for message in (LOADER_TIMED_OUT, NO_VALUES_HERE, LOST_PEER):
        assert not message.is_in("expected scalar type Float but found Half")


@pytest.mark.parametrize("text", LOST_PEER.texts)
def test_a_lost_peer_is_recognised_within_a_longer_message(text):
    assert LOST_PEER.is_in(f"[../gloo/transport/tcp/pair.cc:534] {text} [127.0.0.1]:4242")


@pytest.mark.parametrize("frame", FRAMES, ids=lambda frame: frame.file)
def test_the_files_and_functions_of_frames_exist(frame):
    path = TORCH.parent / frame.file
    assert path.is_dir() if frame.file.endswith("/") else path.is_file()
    for function in frame.functions:
        assert re.search(rf"^\s*def {function}\(", path.read_text(), re.MULTILINE), function


def test_a_frame_is_known_by_its_file_and_its_function():
    file = str(TORCH / "utils/data/dataloader.py")
    assert kind_of_frame(file, "_next_data") is Mark.WAITS_FOR_WORKER
    assert kind_of_frame(file, "__init__") is None
    assert kind_of_frame("/home/u/train.py", "_next_data") is None
    assert kind_of_frame(str(TORCH / "nn/parallel/distributed.py"), "forward") is FrameKind.AUTOGRAD


def optimizers_and_groups(world, meeting):
    """The marks of an optimizer and of groups, before and after they are made, and after another group is destroyed."""
    import torch.distributed as dist

    before = made_optimizers()
    torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    found = [before, made_optimizers(), opened_groups()]
    dist.barrier()
    dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{meeting}_{world.rank}", rank=0, world_size=1)
    dist.destroy_process_group()
    return [*found, opened_groups()]


def test_optimizers_and_groups_leave_a_mark(tmp_path):
    assert run_ranks(optimizers_and_groups, 2, str(tmp_path / "meeting")) == [[False, True, False, True]] * 2


def test_an_error_of_torch_is_explained_and_any_other_passes():
    explained, value = NO_VALUES_HERE.explained, torch.empty(1, device="meta")
    with pytest.raises(ConfigError, match=r"^Do this\. Error from torch: .*meta") as caught, explained("Do this."):
        value.item()
    assert isinstance(caught.value.__cause__, RuntimeError)
    with pytest.raises(RuntimeError, match="another") as caught, explained("Do this."):
        raise RuntimeError("another")
    assert type(caught.value) is RuntimeError
