"""The bytes that a parameter server sends, against a ring all-reduce: counted, and by formula.

``python benchmarks/parameter_server/run.py`` prints the table of docs/strategies/parameter_server.md. It counts bytes,
so it does not mind a busy machine; it takes about a minute.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE.parent))

from harness import report  # noqa: E402  the line above makes it importable

WARM, COUNTED = 2, 10
"""Steps that are left out, and steps that are counted; all of one epoch, so that nobody meets in between."""
WIDTH, MICRO_BATCHES = 256, 8

Formula = Callable[[int, int], float]
"""Sent by a rank in one step, in units of the parameters' bytes, from workers and servers."""

RING: Formula = lambda w, s: 2 * (w - 1) / w  # noqa: E731  # a table of formulas
WORKER: Formula = lambda w, s: 1.0  # noqa: E731
SERVER: Formula = lambda w, s: (w + s - 1) / s  # noqa: E731
ASYNCHRONOUS_SERVER: Formula = lambda w, s: w / s  # noqa: E731


def main() -> None:
    """Prints the table."""
    rows = []
    for workers in (2, 4):
        rows.append(ring(workers))
        for mode, servers in itertools.product(("synchronous", "asynchronous"), (1, 2)):
            rows += parameter_server(mode, workers, servers)
    head = ["exchange", "workers", "servers", "who sends", "sent per step, counted", "by formula"]
    print(f"P is {parameter_bytes():,} bytes.\n\n{report.table(head, rows)}")


def ring(workers: int) -> list[str]:
    """The row of ``ddp`` with the backend's own all-reduce, of which the reducer counts what a ring sends."""
    sent = lockstep.launch(bytes_per_step, {"strategy": "ddp", "reduce": "ring"}, devices=f"cpu:{workers}")
    return row("ring all-reduce", workers, 0, "every rank", max(sent), RING)


def parameter_server(mode: str, workers: int, servers: int) -> list[list[str]]:
    """The rows of a worker and of a server; of each kind the one that sends most."""
    told = {"mode": mode, "servers": servers, "staleness": 4, "snapshot_every": 0}
    options = {"strategy": "parameter_server", "parameter_server": told}
    sent = lockstep.launch(bytes_per_step, options, devices=f"cpu:{workers + servers}")
    is_asynchronous = mode == "asynchronous"
    held = sent[:servers] if is_asynchronous else sent[workers:]
    computed = sent[servers:] if is_asynchronous else sent[:workers]
    name = f"{mode} server"
    formula = ASYNCHRONOUS_SERVER if is_asynchronous else SERVER
    return [
        row(name, workers, servers, "worker", max(computed), WORKER),
        row(name, workers, servers, "server", max(held), formula),
    ]


def row(name: str, workers: int, servers: int, who: str, sent: float, formula: Formula) -> list[str]:
    """One row, in units of the parameters' bytes."""
    counted = f"{sent / parameter_bytes():.3f} P"
    return [name, str(workers), str(servers or "-"), who, counted, f"{formula(workers, servers):.3f} P"]


def bytes_per_step(options: dict[str, object]) -> float:
    """The bytes that this rank sends in a step, on average over the counted ones."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    model = network()
    run = lockstep.init(global_batch=64, micro_batches=MICRO_BATCHES, fingerprint_every=0, **options)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
    data = TensorDataset(torch.randn(64 * (WARM + COUNTED), WIDTH), torch.randint(10, (64 * (WARM + COUNTED),)))
    before = 0
    for number, batch in enumerate(run.batches(data)):
        if number == WARM:
            before = run.strategy.bytes_sent
        run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    sent = (run.strategy.bytes_sent - before) / COUNTED
    run.close()
    return sent


def network() -> nn.Module:
    """Layers of which two servers can make equal halves."""
    torch.manual_seed(0)
    layers = [part for _ in range(4) for part in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(WIDTH, 10))


def parameter_bytes() -> int:
    """P."""
    return sum(parameter.nbytes for parameter in network().parameters())


if __name__ == "__main__":
    main()
