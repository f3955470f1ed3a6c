"""The glossary leads to files that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
ROWS = re.findall(r"^\| (.+?) \| (.+?) \| `(.+?)` \|$", (ROOT / "docs" / "glossary.md").read_text(), re.M)


def test_every_term_leads_to_a_file():
    assert len(ROWS) > 60
    assert not [path for _, _, path in ROWS if not (ROOT / path).is_file()]
