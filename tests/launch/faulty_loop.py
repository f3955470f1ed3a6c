"""A training loop without a model, for the launch tests: sums over ranks, heartbeats, a stop flag, and one fault.

faulty_loop.py MARKS STEPS [RANK:STEP:FAULT]
"""

import ctypes
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

from lockstep.core.world import World
from lockstep.distributed.process_group import open_process_group
from lockstep.errors import DataError
from lockstep.launch import Heartbeat, Stopped, StopReason

MARKS, STEPS = Path(sys.argv[1]), int(sys.argv[2])
FAULT = (sys.argv[3] if len(sys.argv) > 3 else "") or "-1:0:none"


class Loop:
    work_on_until = 0.0

    def __init__(self, world):
        self.world = world
        self.heartbeat = Heartbeat.open(world)
        self.rank, self.step, self.fault = FAULT.split(":")[0], int(FAULT.split(":")[1]), FAULT.split(":")[2]

    def run(self):
        self.heartbeat.will_poll()
        for step in range(STEPS):
            self.heartbeat.mark("forward", epoch=0, step=step)
            self.heartbeat.samples(np.array([10 * step + self.world.rank]))
            if self.is_due(step) and getattr(self, self.fault)():
                return
            self.heartbeat.mark("reduce", epoch=0, step=step)
            if self.stop_agreed():
                self.save(step)
            if step == 3:
                self.mark("running", os.getpid())
            time.sleep(0.001)

    def is_due(self, step):
        return step == self.step and self.rank in (str(self.world.rank), "all")

    def stop_agreed(self):
        reason = torch.tensor([int(self.heartbeat.stop_reason)])
        if self.world.world_size > 1:
            dist.all_reduce(reason, dist.ReduceOp.MAX)
        self.reason = StopReason(int(reason))
        return self.reason is not StopReason.NONE

    def save(self, step):
        self.heartbeat.mark("save", epoch=0, step=step)
        if self.fault == "slow_save":
            time.sleep(self.step)
        self.mark("saved", step)
        raise Stopped(self.reason)

    def mark(self, name, content):
        path = MARKS / f"{name}-{self.world.rank}"
        path.with_suffix(".new").write_text(str(content))
        path.with_suffix(".new").rename(path)

    def exception(self):
        raise ValueError("the loss does not like this batch")

    def data_error(self):
        raise DataError("photos/rose/12.jpg is cut off. Remove it or fetch it again.")

    def killed(self):
        os.kill(os.getpid(), signal.SIGKILL)

    def segfault(self):
        ctypes.string_at(0)

    def exit_zero(self):
        sys.exit(0)

    def exit_seven(self):
        sys.exit(7)

    def leave_loop(self):
        return True

    def deaf(self):
        """Ignores SIGTERM and never comes back."""
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        self.mark("deaf", os.getpid())
        while True:
            time.sleep(60)

    def stopped(self):
        os.kill(os.getpid(), signal.SIGSTOP)

    def preempted(self):
        os.kill(os.getpid(), signal.SIGUSR1)

    def slow_save(self):
        pass

    def late(self):
        """Works on for a while after the last step, as a script does that writes its results."""
        self.work_on_until = time.monotonic() + 5.0


def main():
    world = World.from_environment()
    with open_process_group(world):
        loop = Loop(world)
        loop.run()
        while time.monotonic() < loop.work_on_until:
            sum(range(1000))
    print(f"rank {world.rank} done")


if __name__ == "__main__":
    main()
