"""Two hosts on one machine: network namespaces with a cable between them, each with its own name."""

import contextlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

_PROGRAMS = ("ip", "nsenter", "unshare")
_ENTER = 'hostname "$0"; mount --bind "$1" /etc/hosts; shift; exec "$@"'


def missing():
    """Why no namespaces can be made here; empty if they can."""
    absent = [name for name in _PROGRAMS if shutil.which(name) is None]
    if absent:
        return f"network namespaces need {', '.join(absent)} (apt-get install iproute2 util-linux)"
    if os.geteuid() != 0:
        return "network namespaces need root"
    name = f"lst{os.getpid()}"
    made = subprocess.run(["ip", "netns", "add", name], capture_output=True, text=True)
    if made.returncode:
        return f"network namespaces cannot be made here: {made.stderr.strip()}"
    try:
        pair = [
            "ip",
            "link",
            "add",
            f"{name}a",
            "netns",
            name,
            "type",
            "veth",
            "peer",
            "name",
            f"{name}b",
            "netns",
            name,
        ]
        wired = subprocess.run(pair, capture_output=True, text=True)
        return f"there are no veth pairs here: {wired.stderr.strip()}" if wired.returncode else ""
    finally:
        subprocess.run(["ip", "netns", "delete", name], check=True)


class TwoHostNetwork:
    """Hosts ``fa`` and ``fb``, with interfaces ``va`` and ``vb``; goes with everything in it when left."""

    names = ("fa", "fb")
    interfaces = ("va", "vb")
    addresses = ("10.77.0.1", "10.77.0.2")

    def __init__(self, folder):
        self.spaces = [f"lockstep-{os.getpid()}-{name}" for name in self.names]
        self.hosts_file = folder / "hosts"
        lines = ["127.0.0.1 localhost", *map(" ".join, zip(self.addresses, self.names, strict=True))]
        self.hosts_file.write_text("\n".join(lines) + "\n")

    def __enter__(self):
        try:
            for space in self.spaces:
                _ip("netns", "add", space)
            ends = [("name", end, "netns", space) for end, space in zip(self.interfaces, self.spaces, strict=True)]
            _ip("link", "add", *ends[0], "type", "veth", "peer", *ends[1])
            for space, interface, address in zip(self.spaces, self.interfaces, self.addresses, strict=True):
                _ip("-n", space, "addr", "add", f"{address}/24", "dev", interface)
                _ip("-n", space, "link", "set", "lo", "up")
            self.mend()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        for space in self.spaces:
            subprocess.run(["ip", "netns", "delete", space], capture_output=True)

    @property
    def prefixes(self):
        """By host, what a command that runs on it begins with."""
        return [self._prefix(space, name) for space, name in zip(self.spaces, self.names, strict=True)]

    def _prefix(self, space, name):
        enter = ["nsenter", f"--net=/run/netns/{space}", "unshare", "--uts", "--mount"]
        return [*enter, "bash", "-c", _ENTER, name, str(self.hosts_file)]

    def cut(self):
        """Pulls the cable out: no end of a connection is told."""
        _ip("-n", self.spaces[1], "link", "set", self.interfaces[1], "down")

    def mend(self):
        """Puts the cable in."""
        for space, interface in zip(self.spaces, self.interfaces, strict=True):
            _ip("-n", space, "link", "set", interface, "up")

    def bytes_sent(self):
        """By host, what it has sent over the cable so far."""
        return [
            json.loads(_ip("-n", space, "-s", "-j", "link", "show", interface))[0]["stats64"]["tx"]["bytes"]
            for space, interface in zip(self.spaces, self.interfaces, strict=True)
        ]

    @contextlib.contextmanager
    def slow_cable(self, *, delay, megabits, loss):
        """A second cable between the two, a bad one; gives the addresses of its ends."""
        addresses = ("10.78.0.1", "10.78.0.2")
        ends = [word for pair in zip(self.spaces, addresses, strict=True) for word in pair]
        words = [
            sys.executable,
            str(Path(__file__).with_name("wire.py")),
            *ends,
            *map(str, (delay, megabits, loss)),
        ]
        wire = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
        try:
            assert wire.stdout.readline() == "ready\n"
            yield addresses
        finally:
            wire.kill()
            wire.wait()
            wire.stdout.close()


def _ip(*words):
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True).stdout
