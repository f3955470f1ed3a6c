"""Trains on a small Ray cluster of this machine, and prints what became of it as one JSON object.

    python -m tests.integrations.ray_cluster SCENARIO FOLDER [ARGUMENT]

Ray's servers are to be reached by nobody else: run it inside ``unshare --net``, with loopback up.
"""

import json
import logging
import random
import subprocess
import sys
import threading
import time
import traceback
from pathlib import Path

import ray
import torch
from ray.cluster_utils import Cluster
from ray.train import FailureConfig, RunConfig, ScalingConfig
from torch.utils.data import TensorDataset

import lockstep
from lockstep.data import Digits
from lockstep.integrations.ray import LockstepTrainer
from lockstep.models import digits_net, resnet18

MEMORY = 80 << 20
SETTINGS = ["log.progress=false", "log.tensorboard=false"]


class Nodes:
    """A cluster of this machine: the head, which stays, and others, which come and go. Each has room for one worker."""

    def __init__(self, count):
        self.cluster = Cluster()
        self.cluster.add_node(num_cpus=1, object_store_memory=MEMORY, include_dashboard=False)
        self.others = []
        for _ in range(count - 1):
            self.add()
        ray.init(address=self.cluster.address, logging_level="ERROR")

    def add(self):
        self.others.append(self.cluster.add_node(num_cpus=1, object_store_memory=MEMORY))

    def kill(self):
        """Kills a node with all its processes, without a warning."""
        self.cluster.remove_node(self.others.pop(), allow_graceful=False)

    def drain(self, seconds):
        """Announces that a node will be taken away."""
        words = ["--node-id", self.others[-1].node_id, "--reason", "DRAIN_NODE_REASON_PREEMPTION"]
        words += ["--reason-message", "a test", "--deadline-remaining-seconds", str(seconds)]
        subprocess.run(["ray", "drain-node", "--address", self.cluster.address, *words], check=True)

    def close(self):
        ray.shutdown()
        self.cluster.shutdown()


class Fit:
    """``trainer.fit()`` on a thread, since nodes can be added from the main thread alone."""

    def __init__(self, trainer, folder):
        self.folder, self.result, self.error = folder, None, None
        self.began = time.monotonic()
        self.saved = {}
        """When each checkpoint was first seen, by its step."""
        self._thread = threading.Thread(target=self._run, args=(trainer,), daemon=True)
        self._thread.start()

    def _run(self, trainer):
        try:
            self.result = trainer.fit()
        except Exception as error:
            traceback.print_exc()
            self.error = error

    def look(self):
        """The newest checkpoint's step."""
        for path in self.folder.glob("step-*"):
            self.saved.setdefault(int(path.name.split("-")[1]), time.monotonic() - self.began)
        return max(self.saved, default=0)

    def wait_for(self, step):
        """Waits for a checkpoint of that step or a later one; False if the run ends before."""
        while self._thread.is_alive():
            if self.look() >= step:
                return True
            time.sleep(0.05)
        return False

    def end(self):
        self.wait_for(1 << 30)
        self.look()
        starts = []
        record = self.folder / "job.json"
        if record.exists():
            starts = [(each["step"], len(each["shares"])) for each in json.loads(record.read_text())["starts"]]
        return {
            "value": None if self.result is None else self.result.return_value,
            "metrics": None if self.result is None else self.result.metrics,
            "error": None if self.error is None else [type(self.error).__name__, str(self.error)],
            "starts": starts,
            "seconds": time.monotonic() - self.began,
        }


def fit(job, folder, workers, *, name="run", settings=(), failures=None, filesystem=None, **options):
    """Starts training."""
    scaling = {"elastic_resize_monitor_interval_s": 1.0} if isinstance(workers, tuple) else {}
    failure = {} if failures is None else {"failure_config": FailureConfig(max_failures=failures)}
    trainer = LockstepTrainer(
        job,
        **({"settings": [*SETTINGS, *settings]} if isinstance(job, str) else {}),
        scaling_config=ScalingConfig(num_workers=workers, **scaling),
        run_config=RunConfig(name=name, storage_path=folder, storage_filesystem=filesystem, **failure),
        **options,
    )
    return Fit(trainer, Path(folder, name))


