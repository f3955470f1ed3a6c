import pytest
from tests.soak.killing import Soak


@pytest.fixture(scope="session")
def soak(tmp_path_factory):
    """Starts real commands quickly; see prepared.py."""
    one = Soak(tmp_path_factory.mktemp("soak"))
    yield one
    one.close()


@pytest.fixture(scope="session")
def undisturbed(soak):
    """The fingerprint of the run that nothing happened to, on one process."""
    soak.new_run("undisturbed")
    return soak.finish(1, "single")
