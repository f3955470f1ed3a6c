"""The interface that leads to the other hosts; nothing is sent."""

import shutil
import socket
import subprocess
import sys

import pytest

from lockstep.core.world import LOOPBACK
from lockstep.distributed import network
from lockstep.distributed.network import (
    Interface,
    addresses,
    data_address,
    data_interface,
    interface_of_master,
    interface_towards,
    require_loopback,
)
from lockstep.errors import ConfigError

KNOWN = [
    Interface("lo", "127.0.0.1"),
    Interface("eth0", "10.0.0.5"),
    Interface("ib0", "192.168.9.5"),
    Interface("lo", "127.0.1.1"),
    Interface("eth0", "fd00::5"),
]


@pytest.fixture
def names(monkeypatch):
    """Names that resolve in this test, and nothing else does."""
    known = {"node0": "10.0.0.5", "self": "127.0.1.1", "far": "10.0.0.9"}

    def lookup(host, port, **_):
        if host.replace(".", "").isdigit() or ":" in host:
            known[host] = host
        if host not in known:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (known[host], port))]

    monkeypatch.setattr(socket, "getaddrinfo", lookup)


@pytest.mark.parametrize(("master", "name"), [("node0", "eth0"), ("192.168.9.5", "ib0"), ("fd00::5", "eth0")])
def test_node_0_listens_where_its_master_address_is(names, master, name):
    assert interface_of_master(master, 1, KNOWN).name == name


def test_loopback_by_its_own_name_says_that_all_is_on_one_machine(names):
    assert interface_of_master("127.0.0.1", 1, KNOWN).name == "lo"


@pytest.mark.fault("M7")
def test_a_host_name_that_leads_to_loopback_is_refused_with_addresses_that_do_not(names):
    with pytest.raises(ConfigError, match=r"self is 127.0.1.1 on this host.*10.0.0.5 \(eth0\), 192.168.9.5 \(ib0\)"):
        interface_of_master("self", 1, KNOWN)


def test_an_address_of_another_host_is_refused_for_node_0(names):
    refused = r"far is 10\.0\.0\.9, which is not an address of this host; its addresses are "
    with pytest.raises(ConfigError, match=rf"{refused}127\.0\.0\.1 \(lo\), .*fd00::5 \(eth0\)\."):
        interface_of_master("far", 1, KNOWN)
    with pytest.raises(ConfigError, match=rf"{refused}unknown\."):
        interface_of_master("far", 1, [])


@pytest.mark.fault("S2")
def test_a_name_that_nobody_knows_is_refused(names):
    with pytest.raises(ConfigError, match="--master nowhere cannot be resolved: Name or service not known"):
        interface_towards("nowhere", 1, KNOWN)


def test_the_interface_towards_loopback_is_loopback():
    found = interface_towards("127.0.0.1", 1, addresses())
    assert found == Interface("lo", "127.0.0.1")


@pytest.mark.parametrize(
    ("interface", "address"),
    [("", "10.0.0.5"), ("eth0", "10.0.0.5"), ("ib0", "192.168.9.5"), ("gone", "10.0.0.5")],
)
def test_data_goes_over_the_interface_that_was_chosen(monkeypatch, interface, address):
    monkeypatch.setattr(network, "addresses", lambda: [Interface("ib0", "fe80::5"), *KNOWN])
    monkeypatch.setattr(network, "interface_towards", lambda *asked: Interface("eth0", "10.0.0.5"))
    environment = {"GLOO_SOCKET_IFNAME": interface} if interface else {}
    assert data_address("10.0.0.1", 29500, environment) == address


def test_this_hosts_own_addresses_are_found():
    assert Interface("lo", "127.0.0.1") in addresses()
    assert {each.name for each in addresses()} <= {name for _, name in socket.if_nameindex()}


@pytest.mark.parametrize(
    ("asked", "environment", "name"),
    [("", {}, "eth0"), ("ib0", {}, "ib0"), ("", {"GLOO_SOCKET_IFNAME": "ib0"}, "ib0")],
)
def test_the_choice_can_be_set_and_is_made_otherwise(asked, environment, name):
    assert data_interface(asked, KNOWN[1], KNOWN, environment) == name


@pytest.mark.fault("M7")
def test_an_interface_that_is_not_there_is_refused():
    with pytest.raises(ConfigError, match="'eth7' was asked for, and this host has eth0, ib0, lo"):
        data_interface("eth7", KNOWN[1], KNOWN, {})


@pytest.mark.skipif(shutil.which("unshare") is None, reason="unshare makes the network without an interface that is up")
def test_a_loopback_interface_that_is_down_is_refused_in_a_sentence():
    """As in a new network namespace: it was gloo's "enforce fail ... Unable to find address for: lo"."""
    require_loopback(LOOPBACK)
    asked = "from lockstep.distributed.network import require_loopback; require_loopback('lo')"
    words = ["unshare", "--user", "--map-root-user", "--net", sys.executable, "-c", asked]
    ended = subprocess.run(words, capture_output=True, text=True)
    if ended.stderr.startswith("unshare:"):
        pytest.skip("no user namespaces here")
    assert ended.stderr.endswith("network namespace. Bring it up: ip link set lo up.\n")


@pytest.mark.fault("M7")
def test_loopback_between_hosts_is_refused():
    with pytest.raises(ConfigError, match="'lo' was asked for, and it does not leave this host"):
        data_interface("lo", KNOWN[1], KNOWN, {})
