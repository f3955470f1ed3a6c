"""Several hosts: one supervisor on each, joined by an authenticated link."""

from lockstep.launch.hosts.company import Company
from lockstep.launch.hosts.final import Final
from lockstep.launch.hosts.joining import Joined, join_hosts
from lockstep.launch.hosts.options import HostOptions
from lockstep.launch.hosts.token import read_token

__all__ = ["Company", "Final", "HostOptions", "Joined", "join_hosts", "read_token"]
