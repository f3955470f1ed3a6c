"""Where the readings of a run go: the console, a JSON-lines file, TensorBoard."""

from lockstep.loggers.console import Console
from lockstep.loggers.json_lines import JsonLines
from lockstep.loggers.multi import MultiLogger
from lockstep.loggers.opening import open_loggers
from lockstep.loggers.protocol import Logger, NullLogger
from lockstep.loggers.tensorboard import TensorBoard

__all__ = ["Console", "JsonLines", "Logger", "MultiLogger", "NullLogger", "TensorBoard", "open_loggers"]
