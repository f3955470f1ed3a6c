"""Functions that ranks run on the simulated devices."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from tests.simcuda.cuda import Seen, observed
from tests.simcuda.nccl import communicators
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lockstep.core.world import World
from lockstep.data.batch import Batch
from lockstep.models import lstm, resnet18, transformer
from lockstep.reduce.ordered import OrderedBucket
from lockstep.run import Run, RunOptions
from lockstep.run.checks.rehearsal import Due
from lockstep.strategies.fsdp.gathering import Gathering

_STEPS, _FIRST = 8, 3
"""Steps of a training, and those before waits count: there channels open, and steps are rehearsed."""


@dataclass
class Trained:
    """The outcome on one rank."""

    fingerprint: str
    races: dict[tuple[str, str], int]
    waits: dict[tuple[str, str], int]
    """Of the steps after the first, without those of the comparison at the end."""
    steps: int = _STEPS - _FIRST
    launches: dict[str, int] = field(default_factory=dict)
    order: list[str] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    """Of the gradients, before they were clipped."""
    peak: int = 0
    """Bytes of device memory within those steps."""
    held: int = 0
    """Bytes of device memory before them."""
    wired: tuple[str, ...] = ()
    """The communicators that were there before the first step."""
    added: tuple[str, ...] = ()
    """Those that were made within steps."""


class Convolutions(nn.Sequential):
    """Convolutions with BatchNorm, and a linear layer."""

    def __init__(self) -> None:
        super().__init__(
            *(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
            *(nn.Conv2d(4, 8, 3, padding=1, stride=2), nn.BatchNorm2d(8), nn.ReLU()),
            *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)),
        )


class Pooled(nn.Module):
    """One row of a sequence: its last, or the mean of all."""

    def __init__(self, is_last: bool) -> None:
        super().__init__()
        self.is_last = is_last

    def forward(self, given: Any) -> Tensor:
        # A recurrent layer gives its state, too.
        rows: Tensor = given[0] if isinstance(given, tuple) else given
        return rows[:, -1] if self.is_last else rows.mean(1)


def _of_tokens(name: str) -> nn.Module:
    """A classifier of tokens: a bidirectional GRU with dropout between its layers, or an encoder."""
    if name == "gru":
        inner: nn.Module = nn.GRU(16, 8, num_layers=2, dropout=0.3, batch_first=True, bidirectional=True)
    else:
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.1, batch_first=True)
        inner = nn.TransformerEncoder(layer, 2)
    return nn.Sequential(nn.Embedding(11, 16), inner, Pooled(name == "gru"), nn.Linear(16, 5))


def _perceptron() -> nn.Module:
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Dropout(0.2), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 5))


def _tokens(output: Tensor, target: Tensor) -> Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")


def job_of(name: str) -> tuple[nn.Module, TensorDataset, Any]:
    """A model, its data and its loss, by name.

    They are ``perceptron``, ``convolutions``, ``decoder``, ``encoder``, ``lstm``, ``stacked`` (with dropout between two
    layers), ``gru`` (the same), and ``resnet18``.

    The last one is for real devices: ResNets take long on simulated ones.
    """
    generator = torch.Generator().manual_seed(1)
    labels = torch.arange(48) % 5
    if name == "resnet18":
        data = TensorDataset(torch.randn(48, 3, 64, 64, generator=generator), labels)
        return resnet18(num_classes=5), data, nn.CrossEntropyLoss()
    if name == "perceptron":
        data = TensorDataset(torch.randn(48, 16, generator=generator), labels)
        return _perceptron(), data, nn.CrossEntropyLoss()
    if name == "convolutions":
        data = TensorDataset(torch.randn(48, 1, 8, 8, generator=generator), labels)
        return Convolutions(), data, nn.CrossEntropyLoss()
    tokens = torch.randint(11, (48, 7), generator=generator)
    if name in ("lstm", "stacked"):
        stacked = {"num_layers": 2, "dropout": 0.3} if name == "stacked" else {}
        made = lstm(num_classes=5, vocabulary_size=11, hidden_size=16, **stacked)
        return made, TensorDataset(tokens, labels), nn.CrossEntropyLoss()
    if name in ("gru", "encoder"):
        return _of_tokens(name), TensorDataset(tokens, labels), nn.CrossEntropyLoss()
    data = TensorDataset(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())
    return (
        transformer(vocabulary_size=11, max_length=6, width=16, depth=2, heads=2, dropout=0.1),
        data,
        _tokens,
    )


def open_run(world: World, strategy: str, **options: Any) -> Run:
    """A run of 16 samples a step in 8 micro-batches."""
    settings = {
        "global_batch": 16,
        "micro_batches": 8,
        "seed": 3,
        "threads": 1,
        "timeout": 60.0,
        "keep": None,
    }
    return Run(RunOptions.of(**{**settings, "strategy": strategy, **options}), world)


def rehearse_no_more(run: Run) -> None:
    """Ends the rehearsals at new epochs, in which the host waits, so that ordinary steps are observed."""
    run.rehearsals.due = dict.fromkeys(run.rehearsals.due, Due(after_epoch=math.inf))


def _without_wait() -> None:
    """The sums over the ranks are computed before what they need has arrived."""
    OrderedBucket._wait = lambda bucket: None  # type: ignore[method-assign]  # the mistake


def _without_record_stream() -> None:
    """The memory of a batch is not kept for the stream that computes on it."""
    Tensor.record_stream = lambda tensor, stream: None  # type: ignore[method-assign,assignment]  # the mistake


def _without_pinned_memory() -> None:
    """The header of a step is copied to the device from pageable memory."""
    Tensor.pin_memory = lambda tensor, device=None: tensor  # type: ignore[method-assign,assignment]  # the mistake


def _without_wait_for_gather() -> None:
    """A block of fsdp is used before the values that were gathered ahead have arrived."""
    assert Gathering._gather  # notes the event that is waited for
    Gathering._gather = lambda gathering, block, *, keep: block.gather(keep=keep)  # type: ignore[method-assign]


def _without_own_stream_waiting() -> None:
    """Blocks of fsdp are gathered into memory, and gradients sent, that are still computed on."""
    torch.cuda.Stream.wait_stream = lambda stream, other: None  # type: ignore[method-assign]  # the mistake


MISTAKES = {
    "no wait": _without_wait,
    "no wait for a gather": _without_wait_for_gather,
    "no wait between streams": _without_own_stream_waiting,
    "no record_stream": _without_record_stream,
    "no pinned memory": _without_pinned_memory,
}
"""By name; each is made in the process of one training."""


def train(
    world: World,
    name: str,
    strategy: str,
    options: dict[str, Any],
    keep_order: bool = False,
    plant: str = "",
) -> Trained:
    """Trains a job of ``job_of`` for a few steps, and observes the later of them; ranks are compared at the end alone.

    Args:
        world: this rank.
        name: of the job.
        strategy: of the run.
        options: of ``lockstep.init``.
        keep_order: whether the order of launches is kept.
        plant: a mistake of ``MISTAKES`` in Lockstep's own code.
    """
    if plant:
        MISTAKES[plant]()
    torch.manual_seed(0)
    with observed() as start:
        run = open_run(world, strategy, **{"fingerprint_every": 0, **options})
        model, data, loss_fn = job_of(name)
        made: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        model, stepped = run.prepare(model, made)
        wired = communicators()
        losses: list[Tensor] = []
        norms: list[Any] = []
        later: Seen | None = None
        context = observed(keep_order=keep_order)
        held = 0
        for _ in run.epochs(10):
            for batch in run.batches(data):
                if len(losses) == _FIRST:
                    held = torch.cuda.memory_allocated()
                    rehearse_no_more(run)
                    later = context.__enter__()
                losses.append(run.backward(batch, loss_fn).detach().clone())
                norms.append(run.clip_gradients(0.5))
                stepped.step()
                stepped.zero_grad()
                if len(losses) == _STEPS:
                    break
            if len(losses) >= _STEPS:
                break
        assert later is not None
        found = Trained("", {}, dict(later.waits), launches=later.launches, order=later.order)
        found.held, found.peak = held, torch.cuda.max_memory_allocated()
        context.__exit__(None, None, None)
        found.wired, found.added = wired, communicators()[len(wired) :]
        found.fingerprint = run.fingerprint()
        found.losses = [float(each) for each in losses]
        found.norms = [float(each) for each in norms]
        run.close()
    found.races = dict(start.races + later.races)
    return found


def steps_of(run: Run, name: str, epochs: int, place: str = "host") -> Iterator[Batch]:
    """Trains a job of ``job_of`` by SGD, with samples at one of ``PLACES``; gives each batch after its step."""
    model, few, loss_fn = job_of(name)
    data = PLACES[place](few)
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in run.epochs(epochs):
        for batch in run.batches(data):
            run.backward(batch, loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            yield batch


def trained_for(world: World, strategy: str, options: dict[str, Any], steps: int, **further: Any) -> str:
    """Trains to a number of steps, goes on from a checkpoint if there is one, and saves; returns the fingerprint."""
    torch.manual_seed(0)
    run = open_run(world, strategy, **options, **further)
    model, data, loss_fn = job_of("convolutions")
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    for _ in run.epochs(10):
        for batch in run.batches(data):
            run.backward(batch, loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            if run.position.step + 1 == steps:
                break
        if run.position.step + 1 >= steps:
            break
    if further:
        run.save(wait=True)
    found = run.fingerprint()
    run.close()
    return found


def saving(
    world: World, strategy: str, options: dict[str, Any], steps: int, folder: str, resume: str
) -> tuple[str, Any]:
    """``trained_for`` with a run folder; returns the fingerprint and the races."""
    with observed() as seen:
        found = trained_for(world, strategy, options, steps, directory=folder, resume=resume)
    return found, dict(seen.races)


class OnTheDevice(torch.utils.data.Dataset[tuple[Tensor, ...]]):
    """Makes samples on the device."""

    def __init__(self, samples: TensorDataset) -> None:
        self._samples = samples

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        """One sample."""
        return tuple(each.cuda() for each in self._samples[index])

    def __len__(self) -> int:
        return len(self._samples)


PLACES: dict[str, Callable[[TensorDataset], Any]] = {
    "host": lambda data: data,
    "device": lambda data: TensorDataset(*(each.cuda() for each in data.tensors)),
    "made there": OnTheDevice,
}
"""Where samples may be, and the data set that has them there."""


def fed(world: World, strategy: str, place: str) -> tuple[str, dict[tuple[str, str], int]]:
    """Trains on samples that are at one of ``PLACES``; the fingerprint and the races."""
    with observed() as seen:
        run = open_run(world, strategy, fingerprint_every=0)
        torch.manual_seed(0)
        for _ in steps_of(run, "perceptron", 2, place):
            pass
        found = run.fingerprint()
        run.close()
    return found, dict(seen.races)
