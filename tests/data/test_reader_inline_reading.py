import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lockstep.data.reader import InlineReading, Request, SampleReader


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
