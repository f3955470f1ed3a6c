import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.data.reader import InlineReading, Request, SampleReader
from lockstep.data.workers import open_reading


def test_nothing_is_read_before_it_is_asked_for():
    asked = []

    def requests():
        for number in range(3):
            asked.append(number)
            yield Request(0, np.array([number]))

    reading = InlineReading(SampleReader(TensorDataset(torch.arange(3)), seed=0))
    results = reading.read(requests())
    assert asked == []
    assert next(results)[0].tolist() == [0] and asked == [0]
    assert [data[0].tolist() for data in results] == [[1], [2]]
    reading.close()


@pytest.mark.gpus(1)
def test_tensors_of_any_depth_come_in_page_locked_memory():
    from lockstep.data.batch import pinned

    data = pinned({"x": [torch.rand(2), (torch.rand(3), "text")]})
    assert data["x"][0].is_pinned() and data["x"][1][0].is_pinned() and data["x"][1][1] == "text"


@pytest.mark.parametrize("per_step", [1, 2])
def test_what_is_written_into_an_array_under_the_tensors_is_read_by_the_next_step(per_step):
    """Steps were read ahead, more of them the fewer micro-batches a process has, so ranks trained on other values."""
    array = np.zeros(8, np.float32)
    reading = open_reading(TensorDataset(torch.from_numpy(array)), per_step=per_step, rows=1)
    steps = [Request(0, np.arange(8)[n : n + per_step], (1,) * per_step) for n in range(0, 8, per_step)]
    requests = steps if reading.at_a_time == per_step else [Request(0, np.arange(8), (1,) * 8)]
    found = []
    for number, (data,) in enumerate(reading.read(iter(requests))):
        found.append(data.item())
        if (number + 1) % per_step == 0:
            array += 1
    assert found == [float(number // per_step) for number in range(8)]
