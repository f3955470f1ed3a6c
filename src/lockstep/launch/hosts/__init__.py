"""Runs on several hosts: one supervisor on each, connected by an authenticated link."""

from lockstep.launch.hosts.coordinator import HostCoordinator
from lockstep.launch.hosts.joining import Joined, join_hosts
from lockstep.launch.hosts.roll_call import HostOptions, parse_master

__all__ = ["HostCoordinator", "HostOptions", "Joined", "join_hosts", "parse_master"]
