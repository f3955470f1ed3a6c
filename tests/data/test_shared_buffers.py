"""Memory that workers write into again and again: nothing is overwritten that somebody still holds."""

import os
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.data import Dataset

from lockstep.core.plan import BatchShape, SamplePlan
from lockstep.data import EvaluationLoader, StepLoader
from lockstep.data.reader import GroupedBatch
from lockstep.data.shared_buffers import SharedBuffers

LARGE = 20_000


class Blocks(Dataset):
    """Samples of 20 kB that tell who they are, too large to be sent by value."""

    def __len__(self):
        return 96

    def __getitem__(self, index):
        return {"x": torch.full((LARGE,), index % 256, dtype=torch.uint8), "index": index}


class Structured(Dataset):
    """Samples of many kinds."""

    def __len__(self):
        return 8

    def __getitem__(self, index):
        values = torch.arange(LARGE) + index
        return {
            "half": values.to(torch.bfloat16),
            "flags": values > 3,
            "pair": (values.double(), [torch.tensor(index), torch.zeros(0)]),
            "name": f"number {index}",
            "image": values[:LARGE].float().view(2, 100, 100),
        }


def blocks_of(batch):
    return {int(i): x for part in batch.micro_batches for i, x in zip(part.data["index"], part.data["x"])}


def loader_of(dataset, micro_batches, **options):
    plan = SamplePlan(samples=len(dataset), shape=BatchShape(global_batch=8, micro_batches=micro_batches), seed=3)
    return StepLoader(dataset, plan, **options)


@pytest.mark.parametrize("kept", [0, 1, 12])
def test_what_a_loop_keeps_is_never_overwritten(kept):
    """Twelve steps are more than there are buffers: then tensors travel as torch sends them."""
    loader, held = loader_of(Blocks(), 4, workers=2), []
    for epoch in range(3):
        for batch in loader.batches(epoch):
            held = [*held, blocks_of(batch)][-kept - 1 :]
            for step in held:
                assert all(bool((x == index).all()) for index, x in step.items())
    loader.close()
    assert all(bool((x == index).all()) for step in held for index, x in step.items())


def test_a_room_is_used_again_when_its_last_tensor_has_gone():
    buffers = SharedBuffers(workers=2, each=2)
    first, second = buffers.buffer(1), buffers.buffer(1)
    assert first is not None and second is not None and buffers.buffer(1) is None and buffers.buffer(0) is not None
    data = {"x": torch.arange(LARGE), "y": torch.arange(LARGE) * 2.0}
    answer = first.answer(GroupedBatch(data, (16, LARGE - 16)))
    del first, second
    received = buffers.open(answer)
    assert buffers.buffer(1) is not None, "the second buffer was not used"
    one, other = received.apart()
    assert other["y"].tolist() == [2.0 * number for number in range(16, LARGE)]
    assert one["x"].tolist() == list(range(16))
    kept = other["y"][5:6]
    del received, one, other
    others = buffers.buffer(1)
    assert buffers.buffer(1) is None, "a view of a tensor still lies in the first buffer"
    del kept, others
    assert buffers.buffer(1) is not None


def test_a_process_that_was_forked_does_not_free_what_the_rank_holds():
    buffers = SharedBuffers(workers=1, each=1)
    buffer = buffers.buffer(0)
    held = buffers.open(buffer.answer(GroupedBatch([torch.full((LARGE,), 7)], None))).apart()
    del buffer
    child = os.fork()
    if child == 0:
        del held
        os._exit(0 if buffers._taken[0] else 1)
    assert os.waitpid(child, 0)[1] == 0
    assert buffers.buffer(0) is None and bool((held[0] == 7).all())
    del held
    assert buffers.buffer(0) is not None


def test_a_buffer_from_which_a_gpu_may_still_copy_is_not_written(monkeypatch):
    """Copies run beside the process: it can let go of a batch before the GPU has read it."""
    passed, locked = [], {}

    def lock(address, size, gpu):
        assert not any(start <= address < start + held for start, held in locked.items())
        locked[address] = size
        return True

    name = "lockstep.data.shared_buffers"
    monkeypatch.setattr(f"{name}.passing", lambda gpus: lambda: bool(passed))
    monkeypatch.setattr(f"{name}.page_lock", lock)
    monkeypatch.setattr(f"{name}.page_unlock", locked.pop)
    monkeypatch.setattr(f"{name}.wait_for", lambda gpu: passed.append(gpu))
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    buffers = SharedBuffers(workers=1, each=2, gpus=[torch.device("cuda", 0)])

    def sent(buffers, count):
        buffer = buffers.buffer(0)
        return buffers.open(buffer.answer(GroupedBatch([torch.full((count,), 7)], None))).apart()

    held = sent(buffers, LARGE)
    del held
    kept = sent(buffers, LARGE)
    buffers.free()
    assert buffers.buffer(0) is None, "the GPU has not passed the first one"
    passed.append(True)
    buffers.free()
    for count in (LARGE, 40 * LARGE, LARGE):  # one of them is larger than what was page-locked
        del kept
        kept = sent(buffers, count)
        buffers.free()
    assert max(locked.values()) >= 40 * LARGE * 8
    buffers.close()
    assert len(locked) == 1, "that of the tensor that is held"
    del buffers
    assert bool((kept[0] == 7).all())
    del kept
    assert not locked
    buffers = SharedBuffers(workers=1, each=2, gpus=[torch.device("cuda", 0)])
    passed.clear()
    held = sent(buffers, LARGE)
    del held
    buffers.close()
    del buffers
    assert locked and not passed, "nobody has waited"
    passed.append(True)
    SharedBuffers(workers=1, each=1, gpus=[torch.device("cuda", 0)])
    assert not locked


