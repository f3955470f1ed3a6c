import pytest
from tests.launch.command import Command


@pytest.fixture
def command(tmp_path):
    """A ``lockstep run`` that the test starts; nothing of it outlives the test."""
    one = Command(tmp_path)
    yield one
    one.clean_up()
