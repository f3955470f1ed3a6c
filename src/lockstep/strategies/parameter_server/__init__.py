"""Parameter server: some ranks hold the parameters and the optimizer, the others compute gradients for them."""

from lockstep.strategies.parameter_server.synchronous import ParameterServer

__all__ = ["ParameterServer"]
