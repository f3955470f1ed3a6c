"""Starts the real ``lockstep run`` for a test, and looks at what it leaves."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

from lockstep.runtime.heartbeat import read_beat

LOOP = Path(__file__).with_name("faulty_loop.py")
COMMAND = [sys.executable, "-c", "import sys; from lockstep.cli import main; sys.exit(main())", "run"]


@dataclass
class Command:
    """One ``lockstep run`` in a folder of its own."""

    folder: Path
    process: subprocess.Popen = field(init=False)
    begin: float = 0.0

    def start(self, script, *arguments, devices="cpu:3", options=(), environment=None):
        """Starts the command; its temporary and runtime folders lie inside ``folder``."""
        for name in ("tmp", "runtime", "marks"):
            (self.folder / name).mkdir(exist_ok=True)
        places = {"TMPDIR": str(self.folder / "tmp"), "XDG_RUNTIME_DIR": str(self.folder / "runtime")}
        self.start_clock()
        with (self.folder / "stdout").open("w") as stdout, (self.folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                [*COMMAND, "--devices", devices, *options, str(script), *map(str, arguments)],
                env={**os.environ, **places, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )
        return self

    def loop(self, fault="", *, steps=10**9, **settings):
        """Starts the faulty loop."""
        return self.start(LOOP, self.marks, steps, fault, **settings)

    def end(self, timeout=60):
        """Waits for the command and returns its exit code and the lines it wrote to stderr."""
        code = self.process.wait(timeout)
        return code, self.stderr.splitlines()

    def signal(self, number):
        """Signals the command alone, and starts the clock of ``seconds``."""
        self.start_clock()
        self.process.send_signal(number)

    def start_clock(self):
        self.begin = time.monotonic()

    @property
    def seconds(self):
        """Since the start, the last signal or ``start_clock``."""
        return time.monotonic() - self.begin

    @property
    def marks(self):
        return self.folder / "marks"

    @property
    def stdout(self):
        return (self.folder / "stdout").read_text()

    @property
    def stderr(self):
        return (self.folder / "stderr").read_text()

    def wait_for_mark(self, name, count=1, timeout=60):
        """Waits until ranks have left ``count`` marks of that name, and returns what they hold, by rank."""
        found = wait_until(lambda: self._marks(name, count), timeout, f"{count} marks {name!r}; {self.stderr}")
        return {int(path.name.rpartition("-")[2]): path.read_text() for path in found}

    def _marks(self, name, count):
        found = [path for path in sorted(self.marks.glob(f"{name}-*")) if path.suffix != ".new"]
        return found if len(found) >= count else None

    def wait_for_phase(self, phase):
        """Waits until rank 0's heartbeat shows the phase."""

        def beats():
            found = [read_beat(run, 0) for run in (self.folder / "runtime").iterdir()]
            return any(beat and beat.phase == phase for beat in found)

        wait_until(beats, 60, f"phase {phase!r}")

    def wait_for_fork_server(self):
        """Waits until the launcher has a child; it then imports torch for about a second."""
        wait_until(lambda: len(self.processes()) == 2, 60, "the fork server")

    @staticmethod
    def parent_of(process):
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])

    def processes(self):
        """Process ids of all that belongs to the run, found by its folder in their environment."""
        mark = f"XDG_RUNTIME_DIR={self.folder / 'runtime'}".encode()
        found = []
        for entry in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if mark in (entry / "environ").read_bytes().split(b"\0") and not _is_zombie(entry):
                    found.append(int(entry.name))
        return sorted(found)

    def wait_until_nothing_runs(self, timeout=2.0):
        wait_until(lambda: not self.processes(), timeout, f"processes {self.processes()} to end")

    def left_over(self):
        """The entries of the runtime and temporary folders."""
        return sorted(path.name for name in ("tmp", "runtime") for path in (self.folder / name).iterdir())

    def clean_up(self):
        """Ends whatever a failed test left."""
        if hasattr(self, "process"):
            for process in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process, signal.SIGKILL)
            self.process.wait()


def wait_until(condition, timeout, what):
    """Polls until the condition is true, and returns its value."""
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline, f"waited {timeout} s for {what}"
        time.sleep(0.01)
    return value


def _is_zombie(entry):
    return (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
