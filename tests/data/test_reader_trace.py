import os

import numpy as np

from lockstep.data.reader import ReadTrace


def indices(first, count):
    return np.arange(first, first + count, dtype=np.int64)


def test_a_read_is_recorded_with_its_time_epoch_and_samples():
    trace = ReadTrace("train", workers=2)
    with trace.noting(3, indices(40, 8)):
        pass
    (span,) = trace.spans()
    assert (span.worker, span.epoch, span.first, span.samples) == (-1, 3, 40, 8)
    assert span.began <= span.ended


def test_the_newest_1024_reads_are_kept():
    trace = ReadTrace("train", workers=0)
    for number in range(1030):
        with trace.noting(0, indices(number, 1)):
            pass
    assert [span.first for span in trace.spans()] == list(range(6, 1030))


def test_a_read_of_a_forked_process_is_seen_without_a_message():
    trace = ReadTrace("train", workers=0)
    child = os.fork()
    if child == 0:
        with trace.noting(1, indices(5, 2)):
            pass
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [(span.epoch, span.first, span.samples) for span in trace.spans()] == [(1, 5, 2)]


def test_a_read_that_fails_is_not_recorded():
    trace = ReadTrace("train", workers=0)
    try:
        with trace.noting(0, indices(0, 1)):
            raise ValueError
    except ValueError:
        pass
    assert trace.spans() == []
