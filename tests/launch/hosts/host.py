"""Starts real ``lockstep`` commands as the hosts of one run, on loopback or in network namespaces."""

import contextlib
import os
import secrets
import socket
import subprocess
import sys

from tests.launch.command import LOOP, Command
from tests.printed import fingerprint

LOCKSTEP = [sys.executable, "-c", "import sys; from lockstep.cli import main; sys.exit(main())"]
LOOPBACK = "127.0.0.1"


def free_port():
    """A port which is free, and so is the next one."""
    while True:
        with socket.socket() as first, socket.socket() as second:
            first.bind((LOOPBACK, 0))
            port = first.getsockname()[1]
            with contextlib.suppress(OSError, OverflowError):
                second.bind((LOOPBACK, port + 1))
                return port


class Host(Command):
    """One host's command; what it says lies in a folder of its own, marks in one that all hosts share."""

    def __init__(self, folder, node, prefix=()):
        super().__init__(folder / f"host-{node}")
        self.folder.mkdir()
        self.node, self.prefix, self.shared = node, prefix, folder

    @property
    def marks(self):
        return self.shared / "marks"

    def begin_command(self, words, environment=None):
        """Starts ``lockstep WORDS``; its temporary and runtime folders lie inside ``folder``."""
        for name in ("tmp", "runtime"):
            (self.folder / name).mkdir(exist_ok=True)
        places = {"TMPDIR": str(self.folder / "tmp"), "XDG_RUNTIME_DIR": str(self.folder / "runtime")}
        self.start_clock()
        with (self.folder / "stdout").open("w") as stdout, (self.folder / "stderr").open("w") as stderr:
            self.process = subprocess.Popen(
                [*self.prefix, *LOCKSTEP, *map(str, words)],
                env={**os.environ, **places, **(environment or {})},
                stdin=subprocess.DEVNULL,
                stdout=stdout,
                stderr=stderr,
                start_new_session=True,
            )


class Hosts:
    """The hosts of one run.

    Args:
        folder: for all that the test writes.
        master: address of host 0.
        prefixes: by host, what its command begins with.
    """

    def __init__(self, folder, master=LOOPBACK, prefixes=((), ())):
        self.folder, self.master, self.port = folder, master, free_port()
        self.token = folder / "token"
        self.token.touch(0o600)
        self.token.write_text(secrets.token_hex(32))
        (folder / "marks").mkdir()
        self.hosts = [Host(folder, node, prefix) for node, prefix in enumerate(prefixes)]

    def __getitem__(self, node):
        return self.hosts[node]

    def options(self, node, *more, devices="cpu:1", master=None):
        """The options of one host."""
        place = ["--nnodes", len(self.hosts), "--node-rank", node, "--devices", devices]
        return [*place, "--master", f"{master or self.master}:{self.port}", "--token-file", self.token, *more]

    def loop(self, fault="", *, steps=10**9, devices=(), more=()):
        """Starts the faulty loop on every host."""
        for node, host in enumerate(self.hosts):
            options = self.options(node, *more, devices=devices[node] if devices else "cpu:1")
            host.begin_command(["run", *options, LOOP, self.folder / "marks", steps, fault])
        return self

    def start(self, command, *words, devices=(), more=()):
        """Starts ``lockstep COMMAND WORDS`` on every host."""
        for node, host in enumerate(self.hosts):
            options = self.options(node, *more, devices=devices[node] if devices else "cpu:1")
            host.begin_command([command, *words, *options] if command == "train" else [command, *options, *words])
        return self

    def end(self, timeout=60):
        """Waits for all commands; returns the exit codes and what each said last, after the first lines of greeting."""
        return [host.end(timeout) for host in self.hosts]

    def wait_until_nothing_runs(self, timeout=2.0):
        for host in self.hosts:
            host.wait_until_nothing_runs(timeout)

    def clean_up(self):
        """Ends whatever a failed test left."""
        for host in self.hosts:
            host.clean_up()


def job(folder, *more, epochs=1):
    """The words of a small job that writes into the folder."""
    settings = ("log.progress=false", "log.tensorboard=false", f"run.directory={folder}/runs", *more)
    return ["digits", "--epochs", str(epochs), *(word for setting in settings for word in ("--set", setting))]


def on_one_process(folder, **settings):
    """The fingerprint of the job on one process."""
    host = Host(folder, "alone")
    host.begin_command(["train", *job(folder / "alone", **settings), "--devices", "cpu:1"])
    code, lines = host.end(120)
    assert code == 0, lines
    return fingerprint(host.stdout)


def said(lines):
    """The lines of the report, without what supervisors say on the way and torch of names that it cannot find."""
    return [line for line in lines if not line.startswith("lockstep: ") and "[c10d] The hostname" not in line]
