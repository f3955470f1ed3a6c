import json
import time

import pytest
import torch
from torch.profiler import ProfilerActivity

from lockstep.profile.timeline import DeviceTrace, device_spans


def test_spans_of_the_profiler_stand_on_the_clock_of_the_recorder(tmp_path):
    unix = time.time_ns() - time.perf_counter_ns()
    with torch.profiler.profile(activities=[ProfilerActivity.CPU], acc_events=True) as profiler:
        began = time.perf_counter_ns()
        torch.rand(300, 300) @ torch.rand(300, 300)
        ended = time.perf_counter_ns()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    spans = device_spans(json.loads((tmp_path / "trace.json").read_text()), unix, ["cpu_op"])
    (product,) = (span for span in spans if span.name == "aten::mm")
    slack = 2_000_000  # the profiler has a clock of its own
    assert began - slack < product.began < product.ended < ended + slack


def test_a_lane_for_each_stream_and_other_events_are_left_out():
    trace = {
        "baseTimeNanoseconds": 1_000_000,
        "traceEvents": [
            {
                "ph": "X",
                "cat": "kernel",
                "name": "gemm",
                "ts": 3.5,
                "dur": 2,
                "tid": 7,
                "args": {"stream": 7},
            },
            {"ph": "X", "cat": "cuda_runtime", "name": "launch", "ts": 3, "dur": 1, "tid": 1},
            {"ph": "M", "name": "process_name", "pid": 0},
        ],
    }
    (span,) = device_spans(trace, 400_000, ["kernel"])
    assert (span.lane, span.name, span.began, span.ended) == ("device, stream 7", "gemm", 603_500, 605_500)


@pytest.mark.gpus(1)
def test_kernels_and_copies_of_the_device_are_seen():
    unix, device = time.time_ns() - time.perf_counter_ns(), DeviceTrace()
    device.start()
    began = time.perf_counter_ns()
    (torch.rand(500, 500).to("cuda") @ torch.rand(500, 500).to("cuda")).sum().item()
    ended = time.perf_counter_ns()
    spans = device.stop(unix)
    assert any("emcpy" in span.name for span in spans)
    assert all(began - 2_000_000 < span.began <= span.ended < ended + 2_000_000 for span in spans)
