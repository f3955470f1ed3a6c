"""Random numbers of a sample, computed from its key instead of drawn from a stream.

Code of ours takes its numbers from ``SampleKeys.uniforms``, which touches no generator at all. For other code
``core/generators.py`` seeds the generators for the sample that it works on.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from lockstep.core.plan import Indices, mix
from lockstep.core.seeding import sample_seeds

EVALUATION_EPOCH = -1
"""The epoch in the keys of samples that are evaluated: they look alike after every epoch of training."""

_GOLDEN = 0x9E3779B97F4A7C15


@dataclass(frozen=True)
class SampleKeys:
    """The keys of the samples of one micro-batch."""

    seed: int
    """The run's seed."""
    epoch: int
    """The epoch, or ``EVALUATION_EPOCH``."""
    indices: Indices
    """The samples as the plan numbers them: within a ``Subset``, the subset's numbers."""

    def seeds(self) -> list[int]:
        """One 63-bit seed for each sample."""
        return sample_seeds(self.seed, self.epoch, self.indices.tolist())

    def uniforms(self, draws: int) -> npt.NDArray[np.float64]:
        """``draws`` numbers in [0, 1) for each sample, of shape (samples, draws).

        Row ``i`` depends only on the key of sample ``i``, so not on the micro-batch it is in. It is the
        sequence of SplitMix64 (Steele, Lea and Flood 2014) that starts at the sample's seed.
        """
        seeds = np.array(self.seeds(), dtype=np.uint64)[:, None]
        x = mix(seeds + np.arange(1, draws + 1, dtype=np.uint64) * np.uint64(_GOLDEN))
        return np.asarray((x >> np.uint64(11)) * 2.0**-53, dtype=np.float64)
