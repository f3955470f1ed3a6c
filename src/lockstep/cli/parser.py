"""An argument parser whose mistakes are ``ConfigError`` and name the nearest option."""

from __future__ import annotations

import argparse
import re
from typing import Any, NoReturn

from lockstep.errors import ConfigError, nearest

_CHOICE = re.compile(r"invalid choice: '(.*?)'")


class Parser(argparse.ArgumentParser):
    """``argparse`` without abbreviations; its commands are parsed by the same class."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(allow_abbrev=False, **settings)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Refuses unknown options here, where the options of the command are known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            asked = unknown[0].partition("=")[0]
            close = nearest(asked, self._option_string_actions).partition(" Known:")[0]
            self.error(f"{asked} is not known to '{self.prog}'.{close}")
        return found, unknown

    def error(self, message: str) -> NoReturn:
        """Raises a ``ConfigError`` in place of printing the usage and ending the process."""
        choice = _CHOICE.search(message)
        if choice:
            known = [name for action in self._actions if action.choices for name in action.choices]
            message = (
                f"{choice.group(1)!r} is not a command of '{self.prog}'.{nearest(choice.group(1), known)}"
            )
        sentence = message if message.endswith((".", "?")) else f"{message[0].upper()}{message[1:]}."
        raise ConfigError(f"{sentence} See '{self.prog} --help'.")
