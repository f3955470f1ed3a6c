"""Tensor parallel: the features, channels and heads of layers split over ranks."""

from lockstep.strategies.tensor.strategy import TensorParallel

__all__ = ["TensorParallel"]
