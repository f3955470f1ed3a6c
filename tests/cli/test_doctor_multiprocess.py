"""``lockstep doctor`` as a command."""

import json

from lockstep.cli import main


def test_a_sound_machine_has_no_fault_and_its_ranks_are_timed(capsys):
    assert main(["doctor", "--devices", "cpu:3", "--json"]) == 0
    findings = {each["subject"]: each for each in map(json.loads, capsys.readouterr().out.splitlines())}
    assert {"system", "memory", "torch", "backends", "devices", "all-reduce", "slowest pair"} <= set(findings)
    assert all(each["grade"] != "fault" for each in findings.values())
    assert "3 ranks" in findings["all-reduce"]["found"]


def test_a_fault_is_the_exit_status_of_scripts(capsys, monkeypatch):
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "eth77")
    assert main(["doctor", "--no-exchange"]) == 1
    assert "fault    interface" in capsys.readouterr().out
