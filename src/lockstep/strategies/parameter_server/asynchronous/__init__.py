"""Asynchronous parameter server: workers that do not wait for each other, as far as a bound allows (level C)."""

from lockstep.strategies.parameter_server.asynchronous.strategy import AsynchronousParameterServer

__all__ = ["AsynchronousParameterServer"]
