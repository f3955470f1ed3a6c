"""Comments that switch rules off: ``# lockstep: ignore[LS040]`` in the line of the finding."""

from __future__ import annotations

import io
import re
import tokenize

_COMMENT = re.compile(r"#\s*lockstep:\s*ignore(?:\[([^\]]*)\])?")
EVERY = "every"


def ignored_rules(text: str) -> dict[int, set[str]]:
    """What each line switches off: numbers as they are written, or ``every`` where none is named."""
    found: dict[int, set[str]] = {}
    try:
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            match = _COMMENT.search(token.string) if token.type == tokenize.COMMENT else None
            if match:
                words = {word.strip().upper() for word in (match.group(1) or "").split(",")} - {""}
                found[token.start[0]] = words or {EVERY}
    except (tokenize.TokenError, SyntaxError):
        pass  # the parser has accepted the file; what is read so far stands
    return found
