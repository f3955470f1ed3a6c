"""Records the commit in what is built from a checkout; everything else about the package is in ``pyproject.toml``."""

import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.build_py import build_py
from setuptools.command.sdist import sdist

ROOT = Path(__file__).parent
RECORD = "lockstep/commit.txt"


def write_commit(source_root: str) -> None:
    """Writes the commit below ``source_root``, which may hold that of an sdist; without a checkout, writes nothing."""
    if not (ROOT / ".git").exists():
        return
    describe = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    try:
        commit = subprocess.run(describe, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        return
    (Path(source_root) / RECORD).write_text(commit)


class BuildModules(build_py):
    """Builds the wheel's modules. An editable install gets no record: its checkout says which commit it is."""

    def run(self) -> None:
        """Copies the modules, and records the commit."""
        super().run()
        if not self.editable_mode:
            write_commit(self.build_lib)


class BuildArchive(sdist):
    """Builds the source archive."""

    def make_release_tree(self, base_dir: str, files: list[str]) -> None:
        """Copies the files, and records the commit."""
        super().make_release_tree(base_dir, files)
        write_commit(f"{base_dir}/src")


setup(cmdclass={"build_py": BuildModules, "sdist": BuildArchive})
