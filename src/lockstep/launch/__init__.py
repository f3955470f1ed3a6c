"""Starts ranks on this host, watches them, and ends them, from a process that never imports torch."""

import sys

from lockstep.launch.options import Devices, LaunchOptions, parse_devices
from lockstep.launch.supervisor import CallablePackage, launch, supervise
from lockstep.launch.targets import EntryTarget, ScriptTarget
from lockstep.runtime.control import Stopped, StopReason
from lockstep.runtime.heartbeat import Heartbeat

__all__ = [
    "Devices",
    "EntryTarget",
    "Heartbeat",
    "LaunchOptions",
    "ScriptTarget",
    "StopReason",
    "Stopped",
    "launch",
    "parse_devices",
    "supervise",
]

sys.modules[__name__].__class__ = CallablePackage
