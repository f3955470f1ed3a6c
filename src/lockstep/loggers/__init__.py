"""Loggers of a run's metrics: the console, files of JSON lines or CSV, TensorBoard."""

from lockstep.loggers.console import Console
from lockstep.loggers.logger import Logger, MultiLogger, open_loggers
from lockstep.loggers.metrics_files import CsvTable, JsonLines
from lockstep.loggers.trackers import TensorBoard

__all__ = ["Console", "CsvTable", "JsonLines", "Logger", "MultiLogger", "TensorBoard", "open_loggers"]