def test_a_worker_that_keeps_what_it_gave_keeps_its_room_too():
    buffers = SharedBuffers(workers=1, each=1)
    buffer = buffers.buffer(0)
    kept = buffer.empty(LARGE).fill_(7)
    buffers.open(buffer.answer(GroupedBatch([kept], None)))  # and lets go of it: the rank needs it no more
    del buffer
    assert buffers.buffer(0) is None
    assert bool((kept == 7).all())


def test_tensors_of_any_kind_arrive_as_they_were_sent():
    loader, here = (EvaluationLoader(Structured(), micro_batch_size=4, workers=n) for n in (1, 0))
    for part, wanted in zip(loader, here, strict=True):
        assert_equal(part.data, wanted.data)
    loader.close()


class Views(Structured):
    """Samples that are views of others in torch's ways: conjugated, negated, without strides."""

    def __getitem__(self, index):
        values = torch.complex(torch.ones(LARGE), torch.full((LARGE,), index + 1.0))
        rows = torch.eye(4).to_sparse_csr()
        return values.conj(), values.conj().imag, rows


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("workers", [0, 1])
def test_views_whose_signs_torch_keeps_beside_the_numbers_arrive_with_them(workers):
    loader = loader_of(Views(), 8, workers=workers, collate=lambda samples: samples[0])
    for batch in loader.batches(0):
        for part in batch.micro_batches:
            conjugated, negated, rows = part.data
            assert bool((conjugated.imag == negated).all()) and bool((negated == -(part.indices[0] + 1.0)).all())
            assert torch.equal(rows.to_dense(), torch.eye(4))
    loader.close()


@pytest.mark.parametrize("size", [8, LARGE])
def test_a_tensor_that_is_there_twice_arrives_as_one(size):
    """An input that is its own target, and is changed in place: the bits depended on whether workers had read it."""

    def collate(samples):
        x = torch.stack([each["x"][:size] for each in samples]).float()
        return x, {"target": x}

    for workers in (0, 1):
        loader = loader_of(Blocks(), 4, workers=workers, collate=collate)
        for batch in loader.batches(0):
            for part in batch.micro_batches:
                part.data[0].fill_(3.0)
                assert bool((part.data[1]["target"] == 3.0).all())
        loader.close()


def test_a_tensor_that_is_too_large_or_lies_otherwise_is_sent_by_torch():
    buffer = SharedBuffers(workers=1, each=1).buffer(0)
    turned, graded = torch.ones(200, 300).T, torch.ones(LARGE, requires_grad=True)
    found = buffer.answer(GroupedBatch([turned, graded], None)).found.data
    assert found[0] is turned and found[1] is graded
    assert buffer.empty(1 << 20, 1 << 11) is None and buffer.empty(10) is not None


def test_parts_that_are_read_together_may_be_changed_in_place_each():
    loader = loader_of(Blocks(), 1, workers=1)
    for batch in loader.batches(0):
        x, index = batch.micro_batches[0].data["x"], batch.micro_batches[0].data["index"]
        index.add_(1)
        assert (x._version, index._version) == (0, 1) and np.array_equal(x[:, 0] + 1, index)
    loader.close()


def test_without_addresses_for_rooms_the_same_bits_arrive(monkeypatch):
    def refuse(workers, each, gpus):
        raise OSError("cannot allocate memory")

    monkeypatch.setattr("lockstep.data.worker_process.SharedBuffers", refuse)
    loader = loader_of(Blocks(), 4, workers=2)
    seen = [index for batch in loader.batches(0) for index, x in blocks_of(batch).items() if (x == index).all()]
    loader.close()
    assert sorted(seen) == list(range(96))


def assert_equal(found, wanted):
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    elif isinstance(wanted, dict):
        assert found.keys() == wanted.keys()
        for name in wanted:
            assert_equal(found[name], wanted[name])
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted)
        for one, other in zip(found, wanted):
            assert_equal(one, other)
    else:
        assert found == wanted


def test_closing_gives_the_memory_back_but_for_what_somebody_holds():
    buffers = SharedBuffers(workers=1, each=2)
    first, second = buffers.buffer(0), buffers.buffer(0)
    answers = [buffer.answer(GroupedBatch([torch.full((LARGE,), 7)], None)) for buffer in (first, second)]
    del first, second
    kept = buffers.open(answers[1]).apart()[0]
    before = shared_memory()
    buffers.close()
    assert before - shared_memory() >= LARGE * 8 // 1024 * 1024 - 8192
    assert bool((kept == 7).all())


def shared_memory():
    """Bytes of shared memory that this process holds."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(re.search(r"^RssShmem:\s+(\d+) kB", status, re.MULTILINE)[1])


def test_what_is_kept_of_a_loop_that_was_left_early_stays_as_it_was():
    loader, held = loader_of(Blocks(), 4, workers=2), []
    for epoch in range(4):
        for batch in loader.batches(epoch):
            held.append(blocks_of(batch))
            if len(held) % 3 == 0:
                break
    loader.close()
    assert len(held) == 12
    assert all(bool((x == index).all()) for step in held for index, x in step.items())
