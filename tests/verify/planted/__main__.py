"""Writes docs/planted-faults.md: python -m tests.verify.planted"""

import sys
import tempfile

from tests.verify.planted.running import run_all
from tests.verify.planted.table import PAGE, page

if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        results = run_all(folder)
    for each in results:
        print(each.fault.loop.__name__, each.found and each.found.text, sep=": ", file=sys.stderr)
    PAGE.write_text(page(results))
