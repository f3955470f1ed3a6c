"""Runs a Python function on several ranks, from a script or another program."""

from __future__ import annotations

import os
from collections.abc import Callable
from types import ModuleType
from typing import Any

from lockstep.config.checks import file_path
from lockstep.errors import EXIT_DONE, EXIT_INTERRUPTED, EXIT_PREEMPTED, ConfigError, RankError
from lockstep.launch.options import LaunchOptions, parse_devices
from lockstep.launch.supervisor import run_world
from lockstep.launch.targets import FunctionTarget
from lockstep.runtime.control import Stopped, StopReason


def launch(
    function: Callable[..., Any],
    *args: Any,
    devices: int | str = "auto",
    threads: int | None = None,
    log_directory: str = "",
    **kwargs: Any,
) -> list[Any]:
    """Calls ``function(*args, **kwargs)`` on one new process per device and returns the results by rank.

    A script must guard the call with ``if __name__ == "__main__":``, because every rank imports the script.
    A failure raises ``RankError`` with the traceback of the rank that failed first.

    Args:
        function: defined at the top level of a file; its result must be representable as JSON.
        args: for the function; anything that can be pickled.
        devices: ``N``, ``auto``, ``cpu``, ``cpu:N`` or a list such as ``0,5``.
        threads: intra-op threads per rank; see ``LaunchOptions``.
        log_directory: where ranks above 0 write their output; see ``LaunchOptions``.
        kwargs: for the function.
    """
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        raise ConfigError(
            f"launch() was called on rank {os.environ['RANK']} of a world of {os.environ['WORLD_SIZE']}, which would "
            "start ranks within ranks. Put the call under if __name__ == '__main__':, since every rank imports its "
            "file; in a script that a launcher starts, such as lockstep run, call the function itself."
        )
    if problem := file_path(log_directory):
        raise ConfigError(f"log_directory {problem}")
    target = FunctionTarget.from_function(function, args, kwargs)
    options = LaunchOptions(devices=parse_devices(devices), threads=threads, log_directory=os.fspath(log_directory))
    outcome = run_world(target, options)
    if outcome.code == EXIT_DONE:
        return list(outcome.results)
    if outcome.code == EXIT_INTERRUPTED:
        raise KeyboardInterrupt
    if outcome.code == EXIT_PREEMPTED:
        raise Stopped(StopReason.PREEMPTED)
    raise RankError("\n".join(outcome.lines))


class CallablePackage(ModuleType):
    """The package ``lockstep.launch``, which can be called like the function of that name.

    Importing any module of the package makes ``lockstep.launch`` the package, so it has to be both.
    """

    def __call__(self, function: Callable[..., Any], *args: Any, **settings: Any) -> list[Any]:
        """See ``launch``."""
        return launch(function, *args, **settings)
