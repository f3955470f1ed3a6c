import pytest
from tests.launch.hosts.host import Hosts, on_one_process
from tests.launch.hosts.network import TwoHostNetwork, missing


@pytest.fixture(scope="session")
def alone(tmp_path_factory):
    """The fingerprint of the small job on one process."""
    return on_one_process(tmp_path_factory.mktemp("alone"))


@pytest.fixture
def two_hosts(tmp_path):
    """Two hosts' commands on loopback; nothing of them outlives the test."""
    hosts = Hosts(tmp_path)
    yield hosts
    hosts.clean_up()


@pytest.fixture(scope="session")
def network(tmp_path_factory):
    """Two network namespaces joined by a cable; skips with the reason where they cannot be made."""
    if reason := missing():
        pytest.skip(reason)
    with TwoHostNetwork(tmp_path_factory.mktemp("network")) as made:
        yield made


@pytest.fixture
def wired_hosts(network, tmp_path):
    """Two hosts' commands in the two namespaces."""
    network.mend()
    hosts = Hosts(tmp_path, network.addresses[0], network.prefixes)
    yield hosts
    hosts.clean_up()
    network.mend()
