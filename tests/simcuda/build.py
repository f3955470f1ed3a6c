"""Compiles the simulated devices, once for each state of their sources."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from importlib.metadata import distribution, version
from pathlib import Path

from filelock import FileLock

FOLDER = Path(__file__).parent
SOURCES = ("timeline.h", "device.cpp")
BUILT = FOLDER.parent.parent / "build" / "simcuda"


class NoCompiler(Exception):
    """This machine has no C++ compiler."""


def library() -> Path:
    """The path of the compiled library; made on the first call, in about 10 s.

    Raises:
        NoCompiler: there is none.
    """
    digest = hashlib.sha256(version("torch").encode())
    for name in SOURCES:
        digest.update((FOLDER / name).read_bytes())
    path = BUILT / f"{digest.hexdigest()[:16]}.so"
    if path.exists():
        return path
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        raise NoCompiler("the simulated CUDA needs a C++ compiler, such as g++ (apt-get install g++)")
    BUILT.mkdir(parents=True, exist_ok=True)
    with FileLock(BUILT / "lock"):
        if not path.exists():
            made = path.with_suffix(".tmp")
            _compile(compiler, made)
            made.rename(path)
    return path


def _compile(compiler: str, path: Path) -> None:
    torch = Path(str(distribution("torch").locate_file("torch")))
    headers = [torch / "include", torch / "include" / "torch" / "csrc" / "api" / "include"]
    libraries = torch / "lib"
    done = subprocess.run(
        [
            *(compiler, "-O1", "-w", "-std=c++20", "-fPIC", "-shared", *(f"-I{each}" for each in headers)),
            *(FOLDER / "device.cpp", "-o", path, f"-L{libraries}", "-ltorch", "-ltorch_cpu", "-lc10"),
            f"-Wl,-rpath,{libraries}",
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{compiler} could not compile the simulated CUDA:\n{done.stderr[-3000:]}")
