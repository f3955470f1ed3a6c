"""How long each part of a model takes, measured once before training, to cut it into parts that take about as long."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain as flattened
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from lockstep.errors import ConfigError
from lockstep.strategies.pipeline.chain import Link, chain
from lockstep.strategies.pipeline.splitting import balanced, inseparable, too_few

logger = logging.getLogger(__name__)


def measured_split(
    model: nn.Module, stages: int, *inputs: Any, repeats: int = 5, strategy: str = "pipeline"
) -> tuple[str, ...]:
    """Split points that balance the time of a forward pass, measured here; to be given as ``pipeline.split``.

    They are to be written down, or given to all processes, rather than measured in every one, since all ranks must
    agree. The layers go to the device of ``inputs`` one after the other and come back, so the model need not fit there.
    Values, buffers, modes and the random numbers of the process are left as they were.

    Args:
        model: anywhere.
        stages: how many.
        inputs: of a typical micro-batch, on the device where it is measured.
        repeats: the fastest of so many runs counts.
        strategy: whose option ``split`` the points are; for messages.

    Raises:
        ConfigError: the model has too few parts.
    """
    links = chain(model)
    starts = balanced([1.0] * len(links), stages, inseparable(links))
    if not starts and stages > 1:
        raise ConfigError(too_few(links, stages, strategy))
    devices = {value.device for value in inputs if isinstance(value, Tensor)}
    device = devices.pop() if len(devices) == 1 else torch.device("cpu")
    with _left_as_it_was(model, device), torch.no_grad():
        weights = [min(times) for times in zip(*(_times(links, inputs, device) for _ in range(repeats)))]
    starts = balanced(weights, stages, inseparable(links))
    parts = [1000 * sum(weights[a:b]) for a, b in pairwise([0, *starts, len(links)])]
    points = tuple(links[start].name for start in starts)
    shown = ", ".join(f"{part:.2g}" for part in parts)
    logger.info(
        "Cut by measured time: %s.split = %s; forward passes of %s ms.", strategy, list(points), shown
    )
    return points


@contextmanager
def _left_as_it_was(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Evaluation mode inside; afterwards modes, buffers and random numbers are what they were before."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    model.eval()
    try:
        with torch.random.fork_rng([device] if device.type == "cuda" else []):
            yield
    finally:
        for module, training in modes:
            module.training = training
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)


def _times(links: Sequence[Link], inputs: tuple[Any, ...], device: torch.device) -> list[float]:
    """Seconds of each link's forward pass."""
    found, values = [], tree_map_only(Tensor, torch.clone, inputs)  # a layer may change its input in place
    for link in links:
        tensors = flattened(link.module.parameters(), link.module.buffers())
        home = next((tensor.device for tensor in tensors), device)
        link.module.to(device)
        _wait_for(device)
        start = time.perf_counter()
        values = (link.module(*values),)
        _wait_for(device)
        found.append(time.perf_counter() - start)
        link.module.to(home)
    return found


def _wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
