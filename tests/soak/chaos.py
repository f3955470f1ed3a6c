"""Random runs under random faults: ``python -m tests.soak.chaos SECONDS [SEED]``, or ``make chaos SECONDS=600 SEED=1``.

Each run has a strategy, a world and a fault drawn from its number. It is judged by what docs/faults.md promises: the
exit code of the fault with a reason on the terminal, no process left, and, resumed on another world, the fingerprint of
the undisturbed run and no file left. ``python -m tests.soak.chaos 1 NUMBER`` does one run again alone.
"""

import contextlib
import os
import random
import resource
import select
import shutil
import signal
import socket
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import psutil
from tests.launch.hosts.host import Hosts
from tests.launch.hosts.network import TwoHostNetwork, missing
from tests.soak.killing import HOLD, SCRIPT, Kill, Soak

STRATEGIES = ("ddp", "fsdp", "pipeline", "parameter_server")
ALL_STOPPED = (75, 0)  # a short run may have ended before


@dataclass(frozen=True)
class Fault:
    """One kind of fault: what it does to a run that goes on, and the exit codes that may come of it."""

    act: object
    codes: tuple
    is_held: bool = False
    """True if the run waits for it at a step, so that it cannot end before."""
    options: tuple = ()
    in_pipe: bool = False
    """True if the output of the run goes into a pipe."""


class Chaos:
    """Runs, one after the other, and what became of them."""

    def __init__(self, folder):
        self.soak = Soak(folder)
        self.outcomes, self.findings = Counter(), []
        self.soak.new_run("undisturbed")
        self.wanted = self.soak.finish(1, "single")

    def run(self, number):
        """Does the run of that number and judges it."""
        draw = random.Random(number)
        kill = Kill.draw(draw.random(), strategies=STRATEGIES)
        name = draw.choice(sorted(FAULTS))
        try:
            code = self._disturbed(f"run-{number}", name, kill, draw)
            found = self.soak.finish(kill.next_world, kill.next_strategy)
            assert found == self.wanted, f"fingerprint {found}"
            assert self.soak.left_over() == [], self.soak.left_over()
            self.outcomes[name, code] += 1
            shutil.rmtree(self.soak.place)
        except AssertionError as error:
            self.findings.append(f"run {number}: {name}, {kill}: {error}")

    def _disturbed(self, place, name, kill, draw):
        soak, fault = self.soak, FAULTS[name]
        soak.new_run(place)
        if fault.act is cut_cable:
            return fault.act(soak, kill, draw)
        held = ("--hold", HOLD) if fault.is_held else ()
        soak.start(kill.world, kill.strategy, *held, options=fault.options, in_pipe=fault.in_pipe)
        with contextlib.suppress(AssertionError) if not fault.is_held else contextlib.nullcontext():
            soak._wait(lambda: soak._is_time(kill), f"step {kill.step}", limit=20.0)
        with contextlib.suppress(ProcessLookupError, psutil.Error, IndexError, StopIteration, OSError):
            fault.act(soak, kill, draw)
        code, _, errors = soak.end()
        assert code in fault.codes, f"exit code {code}: {errors}"
        told = errors or list((soak.place / "logs").glob("report.txt"))
        assert told or code in (0, -signal.SIGKILL), "no reason was given"
        soak.wait_until_nothing_runs()
        return code


def processes(soak):
    return [psutil.Process(pid) for pid in soak.processes() if pid != soak._server.pid]


def kill_one(victim):
    def act(soak, kill, draw):
        os.kill(soak._victim(replace(kill, victim=victim)), signal.SIGKILL)

    return act


def stop_one(victim):
    def act(soak, kill, draw):
        number = draw.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
        os.kill(soak._victim(replace(kill, victim=victim)), number)

    return act


def stop_all(soak, kill, draw):
    number = draw.choice((signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP))
    for process in processes(soak):
        process.send_signal(number)


def interrupt(soak, kill, draw):
    os.kill(soak.launcher, signal.SIGINT)


def interrupt_stopped(soak, kill, draw):
    for process in processes(soak):
        if process.pid != soak.launcher:
            process.suspend()
    for _ in range(3):
        os.kill(soak.launcher, signal.SIGINT)
        select.select([], [], [], 0.2)


def lose_logs(soak, kill, draw):
    shutil.rmtree(soak.place / "logs")
    kill_one("rank")(soak, kill, draw)


