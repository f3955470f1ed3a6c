"""Whose runs are replayed; nothing is run."""

import os

import pytest

from lockstep.cli import main


@pytest.mark.fault("X5")
def test_the_run_of_another_user_is_refused_unless_trusted(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(os, "getuid", lambda: tmp_path.stat().st_uid + 1)
    assert main(["replay", str(tmp_path), "--step", "0"]) == 2
    assert "names code that would run as you. Give --trust if you trust them." in capsys.readouterr().err
    assert main(["replay", str(tmp_path), "--step", "0", "--trust"]) == 2
    assert "holds no job.json" in capsys.readouterr().err
