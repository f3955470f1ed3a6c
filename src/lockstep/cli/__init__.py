"""The ``lockstep`` command."""

from lockstep.cli.command_line import main

__all__ = ["main"]
