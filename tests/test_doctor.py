"""The checks of a host, and of times between ranks."""

from collections import namedtuple

import pytest

from lockstep import doctor
from lockstep.doctor import LARGE, Grade, judge_links

Usage = namedtuple("Usage", "total used free")


def graded(findings, subject):
    return {each.found: each.grade for each in findings if each.subject == subject}


@pytest.mark.fault("M7")
def test_an_interface_that_is_not_there_is_a_fault_with_those_that_are():
    (finding,) = [each for each in doctor.look_at_host({"GLOO_SOCKET_IFNAME": "eth77"}) if each.grade is Grade.FAULT]
    assert "GLOO_SOCKET_IFNAME=eth77 is not on this host" in finding.found
    assert "lo" in finding.advice


def test_without_a_default_route_only_a_run_whose_master_is_unknown_is_warned(monkeypatch):
    monkeypatch.setattr(doctor, "_default_interface", lambda: None)
    monkeypatch.setattr(doctor.socket, "if_nameindex", lambda: [(1, "lo"), (2, "eth0"), (3, "ib0")])
    (found,) = [each for each in doctor.look_at_host({}) if each.subject == "interface"]
    assert found.grade is Grade.WARNING
    assert "--interface" in found.advice
    (found,) = [each for each in doctor.look_at_host({}, ("127.0.0.1", 5)) if each.subject == "interface"]
    assert (found.grade, found.found) == (Grade.OK, "lo, for the data of a run whose --master is 127.0.0.1")


def test_an_interface_that_was_asked_for_and_is_not_there_is_a_fault():
    found = doctor.look_at_host({}, ("127.0.0.1", 5), "eth77")
    (fault,) = [each for each in found if each.grade is Grade.FAULT]
    assert "The interface 'eth77' was asked for" in fault.found


def test_an_interface_that_is_there_is_no_fault():
    assert all(each.grade is not Grade.FAULT for each in doctor.look_at_host({"GLOO_SOCKET_IFNAME": "lo"}))


def test_more_threads_than_cores_are_a_warning():
    findings = doctor.look_at_host({"OMP_NUM_THREADS": "4096"})
    assert list(graded(findings, "threads").values()) == [Grade.WARNING]


def test_little_shared_memory_is_a_warning_that_names_the_option(monkeypatch):
    monkeypatch.setattr(doctor.shutil, "disk_usage", lambda path: Usage(64 << 20, 60 << 20, 4 << 20))
    (finding,) = [each for each in doctor.look_at_host({}) if each.subject == "shared memory"]
    assert finding.grade is Grade.WARNING
    assert "--shm-size" in finding.advice


def test_a_folder_that_cannot_be_written_is_a_fault_with_the_setting_of_another(monkeypatch):
    monkeypatch.setattr(doctor.os, "access", lambda path, mode: False)
    found = {each.subject: (each.grade, each.advice) for each in doctor.look_at_host({})}
    assert found["temporary"] == (Grade.FAULT, "Set another with TMPDIR")
    assert found["this folder"] == (Grade.FAULT, "Set another with --set run.directory=...")


@pytest.mark.parametrize(("texts", "limit"), [({"memory.max": "max"}, None), ({"memory.max": "1048576"}, 1048576)])
def test_the_memory_limit_is_that_of_the_cgroup(texts, limit, monkeypatch, tmp_path):
    real = doctor.Path

    def path(text):
        if text == "/proc/self/cgroup":
            (tmp_path / "cgroup").write_text("0::/here\n")
            return tmp_path / "cgroup"
        return tmp_path / "fs" if text == "/sys/fs/cgroup" else real(text)

    (tmp_path / "fs" / "here").mkdir(parents=True)
    for name, text in texts.items():
        (tmp_path / "fs" / "here" / name).write_text(text)
    monkeypatch.setattr(doctor, "Path", path)
    assert doctor.memory_limit() == limit


ONE_HOST = {"hosts": ["fa", "fa", "fa"]}
FAST, SLOW = 2 * LARGE / 10e9, 2 * LARGE / 1e9


def test_equal_pairs_are_fine_and_the_slowest_is_named():
    found = {
        "latency": 50e-6,
        "large": 2e-3,
        "pairs": [[0, 1, FAST], [0, 2, FAST * 1.1], [1, 2, FAST]],
        **ONE_HOST,
    }
    findings = judge_links(found)
    assert [each.grade for each in findings] == [Grade.OK, Grade.OK]
    assert "50 us for 8 bytes" in findings[0].found
    assert "ranks 0 and 2" in findings[1].found


@pytest.mark.fault("M5")
def test_a_pair_far_slower_than_the_others_is_a_warning_that_says_where_to_look():
    found = {"latency": 50e-6, "large": 2e-3, "pairs": [[0, 1, FAST], [0, 2, FAST], [1, 2, SLOW]], **ONE_HOST}
    finding = judge_links(found)[1]
    assert finding.grade is Grade.WARNING
    assert "ranks 1 and 2, 1 GB/s" in finding.found
    assert "10 GB/s" in finding.advice


def test_the_bandwidth_of_an_all_reduce_counts_what_a_ring_moves():
    found = {"latency": 1e-3, "large": 2 * 3 / 4 * LARGE / 5e9, "pairs": [[0, 1, FAST]], "hosts": ["fa"] * 4}
    said = judge_links(found)[0].found
    assert said.endswith("1000 us for 8 bytes, 2.52 ms for 8 MiB (5 GB/s from each rank to the next in a ring)")


def test_ranks_of_several_hosts_are_named_with_their_hosts():
    pairs = [[0, 1, FAST], [0, 2, SLOW], [1, 2, FAST]]
    found = {"latency": 50e-6, "large": 2e-3, "pairs": pairs, "hosts": ["fa", "fa", "fb"]}
    findings = judge_links(found)
    assert findings[0].found.startswith("3 ranks on 2 hosts: ")
    assert findings[1].found.startswith("ranks 0 (fa) and 2 (fb), 1 GB/s")


def test_one_rank_has_nobody_to_exchange_with():
    findings = judge_links({"latency": 0.0, "large": 0.0, "pairs": [], "hosts": ["fa"]})
    assert [each.found for each in findings] == ["one device, nothing to exchange"]
