"""Loggers of a run's metrics: the console, a JSON-lines file, TensorBoard."""

from lockstep.loggers.console import Console
from lockstep.loggers.json_lines import JsonLines
from lockstep.loggers.logger import Logger, MultiLogger, open_loggers
from lockstep.loggers.tensorboard import TensorBoard

__all__ = ["Console", "JsonLines", "Logger", "MultiLogger", "TensorBoard", "open_loggers"]
