"""Several loggers as one; one that fails is left out with a warning, and training goes on."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress

from lockstep.loggers.protocol import Logger

_messages = logging.getLogger(__name__)


class MultiLogger:
    """Passes every reading on to each of its loggers.

    A logger that raises is warned about once and not called again: a full disk under a log, or a terminal
    that was closed, must not end a run.
    """

    def __init__(self, loggers: Iterable[Logger]) -> None:
        self._loggers = list(loggers)

    def begin(self, epoch: int, *, epochs: int, start: int, steps: int) -> None:
        """Tells every logger that an epoch begins or goes on."""
        self._each(lambda logger: logger.begin(epoch, epochs=epochs, start=start, steps=steps))

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Gives the readings to every logger."""
        self._each(lambda logger: logger.log(step, values))

    def epoch(self, epoch: int, step: int, values: Mapping[str, float]) -> None:
        """Gives the results of an epoch to every logger."""
        self._each(lambda logger: logger.epoch(epoch, step, values))

    def close(self) -> None:
        """Closes every logger that still works."""
        self._each(lambda logger: logger.close())

    def _each(self, call: Callable[[Logger], None]) -> None:
        for logger in list(self._loggers):
            try:
                call(logger)
            # Trackers raise whatever they like, and none of it is worth a run.
            except Exception as error:
                self._loggers.remove(logger)
                with suppress(Exception):
                    logger.close()
                _messages.warning(
                    "%s cannot be written any more and is left out from here on; training goes on. (%s: %s)",
                    type(logger).__name__,
                    type(error).__name__,
                    error,
                )
