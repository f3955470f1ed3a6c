"""Starts ranks on this host, watches them, and ends them, from a process that never imports torch."""

import sys

from lockstep.launch.control import Stopped, StopReason
from lockstep.launch.devices import Devices, parse_devices
from lockstep.launch.function import CallablePackage, launch
from lockstep.launch.heartbeat import Heartbeat
from lockstep.launch.options import LaunchOptions
from lockstep.launch.parent_death import die_with_parent
from lockstep.launch.supervisor import supervise
from lockstep.launch.targets import EntryTarget, FunctionTarget, ScriptTarget

__all__ = [
    "Devices",
    "EntryTarget",
    "FunctionTarget",
    "Heartbeat",
    "LaunchOptions",
    "ScriptTarget",
    "StopReason",
    "Stopped",
    "die_with_parent",
    "launch",
    "parse_devices",
    "supervise",
]

sys.modules[__name__].__class__ = CallablePackage
