"""What is said about a host."""

from collections import namedtuple

import pytest

from lockstep.doctor import host
from lockstep.doctor.host import Grade

Usage = namedtuple("Usage", "total used free")


def graded(findings, subject):
    return {each.found: each.grade for each in findings if each.subject == subject}


@pytest.mark.fault("M7")
def test_an_interface_that_is_not_there_is_a_fault_with_those_that_are():
    (finding,) = [
        each for each in host.look_at_host({"GLOO_SOCKET_IFNAME": "eth77"}) if each.grade is Grade.FAULT
    ]
    assert "GLOO_SOCKET_IFNAME=eth77 is not on this host" in finding.found
    assert "lo" in finding.advice


def test_without_a_default_route_only_a_run_whose_master_is_unknown_is_warned(monkeypatch):
    monkeypatch.setattr(host, "_default_interface", lambda: None)
    monkeypatch.setattr(host.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    (found,) = [each for each in host.look_at_host({}) if each.subject == "interface"]
    assert found.grade is Grade.WARNING
    assert "--interface" in found.advice
    (found,) = [each for each in host.look_at_host({}, ("127.0.0.1", 5)) if each.subject == "interface"]
    assert (found.grade, found.found) == (Grade.OK, "lo, for the data of a run whose --master is 127.0.0.1")


def test_an_interface_that_was_asked_for_and_is_not_there_is_a_fault():
    found = host.look_at_host({}, ("127.0.0.1", 5), "eth77")
    (fault,) = [each for each in found if each.grade is Grade.FAULT]
    assert "The interface 'eth77' was asked for" in fault.found


def test_an_interface_that_is_there_is_no_fault():
    assert all(each.grade is not Grade.FAULT for each in host.look_at_host({"GLOO_SOCKET_IFNAME": "lo"}))


def test_more_threads_than_cores_are_a_warning():
    findings = host.look_at_host({"OMP_NUM_THREADS": "4096"})
    assert list(graded(findings, "threads").values()) == [Grade.WARNING]


def test_little_shared_memory_is_a_warning_that_names_the_option(monkeypatch):
    monkeypatch.setattr(host.shutil, "disk_usage", lambda path: Usage(64 << 20, 60 << 20, 4 << 20))
    (finding,) = [each for each in host.look_at_host({}) if each.subject == "shared memory"]
    assert finding.grade is Grade.WARNING
    assert "--shm-size" in finding.advice


def test_a_folder_that_cannot_be_written_is_a_fault(monkeypatch):
    monkeypatch.setattr(host.os, "access", lambda path, mode: False)
    findings = [each for each in host.look_at_host({}) if each.subject == "this folder"]
    assert [each.grade for each in findings] == [Grade.FAULT]


@pytest.mark.parametrize(
    ("texts", "limit"), [({"memory.max": "max"}, None), ({"memory.max": "1048576"}, 1048576)]
)
def test_the_memory_limit_is_that_of_the_cgroup(texts, limit, monkeypatch, tmp_path):
    real = host.Path

    def path(text):
        if text == "/proc/self/cgroup":
            (tmp_path / "cgroup").write_text("0::/here\n")
            return tmp_path / "cgroup"
        return tmp_path / "fs" if text == "/sys/fs/cgroup" else real(text)

    (tmp_path / "fs" / "here").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "fs" / "here" / name).write_text(text)
    monkeypatch.setattr(host, "Path", path)
    assert host.memory_limit() == limit
