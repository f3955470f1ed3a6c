"""Worker processes read the same bits as the training process, from every format that holds files open."""

import numpy as np
import pytest
import torch
from tests.data.formats import test_arrow_files, test_hugging_face, test_tar_shards

from lockstep.data import ArrowFiles, HuggingFace, RandomResizedCrop, TarShards
from lockstep.data.reader import Request, SampleReader
from lockstep.data.workers import WorkerReading

CROP = RandomResizedCrop(8)


def shards(folder):
    return TarShards(test_tar_shards.shards(folder), transform=CROP)


def parquet(folder):
    path = test_arrow_files.write(folder / "a.parquet", test_arrow_files.table())
    return ArrowFiles(path, "photo", "label", transform=CROP)


def arrow(folder):
    return ArrowFiles(test_arrow_files.write(folder / "a.arrow", test_arrow_files.table()), "x", "label")


def hugging_face(folder):
    return HuggingFace(test_hugging_face.rows(), "photo", "label", transform=CROP)


@pytest.mark.parametrize("make", [shards, parquet, arrow, hugging_face])
def test_workers_read_the_same_bits(tmp_path, make):
    dataset = make(tmp_path)
    parts = [np.array(part) for part in ([1, 5, 9], [0, 2], [8, 7, 6])]
    inline = [SampleReader(dataset, seed=0).read(0, part) for part in parts]
    reading = WorkerReading(SampleReader(dataset, seed=0), workers=2)
    try:
        read = list(reading.read(Request(0, part) for part in parts))
    finally:
        reading.close()
    for mine, theirs in zip(inline, read, strict=True):
        assert all(torch.equal(*pair) for pair in zip(mine, theirs, strict=True))
