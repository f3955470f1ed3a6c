import pytest
from tests.trainer.jobs import Jobs


@pytest.fixture
def jobs(tmp_path):
    return Jobs(tmp_path)
