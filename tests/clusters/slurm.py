"""A real SLURM on this machine: one controller and two nodes, in a folder, with no service manager.

The nodes are on loopback, or on the two hosts of ``tests.launch.hosts.network``, with a cable that can be cut.
"""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from tests.launch.command import wait_until

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol", "squeue", "scancel", "sinfo")
_CONFIGURATION = """\
ClusterName=lockstep
SlurmctldHost={host}({address})
SlurmctldPort={controller}
AuthType=auth/munge
AuthInfo=socket={folder}/munge/sock,cred_expire=5
CredType=cred/munge
SlurmUser=root
SlurmdUser=root
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool.%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
SchedulerType=sched/backfill
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
ReturnToService=2
SlurmctldTimeout=30
SlurmdTimeout=30
KillWait=5
SlurmdParameters=config_overrides
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
{nodes}
PartitionName=test Nodes=ALL Default=YES MaxTime=INFINITE State=UP PriorityTier=1 GraceTime=20
PartitionName=urgent Nodes=ALL MaxTime=INFINITE State=UP PriorityTier=2
"""


def missing():
    """Why no cluster can be started here; empty if one can."""
    absent = [name for name in PROGRAMS if not shutil.which(name, path=_path())]
    if absent:
        return f"SLURM is not installed here: {', '.join(absent)} missing (apt-get install slurm-wlm munge)"
    return "" if os.geteuid() == 0 else "SLURM's daemons need root"


class Cluster:
    """Starts on entering, and ends with every process it has started; its folder goes too."""

    def __init__(self, network=None):
        self.network = network
        host = socket.gethostname().split(".")[0]
        self.nodes = [("n1", host, "127.0.0.1", []), ("n2", host, "127.0.0.1", [])]
        if network is not None:
            self.nodes = list(zip(network.names, network.names, network.addresses, network.prefixes, strict=True))
        self.folder = Path(tempfile.mkdtemp(prefix="lockstep-slurm-"))
        self.folder.chmod(0o755)  # munge wants its socket to be reached by all
        self.environment = {
            **os.environ,
            "PATH": _path(),
            "SLURM_CONF": str(self.folder / "slurm.conf"),
        }
        if network is None:
            self.environment["MASTER_ADDR"] = "127.0.0.1"  # the nodes' names are not resolved on one machine

    def __enter__(self):
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_):
        if (self.folder / "slurmctld.pid").exists():
            self.call("scancel", "--user", "root")
            wait_until(lambda: not self.call("squeue", "--noheader"), 20, "the jobs to leave")
        for name in (*(f"slurmd.{node}" for node, *_ in self.nodes), "slurmctld"):
            _end(self.folder / f"{name}.pid")
        _end(self.folder / "munge" / "pid")
        shutil.rmtree(self.folder)

    @property
    def prefix(self):
        """The first words of a command on the first node."""
        return self.nodes[0][3]

    def call(self, *words, cwd=None, prefix=None):
        """Runs a command of the cluster, on the first node, and returns what it prints."""
        done = subprocess.run(
            [*(self.prefix if prefix is None else prefix), *words],
            env=self.environment,
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=30,
            check=True,
        )
        return done.stdout.strip()

    def state(self, job):
        """The state of a job, such as COMPLETED."""
        shown = self.call("scontrol", "show", "job", str(job))
        return shown.partition("JobState=")[2].split()[0]

    def _start(self):
        for name in ("state", *(f"spool.{node}" for node, *_ in self.nodes), "log", "munge"):
            (self.folder / name).mkdir(mode=0o755)
        munge = self.folder / "munge"
        munge.chmod(0o711)
        (munge / "key").touch(0o600)
        (munge / "key").write_bytes(os.urandom(128))
        places = {
            "key-file": "key",
            "socket": "sock",
            "pid-file": "pid",
            "log-file": "log",
            "seed-file": "seed",
        }
        self.call("munged", *(f"--{option}={munge / name}" for option, name in places.items()))
        controller, *ports = _free_ports(3)
        _, host, address, _ = self.nodes[0]
        lines = [
            f"NodeName={node} NodeHostname={name} NodeAddr={at} Port={port} CPUs=4 State=UNKNOWN"
            for (node, name, at, _), port in zip(self.nodes, ports, strict=True)
        ]
        text = _CONFIGURATION.format(
            host=host, address=address, folder=self.folder, controller=controller, nodes="\n".join(lines)
        )
        (self.folder / "slurm.conf").write_text(text)
        self.call("slurmctld", "-f", str(self.folder / "slurm.conf"))
        for node, _, _, prefix in self.nodes:
            self.call("slurmd", "-f", str(self.folder / "slurm.conf"), "-N", node, prefix=prefix)
        wait_until(
            lambda: self.call("sinfo", "-h", "-N", "-p", "test", "-o", "%T").split() == ["idle"] * 2,
            30,
            "idle nodes",
        )


def _path():
    return os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def _free_ports(count):
    sockets = [socket.socket() for _ in range(count)]
    for each in sockets:
        each.bind(("127.0.0.1", 0))
    ports = [each.getsockname()[1] for each in sockets]
    for each in sockets:
        each.close()
    return ports


def _end(pid_file):
    try:
        pid = int(pid_file.read_text())
        handle = os.pidfd_open(pid)
    except (OSError, ValueError):
        return
    signal.pidfd_send_signal(handle, signal.SIGTERM)
    with contextlib.suppress(AssertionError):
        wait_until(lambda: not Path(f"/proc/{pid}").exists(), 10, "a daemon to end")
    os.close(handle)
