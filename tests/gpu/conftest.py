"""The simulated machine of ``tests/simcuda``."""

from tests.simcuda.conftest import machine

__all__ = ["machine"]
