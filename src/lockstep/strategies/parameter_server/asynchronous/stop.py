"""When all stop together: a step that none has begun, told by servers to workers and by workers to other servers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass
class Stop:
    """The step at which all stop, and why; zeros as long as nobody asked."""

    at: int = 0
    reason: int = 0

    def adopt(self, content: Mapping[str, Any]) -> None:
        """Takes over what a message says, unless something is known already."""
        if not self.at:
            self.at, self.reason = int(content["stop_at"]), int(content["stop_reason"])

    def as_content(self) -> dict[str, int]:
        """Ready for a message."""
        return {"stop_at": self.at, "stop_reason": self.reason}

    def reason_after(self, steps: int) -> int:
        """Why to stop when so many steps are done; 0: go on."""
        return self.reason if self.at and steps >= self.at else 0
