"""Times the phases of a prepared run from inside a rank, without changing it.

A run marks its heartbeat whenever it goes from one phase to the next; the observer listens there. Marks of other
threads (replicas of strategy ``dp``) are not heard, since phases that run at once cannot be added up. On a GPU each
mark waits until the device has done what was queued: the price of telling phases apart is that steps take longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch

from lockstep.run import Run
from lockstep.scale.phases import PhaseClock


class StepObserver:
    """Writes down how long each phase of each step takes on this rank. Nothing here is collective.

    Args:
        run: prepared.
    """

    def __init__(self, run: Run) -> None:
        self._device, self._thread = run.device, threading.get_ident()
        heartbeat = run._session.heartbeat
        self._mark, self._backward = heartbeat.mark, run.strategy.backward
        heartbeat.mark = self._marked  # type: ignore[method-assign]  # that is the place to listen
        run.strategy.backward = self._computed  # type: ignore[method-assign]  # begins what is not told apart
        if self._device.type == "cuda":
            self._to_device = run._compute._to_device
            run._compute._to_device = self._copied  # type: ignore[method-assign]  # as above
        self.clock = PhaseClock(time.perf_counter())

    def end_step(self) -> None:
        """Says that a step is over, and the optimizer stepped."""
        self.clock.end_step(self._now())

    def _marked(self, phase: str, **place: int) -> None:
        self._mark(phase, **place)
        if threading.get_ident() == self._thread:
            self.clock.enter(phase, self._now())

    def _computed(self, *arguments: Any, **options: Any) -> Any:
        self.clock.enter("compute", self._now())
        return self._backward(*arguments, **options)

    def _copied(self, data: Any) -> Any:
        if threading.get_ident() != self._thread:
            return self._to_device(data)
        seconds, result = _timed(self._now, lambda: self._to_device(data))
        self.clock.copied(seconds)
        return result

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def _timed(now: Callable[[], float], call: Callable[[], Any]) -> tuple[float, Any]:
    began = now()
    result = call()
    return now() - began, result
