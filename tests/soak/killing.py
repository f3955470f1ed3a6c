"""Runs that are killed at a random moment and resumed on a random world, and what must be true of them."""

import contextlib
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from lockstep.runtime.heartbeat import read_beat

HERE = Path(__file__).parent
SCRIPT = HERE / "perceptron.py"
NAMESPACE = ["unshare", "--map-root-user", "--pid", "--fork", "--mount-proc", "--kill-child"]
HOLD = 14
"""Steps that a run which is to be killed does at most; it waits there for the kill."""


@dataclass(frozen=True)
class Kill:
    """One moment, drawn from a seed."""

    world: int
    strategy: str
    victim: str
    step: int
    in_write: bool
    delay: float
    next_world: int
    next_strategy: str
    choice: float

    @classmethod
    def draw(cls, seed, strategies=("ddp",), victims=("rank", "launcher", "server")):
        """The same kill for the same seed."""
        draw = random.Random(seed)
        return cls(
            world=draw.randint(1, 4),
            strategy=draw.choice(strategies),
            victim=draw.choice(victims),
            step=draw.randint(0, HOLD - 1),
            in_write=draw.random() < 0.5,
            delay=draw.uniform(0, 0.01),
            next_world=draw.randint(1, 4),
            next_strategy=draw.choice(strategies),
            choice=draw.random(),
        )


