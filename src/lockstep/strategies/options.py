"""What a strategy is told of the options of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from lockstep.strategy_options import (
    DpOptions,
    FsdpOptions,
    LayersOptions,
    ParameterServerOptions,
    PipelineOptions,
    TensorOptions,
)


class StrategyOptions(Protocol):
    """The fields of ``RunOptions`` that decide how a run is laid out."""

    @property
    def strategy(self) -> str:
        """Its name."""

    @property
    def mesh(self) -> str:
        """The axes of strategy ``hybrid``; empty for the others."""

    @property
    def precision(self) -> str:
        """Number types of the forward pass."""

    @property
    def micro_batches(self) -> int:
        """K of the recipe."""

    @property
    def reduce(self) -> str:
        """How gradients are summed over ranks."""

    @property
    def powersgd_rank(self) -> int:
        """Columns of the factors of ``powersgd``."""

    @property
    def sync_batch_norm(self) -> bool:
        """Whether BatchNorm sees the whole global batch."""

    @property
    def running_buffers(self) -> Sequence[str]:
        """Name patterns of further buffers to average."""

    @property
    def timeout(self) -> float:
        """Seconds that a rank waits for another."""

    @property
    def shared_memory(self) -> bool:
        """Whether CPU ranks of one host may exchange gradients through shared memory."""

    @property
    def dp(self) -> DpOptions:
        """The options of strategy ``dp``."""

    @property
    def layers(self) -> LayersOptions:
        """The options of strategy ``layers``."""

    @property
    def fsdp(self) -> FsdpOptions:
        """The options of strategy ``fsdp``."""

    @property
    def parameter_server(self) -> ParameterServerOptions:
        """The options of strategy ``parameter_server``."""

    @property
    def pipeline(self) -> PipelineOptions:
        """The options of strategy ``pipeline``."""

    @property
    def tensor(self) -> TensorOptions:
        """The options of strategy ``tensor``."""
