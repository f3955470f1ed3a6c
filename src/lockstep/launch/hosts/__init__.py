"""Runs on several hosts: one supervisor on each, connected by an authenticated link."""

from lockstep.launch.hosts.coordinator import HostCoordinator
from lockstep.launch.hosts.joining import Joined, join_hosts
from lockstep.launch.hosts.outcome import RunOutcome
from lockstep.launch.hosts.roll_call import HostOptions, read_token

__all__ = ["HostCoordinator", "HostOptions", "Joined", "RunOutcome", "join_hosts", "read_token"]