class Soak:
    """The process that starts commands, and the folder of one run at a time."""

    def __init__(self, folder):
        self.folder = folder
        self._server = subprocess.Popen(
            [sys.executable, str(HERE / "prepared.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self._answer("ready")

    def close(self):
        """Ends it, and with it whatever a failed test left."""
        self._server.kill()
        self._server.wait()
        self._server.stdin.close()
        self._server.stdout.close()

    def new_run(self, name):
        """Takes a fresh folder."""
        self.place = self.folder / name
        for part in ("runtime", "tmp"):
            (self.place / part).mkdir(parents=True)

    def start(self, world, strategy, *words, options=(), in_pipe=False):
        """Starts the command; returns its process id. ``in_pipe``: it writes to a pipe, which ``reader`` reads."""
        outputs = {name: str(self.place / name) for name in ("stdout", "stderr")}
        if in_pipe:
            for path in outputs.values():
                Path(path).touch()
            outputs = dict.fromkeys(outputs, str(self.place / "pipe"))
            os.mkfifo(self.place / "pipe")
            self.reader = os.open(self.place / "pipe", os.O_RDONLY | os.O_NONBLOCK)
        order = {
            "arguments": self._arguments(world, strategy, *words, options=options),
            "environment": self._environment(),
            **outputs,
        }
        self._server.stdin.write(json.dumps(order) + "\n")
        self._server.stdin.flush()
        self.launcher = self._answer("pid")
        return self.launcher

    def _arguments(self, world, strategy, *words, options=()):
        options = ["--devices", f"cpu:{world}", "--logs", str(self.place / "logs"), *options]
        return ["run", *options, str(SCRIPT), str(self.place / "run"), strategy, *map(str, words)]

    def _environment(self):
        return {"TMPDIR": str(self.place / "tmp"), "XDG_RUNTIME_DIR": str(self.place / "runtime")}

    def end(self):
        """Waits for the command: exit code, output, errors. One that does not end is killed, for the next to start."""
        try:
            code = self._answer("code")
        except AssertionError:
            for pid in self.processes():
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            self._answer("code")
            raise
        return code, (self.place / "stdout").read_text(), (self.place / "stderr").read_text()

    def kill(self, kill):
        """Starts a run and kills it as told; whether that cut a checkpoint off."""
        self.start(kill.world, kill.strategy, "--hold", HOLD)
        self._wait((self.place / "run").exists, "the run folder", pause=0.01)
        self._wait(lambda: self._is_time(kill), f"step {kill.step}")
        select.select([], [], [], kill.delay)
        os.kill(self._victim(kill), signal.SIGKILL)
        code, _, errors = self.end()
        assert code == {"rank": 4, "launcher": -signal.SIGKILL, "server": 4}[kill.victim], errors
        self.wait_until_nothing_runs()
        return bool(self.hidden())

    def kill_namespace(self, kill):
        """The same for a run in a process namespace of its own, all of which is killed in one moment."""
        code = "import sys; from lockstep.cli import main; sys.exit(main())"
        outer = [*NAMESPACE, sys.executable, "-c", code]
        with (
            (self.place / "stderr").open("w") as errors,
            subprocess.Popen(
                [*outer, *self._arguments(kill.world, kill.strategy, "--hold", HOLD)],
                env={**os.environ, **self._environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            ) as process,
        ):
            try:
                self._wait(lambda: self._is_time(kill), f"step {kill.step}")
                select.select([], [], [], kill.delay)
            finally:
                children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
                os.kill(int(children[0]), signal.SIGKILL)  # its first process: the kernel kills the others
            process.wait(10)
        return bool(self.hidden())

    def finish(self, world, strategy):
        """Resumes the run to its end; its fingerprint."""
        self.start(world, strategy)
        code, output, errors = self.end()
        assert code == 0, errors
        self.wait_until_nothing_runs()
        return output.strip()

    def hidden(self):
        """Temporary entries in the run folder."""
        return sorted(path.name for path in (self.place / "run").glob(".*"))

    def left_over(self):
        """Temporary files anywhere; torch keeps an (empty) cache of its compiler, which is not ours."""
        found = [path.name for part in ("runtime", "tmp") for path in (self.place / part).iterdir()]
        return self.hidden() + [name for name in found if not name.startswith("torchinductor_")]

    def wait_until_nothing_runs(self):
        self._wait(lambda: not self.processes(), f"processes {self.processes()} to end", limit=3.0, pause=0.01)

    def processes(self):
        """All living descendants of the process that starts commands."""
        parents = {}
        for status in Path("/proc").glob("[0-9]*/stat"):
            with contextlib.suppress(OSError):
                state, parent = status.read_text().rpartition(")")[2].split()[:2]
                if state not in "ZX":
                    parents[int(status.parent.name)] = int(parent)
        found, newest = set(), {self._server.pid}
        while newest:
            newest = {pid for pid, parent in parents.items() if parent in newest}
            found |= newest
        return sorted(found)

    def _is_time(self, kill):
        names = [path.name for path in (self.place / "run").glob("*step-*")]
        if kill.in_write:
            return any(n.startswith(".") and int(n.split("-")[1].split(".")[0]) > kill.step for n in names)
        return any(not n.startswith(".") and int(n.split("-")[1]) > kill.step for n in names)

    def _victim(self, kill):
        if kill.victim == "launcher":
            return self.launcher
        if kill.victim == "server":
            text = Path(f"/proc/{self.launcher}/task/{self.launcher}/children").read_text()
            return int(text.split()[0])
        alive = set(self.processes())
        beats = [
            read_beat(directory, rank) for directory in (self.place / "runtime").iterdir() for rank in range(kill.world)
        ]
        pids = sorted(beat.pid for beat in beats if beat is not None and beat.pid in alive)
        return pids[int(kill.choice * len(pids))]

    def _answer(self, name):
        ready, _, _ = select.select([self._server.stdout], [], [], 120)
        assert ready, f"waited 120 s for {name!r}; {self.errors()}"
        return json.loads(self._server.stdout.readline())[name]

    def errors(self):
        path = getattr(self, "place", self.folder) / "stderr"
        return path.read_text() if path.exists() else ""

    def _wait(self, condition, what, limit=60.0, pause=0.0005):
        deadline = time.monotonic() + limit
        while not condition():
            assert time.monotonic() < deadline, f"waited {limit} s for {what}; {self.errors()}"
            time.sleep(pause)
