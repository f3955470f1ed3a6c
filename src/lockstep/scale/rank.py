"""Entry points of a rank of ``lockstep scale``: timed steps of a job, or exchanges of gradients alone.

``main`` times the phases of a prepared run by a callback, without changing the run or writing to the user's folders.
Phases of other threads (replicas of strategy ``dp``) are ignored, since phases that run at once cannot be added up. On
a GPU each event waits until the device has finished: telling phases apart makes steps take longer.

``time_exchange`` times the reducer of the job over messages of several sizes.
"""

from __future__ import annotations

import json
import logging
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from lockstep.config.job import JobConfig
from lockstep.core.world import World
from lockstep.distributed.process_group import open_process_group
from lockstep.errors import ConfigError
from lockstep.job.assemble import assemble
from lockstep.reduce import BucketShape, NodeLayout, Reducer, open_reducer
from lockstep.run import Run
from lockstep.runtime import Callback
from lockstep.runtime.devices import wait_for
from lockstep.scale.measured import PhaseClock
from lockstep.trainer import Trainer


class StepObserver(Callback):
    """Times each phase of each step of a prepared run on this rank. Nothing here is collective."""

    def __init__(self, run: Run) -> None:
        self._device, self._thread = run.device, threading.get_ident()
        self.clock = PhaseClock(time.perf_counter())
        self._copy_began = 0.0
        run.add_callback(self)

    def end_step(self) -> None:
        """Ends a step, after the optimizer has stepped."""
        self.clock.end_step(self._now())

    def on_phase(self, phase: str, epoch: int, step: int, micro_batch: int) -> None:
        """Begins a phase."""
        if threading.get_ident() == self._thread:
            self.clock.enter(phase, self._now())

    def on_span_begin(self, name: str) -> None:
        """Ends waiting for data where a step is rehearsed."""
        if name == "rehearsal":
            self.clock.enter(name, self._now())

    def on_backward_begin(self, batch: Any, scale: float) -> None:
        """Begins computing that is not divided into phases, until a phase begins."""
        self.clock.enter("compute", self._now())

    def on_copy_begin(self) -> None:
        """Remembers when a copy to the device begins."""
        if threading.get_ident() == self._thread:
            self._copy_began = self._now()

    def on_copy_end(self) -> None:
        """Waits for the copy and counts it."""
        if threading.get_ident() == self._thread:
            self.clock.copied(self._now() - self._copy_began)

    def _now(self) -> float:
        wait_for(self._device)
        return time.perf_counter()


def main(payload: Any) -> None:
    """Trains some steps of a job on this rank and writes ``rank-N.json``; rank 0 writes the reason of a refusal.

    Args:
        payload: ``{"config": JSON of the job, "steps": measured, "warm_up": steps before them, "folder": path}``.
    """
    logging.basicConfig(level=logging.ERROR)
    config, world = JobConfig.from_json(payload["config"]), World.from_environment()
    folder = Path(payload["folder"])
    try:
        trainer = assemble(config, world)
    except ConfigError as error:
        if world.is_main:
            (folder / "refused").write_bytes(str(error).encode(errors="surrogatepass"))
        return
    found = _train(trainer, config, payload["warm_up"], payload["steps"])
    (folder / f"rank-{world.rank}.json").write_text(json.dumps(found))
    trainer.run.close()


def _train(trainer: Trainer, config: JobConfig, warm_up: int, steps: int) -> dict[str, Any]:
    """Runs the steps; returns the measurements of those after the warm-up."""
    run, size = trainer.run, config.training.global_batch
    observer = StepObserver(run)
    samples: list[int] = []
    began = ended = time.perf_counter()
    while len(samples) < warm_up + steps:
        for batch in trainer.batches():  # outside of run.epochs every pass is the next epoch
            trainer.train_step(batch)
            observer.end_step()
            samples.append(batch.plan.samples)
            ended = time.perf_counter()
            if len(samples) == warm_up:
                began = ended
            if len(samples) == warm_up + steps:
                break
    return {
        "seconds": ended - began,
        "samples": sum(samples[warm_up:]),
        "steps": observer.clock.steps[warm_up:],
        "steps_per_epoch": trainer.steps_per_epoch,
        "samples_per_epoch": min(run.position.samples, trainer.steps_per_epoch * size),
        "parameter_bytes": sum(p.nbytes for p in run.strategy.trainable().values()),
        "bytes_sent": run.strategy.bytes_sent / (warm_up + steps),
        "micro_batches": config.training.micro_batches,
        "micro_batch_size": size // config.training.micro_batches,
    }


_HEADER = 64
_FEWEST = 3


def time_exchange(payload: Any) -> None:
    """Times exchanges on this rank and writes ``messages-N.json``: seconds by bytes, and bytes added per second.

    Args:
        payload: ``{"reduce": name, "micro_batches": K, "sizes": bytes of each message, "seconds": to spend on each,
            "threads": of a rank, "timeout": in seconds, "folder": path}``.
    """
    world, folder = World.from_environment(), Path(payload["folder"])
    torch.set_num_threads(payload["threads"])
    with open_process_group(world, timeout=payload["timeout"]):
        group = dist.group.WORLD
        assert group is not None, "messages are measured between ranks"
        times = {}
        for size in payload["sizes"]:
            reducer = open_reducer(payload["reduce"], group, torch.device("cpu"), payload["timeout"])
            times[size] = _exchange(reducer, group, size // 4, payload["micro_batches"], payload["seconds"])
            reducer.release()
        found = {"seconds": times, "adding": _adding()}
        (folder / f"messages-{world.rank}.json").write_text(json.dumps(found))
        del group


def _exchange(reducer: Reducer, group: dist.ProcessGroup, numel: int, leaves: int, seconds: float) -> float:
    """Median seconds of one exchange of a bucket of ``numel`` float32. Collective."""
    reducer.allocate([BucketShape(numel, torch.float32, ((numel,),))], _HEADER, leaves)
    mine = len(NodeLayout.of(leaves, group.size()).ranks[group.rank()])
    nodes = torch.ones(mine, numel)
    header = torch.zeros(_HEADER, dtype=torch.float64)
    taken: list[float] = []
    spent = torch.zeros(1, dtype=torch.float64)
    while len(taken) < _FEWEST or float(spent) < seconds:
        dist.barrier(group)
        began = time.perf_counter()
        reducer.begin(leaves)
        for slot in range(mine):
            reducer.staging(0, slot).copy_(nodes[slot])
        reducer.start(0)
        reducer.finish(header)
        taken.append(time.perf_counter() - began)
        spent += taken[-1]
        dist.all_reduce(spent, dist.ReduceOp.MAX, group)  # so that all ranks stop at the same exchange
    return statistics.median(taken[1:])


def _adding() -> float:
    """Bytes of one operand that are added to another in a second."""
    left, right = torch.ones(1 << 20), torch.ones(1 << 20)
    taken = []
    for _ in range(8):
        began = time.perf_counter()
        left.add_(right)
        taken.append(time.perf_counter() - began)
    return left.nbytes / statistics.median(taken)
