"""The memory of a rank under fsdp, to the byte: between steps, and at its peak within one."""

import gc

import pytest
import safetensors.torch
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.run import Run, RunOptions
from lockstep.strategies.absent import AbsentParameter

pytestmark = pytest.mark.timeout(300)
WIDTH, BLOCKS = 48, 8
WHOLE = BLOCKS * (WIDTH * WIDTH + WIDTH) * 4
"""Bytes of the parameters."""


class Rows(nn.Module):
    """Makes rows of numbers from whole ones, so that every float32 in memory is of the training."""

    def forward(self, number):
        return (number[:, None] * torch.arange(1, WIDTH + 1) % 7).float()


def live_bytes():
    """Of all float32 memory of this process, once each; scalars, such as losses and counters, left out."""
    tensors = [each for each in gc.get_objects() if issubclass(type(each), torch.Tensor)]
    local = [each for each in tensors if not (type(each) is AbsentParameter or each.is_meta)]
    kept = [each.untyped_storage() for each in local if each.dtype == torch.float32 and each.dim()]
    return sum({storage.data_ptr(): storage.nbytes() for storage in kept}.values())


def measure(world, again=True, watched=()):
    """Bytes after a step, and the most that was seen after forward and before backward of some blocks."""
    torch.manual_seed(0)
    model = nn.Sequential(Rows(), *[nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"strategy": "fsdp", "fsdp": {"reshard_after_forward": again}}
    given = given if world.world_size > 1 else {"strategy": "single"}
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, threads=1, **given), world)
    model, optimizer = run.prepare(model, optimizer)
    seen = []
    for block in (model[number] for number in watched):
        block.register_forward_hook(lambda *_: seen.append(live_bytes()))
        block.register_full_backward_pre_hook(lambda *_: seen.append(live_bytes()))
    data = TensorDataset(torch.arange(16), torch.arange(16) % WIDTH)
    for _ in run.epochs(1):
        for batch in run.batches(data):
            seen.clear()
            run.backward(batch, nn.CrossEntropyLoss())
            optimizer.step()
            del batch
    gc.collect()
    found = live_bytes(), max(seen, default=0)
    run.close()
    return found


def sent_and_kept(world, options):
    """Bytes sent in a step of four micro-batches a rank, bytes of memory after it, and the fingerprint."""
    torch.manual_seed(0)
    model = nn.Sequential(Rows(), *[nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])
    optimizer = torch.optim.AdamW(model.parameters())
    given = {"strategy": "fsdp", "fsdp": options, "checks": "off", "fingerprint_every": 0}
    run = Run(RunOptions.of(global_batch=8, micro_batches=8, threads=1, **given), world)
    model, optimizer = run.prepare(model, optimizer)
    for batch in run.batches(TensorDataset(torch.arange(8), torch.arange(8) % WIDTH)):
        before = run.strategy.bytes_sent
        run.backward(batch, nn.CrossEntropyLoss())
        sent = run.strategy.bytes_sent - before
        optimizer.step()
        del batch
    gc.collect()
    found = sent, live_bytes(), run.fingerprint()
    run.close()
    return found


def test_parameters_that_stay_whole_for_a_step_are_gathered_once_in_it_and_freed_after_it():
    """Rank sends its half of the parameters once, and half of the gradients for each of its four micro-batches."""
    kept = {"reshard_after_forward": False, "reshard_after_backward": False}
    for (sent, after, fingerprint), (more, _, other) in zip(
        run_ranks(sent_and_kept, 2, kept), run_ranks(sent_and_kept, 2, {}), strict=True
    ):
        assert sent == WHOLE // 2 + 4 * WHOLE // 2 < more
        assert after == 4 * WHOLE // 2
        assert fingerprint == other


def measure_save(world, folder):
    """The most that a rank has while the files of a checkpoint are written, and what it has afterwards."""
    torch.manual_seed(0)
    model = nn.Sequential(Rows(), *[nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS)])
    optimizer, seen = torch.optim.AdamW(model.parameters()), []
    run = Run(RunOptions.of(global_batch=8, micro_batches=4, threads=1, strategy="fsdp", directory=folder), world)
    model, optimizer = run.prepare(model, optimizer)
    genuine = safetensors.torch.save_file

    def save_file(*arguments, **settings):
        gc.collect()
        seen.append(live_bytes())
        return genuine(*arguments, **settings)

    safetensors.torch.save_file = save_file
    for batch in run.batches(TensorDataset(torch.arange(8), torch.arange(8) % WIDTH)):
        run.backward(batch, nn.CrossEntropyLoss())
        optimizer.step()
        optimizer.zero_grad()
        run.save(wait=True)
    gc.collect()
    found = max(seen), live_bytes()
    run.close()
    return found


@pytest.mark.slow
def test_no_rank_gathers_the_model_to_save_it(tmp_path):
    """Parameters and two moments of its rows, and a copy of a file's tensors on their way to it."""
    for most, after in run_ranks(measure_save, 4, str(tmp_path)):
        assert after == 3 * WHOLE // 4
        assert most <= 5 * WHOLE // 4


@pytest.mark.slow
def test_all_that_a_rank_has_between_steps_falls_with_the_number_of_ranks():
    """Parameters, gradients and two moments: nothing else of their size stays."""
    for world in (1, 2, 4):
        for after, _ in run_ranks(measure, world):
            assert after == 4 * WHOLE // world


@pytest.mark.slow
def test_the_peak_within_a_step_falls_with_the_number_of_ranks_and_with_resharding():
    peaks = {
        (world, again): [peak for _, peak in run_ranks(measure, world, again, (2, 4, 8), timeout=200)]
        for world, again in ((1, True), (2, True), (4, True), (4, False))
    }
    most = {case: max(found) for case, found in peaks.items()}
    assert most[2, True] < 0.6 * most[1, True]
    assert most[4, True] < 0.6 * most[2, True]
    assert most[4, True] < most[4, False] < most[2, True]
