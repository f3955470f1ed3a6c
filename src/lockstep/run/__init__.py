"""The user's handle on a training run, and the parts that carry out its calls."""

from __future__ import annotations

from typing import Any

from lockstep.config.options import RunOptions, mention_unused_options
from lockstep.run.run import Run
from lockstep.runtime.lazy_compiler import postpone_compiler

__all__ = ["Run", "RunOptions", "init"]


def init(*, global_batch: int | None = None, micro_batches: int = 8, seed: int = 0, **options: Any) -> Run:
    """Begins a training run in this process. Collective: every rank must call this, with the same arguments.

    Args:
        global_batch: samples per optimizer step, over all devices together. It must be given.
        micro_batches: K, how many micro-batches a step is computed in; at most K devices can share it.
        seed: decides the order of the samples, their augmentation and the model's random numbers. torch, NumPy and
            ``random`` are seeded with it, unless the script has called ``torch.manual_seed`` before.
        options: any field of ``lockstep.config.options.RunOptions``, which has the defaults; of strategy, ddp.

    Raises:
        ConfigError: an option is missing, is not known or does not fit the others.
    """
    if global_batch is not None:
        options["global_batch"] = global_batch
    postpone_compiler()  # for scripts under python or torchrun: over a second of each process
    run = Run(RunOptions.of(micro_batches=micro_batches, seed=seed, **options))
    if run.is_main:
        mention_unused_options(run.options)
    return run