def limit(kind, value):
    def act(soak, kill, draw):
        resource.prlimit(soak._victim(replace(kill, victim="rank")), kind, (value, value))

    return act


def strangers(soak, kill, draw):
    """Sends anything to whatever the ranks listen on; gloo's ports are open (docs/hosts.md), so it may end the run."""
    ports = {
        connection.laddr.port
        for process in processes(soak)
        for connection in process.net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    for port in ports:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", port), timeout=1) as stranger,
        ):
            stranger.sendall(draw.randbytes(draw.randrange(1, 2000)))
    interrupt(soak, kill, draw)


def stop_rank(soak, kill, draw):
    os.kill(soak._victim(replace(kill, victim="rank")), signal.SIGSTOP)


def lose_terminal(soak, kill, draw):
    os.close(soak.reader)


def lose_terminal_and_rank(soak, kill, draw):
    os.close(soak.reader)
    kill_one("rank")(soak, kill, draw)


def cut_cable(soak, kill, draw):
    """A run on two hosts, which are network namespaces, and the cable between them is cut; its exit code."""
    with TwoHostNetwork(soak.place) as network:
        hosts = Hosts(soak.place, network.addresses[0], network.prefixes)
        try:
            words = (SCRIPT, soak.place / "run", kill.strategy, "--hold", HOLD)
            devices = draw.choice((("cpu:1", "cpu:1"), ("cpu:2", "cpu:1"), ("cpu:1", "cpu:2")))
            hosts.start("run", *words, devices=devices, more=("--logs", soak.place / "logs"))
            soak._wait(lambda: soak._is_time(kill), f"step {kill.step}")
            network.cut()
            ends = hosts.end()
            assert [code for code, _ in ends] == [4, 4], ends
            assert all(any("has sent nothing for" in line for line in lines) for _, lines in ends), ends
            hosts.wait_until_nothing_runs()
            left = [name for host in hosts.hosts for name in host.left_over() if "torchinductor" not in name]
            assert not left, left
            return 4
        finally:
            hosts.clean_up()


FAULTS = {
    "a rank is killed": Fault(kill_one("rank"), (4,), is_held=True),
    "the launcher is killed": Fault(kill_one("launcher"), (-signal.SIGKILL,), is_held=True),
    "the fork server is killed": Fault(kill_one("server"), (4,), is_held=True),
    "a stop signal to the launcher": Fault(stop_one("launcher"), ALL_STOPPED),
    "a stop signal to the fork server": Fault(stop_one("server"), ALL_STOPPED),
    "a stop signal to a rank": Fault(stop_one("rank"), ALL_STOPPED),
    "a stop signal to all": Fault(stop_all, ALL_STOPPED),
    "Ctrl-C": Fault(interrupt, (130, 0)),
    "three Ctrl-C, all stopped": Fault(interrupt_stopped, (130,), is_held=True),
    "the log folder goes": Fault(lose_logs, (4,), is_held=True),
    "a full disk": Fault(limit(resource.RLIMIT_FSIZE, 5000), (0, 2, 3, 4)),
    "no descriptors": Fault(limit(resource.RLIMIT_NOFILE, 3), (0, 2, 3, 4)),
    "strangers": Fault(strangers, (130, 0, 4)),
    "a rank is stopped": Fault(stop_rank, (5,), is_held=True, options=("--stall-limit", "0.3")),
    "the terminal goes": Fault(lose_terminal, (0,), in_pipe=True),
    "the terminal goes, a rank is killed": Fault(lose_terminal_and_rank, (4,), is_held=True, in_pipe=True),
}
if not missing():
    FAULTS["a cable is cut"] = Fault(cut_cable, (4,), is_held=True)


def main(seconds, seed=0):
    """Runs for so many seconds and prints what came of it; returns the exit status."""
    with tempfile.TemporaryDirectory(prefix="lt-", ignore_cleanup_errors=True) as folder:
        chaos = Chaos(Path(folder).resolve())
        try:
            end, number = time.monotonic() + seconds, seed
            while time.monotonic() < end:
                chaos.run(number)
                number += 1
                if seconds <= 1:
                    break
        finally:
            chaos.soak.close()
    for (name, code), count in sorted(chaos.outcomes.items()):
        print(f"{count:>5}  {name}: exit code {code}, resumed to the same fingerprint")
    print(*chaos.findings, sep="\n")
    print(f"{number - seed} runs, {len(chaos.findings)} not as promised.")
    return 1 if chaos.findings else 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *map(int, sys.argv[2:])))
