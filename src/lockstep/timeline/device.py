"""What a GPU did meanwhile: kernels and copies by stream, from torch's profiler.

The marks of a rank say when work was given to the device, not when it was done. The profiler says that, without a
synchronisation that would take the overlap away which the trace is to show.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity

from lockstep.timeline.recorder import Span

logger = logging.getLogger(__name__)
_OF_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")


class DeviceTrace:
    """Profiles the CUDA device of this rank between ``start`` and ``stop``."""

    def __init__(self) -> None:
        self._profiler: Any = None

    def start(self) -> None:
        """Begins; where the profiler cannot, the trace has no lanes of the device, and a warning says so."""
        profiler = torch.profiler.profile(activities=[ProfilerActivity.CUDA])
        try:
            profiler.start()
        except RuntimeError as error:
            logger.warning("The timeline will not show the device, whose profiler cannot start: %s.", error)
            return
        self._profiler = profiler

    def stop(self, unix: int) -> list[Span]:
        """Ends; gives the device's spans.

        Args:
            unix: what turns the recorder's nanoseconds into Unix time.
        """
        if self._profiler is None:
            return []
        self._profiler.stop()
        with tempfile.TemporaryDirectory(prefix="lockstep-timeline-") as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            return device_spans(json.loads(path.read_text()), unix, _OF_DEVICE)


def device_spans(trace: Mapping[str, Any], unix: int, categories: Collection[str]) -> list[Span]:
    """The spans of some categories in a trace of torch's profiler, a lane for each stream."""
    base = int(trace.get("baseTimeNanoseconds", 0)) - unix
    found = []
    for event in trace["traceEvents"]:
        if event.get("ph") == "X" and event.get("cat") in categories:
            began = base + round(1000 * event["ts"])
            lane = f"device, stream {event.get('args', {}).get('stream', event['tid'])}"
            found.append(Span(lane, event["name"], began, began + round(1000 * event["dur"])))
    return found
