import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def jobs(tmp_path):
    from jobs import Jobs

    return Jobs(tmp_path)