def fixed(folder, workers):
    """A job on a number of workers."""
    nodes = Nodes(int(workers))
    yield fit("digits", folder, int(workers), settings=["training.epochs=2"]).end()
    nodes.close()


def own_loop(config):
    """An ordinary loop, which saves once per epoch; fails or hangs on rank 1 if it is told to."""
    run = lockstep.init(global_batch=128, micro_batches=8, seed=0)
    model = digits_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model, optimizer = run.prepare(model, optimizer)
    for _ in run.epochs(2):
        for batch in run.batches(Digits(split="train", seed=0)):
            run.backward(batch, torch.nn.functional.cross_entropy)
            if run.world.rank == 1 and run.position.step == 5:
                if config.get("fail"):
                    raise ValueError("a mistake of the program")
                while config.get("hang"):
                    time.sleep(1)
            optimizer.step()
            optimizer.zero_grad()
        run.save()
    return run.fingerprint()


def resnet_loop(config):
    """A small ResNet with BatchNorm and momentum on random images, saved every two steps."""
    run = lockstep.init(global_batch=32, micro_batches=8, seed=0, **config)
    model = resnet18(num_classes=4, small_images=True)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, optimizer = run.prepare(model, optimizer)
    draw = torch.Generator().manual_seed(0)
    images, classes = torch.randn(320, 3, 8, 8, generator=draw), torch.arange(320) % 4
    for _ in run.epochs(3):
        for batch in run.batches(TensorDataset(images, classes)):
            run.backward(batch, torch.nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
            if run.position.step % 2 == 1:
                run.save()
    return run.fingerprint()


def function(folder, workers):
    """A function instead of a job."""
    nodes = Nodes(int(workers))
    yield fit(own_loop, folder, int(workers), train_loop_config={}).end()
    nodes.close()


def failure(folder, kind):
    """A worker fails, or hangs: the run ends with a report that names it, though restarts are allowed."""
    nodes = Nodes(3)
    yield fit(own_loop, folder, 3, train_loop_config={kind: True}, failures=-1, stall_limit=4.0).end()
    nodes.close()


def remote(folder, workers):
    """A storage that is no local file system: checkpoints are uploaded, and resumed from there."""
    import fsspec
    from pyarrow.fs import FSSpecHandler, PyFileSystem

    nodes = Nodes(int(workers))
    storage = PyFileSystem(FSSpecHandler(fsspec.filesystem("file")))
    for epochs in (1, 2):
        yield fit("digits", folder, int(workers), settings=[f"training.epochs={epochs}"], filesystem=storage).end()
    nodes.close()


def drained(folder, _):
    """A node is to be taken away: the run saves and goes on without it."""
    nodes = Nodes(3)
    going = fit("digits", folder, (1, 3), settings=["training.epochs=8", "checkpoint.every_steps=5"])
    going.wait_for(10)
    nodes.drain(120)
    yield {**going.end(), "drained_at": going.look()}
    nodes.close()


def schedules(folder, seeds):
    """Random schedules of nodes that come and are killed, a run each; ``seeds`` is FIRST:COUNT, or with :resnet."""
    first, count, *model = seeds.split(":")
    first, count = int(first), int(count)
    nodes = Nodes(2)
    for seed in range(first, first + count):
        draw = random.Random(seed)
        settings = ["training.epochs=8", "checkpoint.every_steps=2"]
        job, most = (resnet_loop, 6) if model else ("digits", 24)
        going = fit(job, folder, (1, 4), name=f"run-{seed}", settings=settings)
        changes, step = [], draw.randrange(2, most // 2)
        while going.wait_for(step) and len(changes) < 4:
            add = not nodes.others or (len(nodes.others) < 3 and draw.random() < 0.5)
            changes.append(("add" if add else "kill", round(time.monotonic() - going.began, 2), going.look()))
            nodes.add() if add else nodes.kill()
            step = going.look() + draw.randrange(2, most)
        ended = going.end()
        yield {**ended, "seed": seed, "changes": changes, "saved": sorted(going.saved.items())}
    nodes.close()


def main():
    logging.basicConfig(level=logging.WARNING)
    scenario, folder, argument = sys.argv[1:4]
    for found in globals()[scenario](folder, argument):
        print(f"FOUND {json.dumps(found)}", flush=True)


if __name__ == "__main__":
    main()
