"""Modules that the command imports for itself, where the user's folder has one of that name."""

import sys

import pytest

from lockstep.loggers.console import import_installed


@pytest.mark.fault("X5")
def test_a_module_in_the_current_folder_does_not_take_the_place_of_an_installed_one(tmp_path, monkeypatch):
    here, installed = tmp_path / "here", tmp_path / "installed"
    for folder, text in ((here, "raise SystemExit"), (installed, "FOUND = 1")):
        folder.mkdir()
        (folder / "some_installed_package.py").write_text(text)
    monkeypatch.chdir(here)
    monkeypatch.setattr(sys, "path", ["", str(here), str(installed), *sys.path])
    before = list(sys.path)
    assert import_installed("some_installed_package").FOUND == 1
    assert sys.path == before
    del sys.modules["some_installed_package"]
