"""The configurations of VS Code's debugger for a script or a job: plain values.

    one rank in this process     launch   the program itself, without a launcher
    rank R of N                  attach   to the address at which the started run says that rank R waits
    a running rank               attach   to the address that `lockstep debug --attach` has given

The second needs a task that starts the run and tells the editor when the rank waits.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

from lockstep.launch.debugger import DEFAULT_PORT

_COMMON = {"justMyCode": True, "subProcess": False}
_WORKSPACE = "${workspaceFolder}"
_ALONE = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
"""Makes ``lockstep train`` train in its own process."""


@dataclass(frozen=True, kw_only=True)
class DebugPlan:
    """What is debugged, and how many ranks of it.

    The path of a script is relative to the folder that the editor opens.
    """

    target: str
    """A script (``.py``), or what ``lockstep train`` takes."""
    arguments: tuple[str, ...] = ()
    devices: str = "2"
    """As of ``--devices``."""
    rank: int = 0
    port: int = DEFAULT_PORT

    @property
    def is_script(self) -> bool:
        """Whether the target is a script and not a job."""
        return self.target.endswith(".py")

    @property
    def name(self) -> str:
        """What the configurations call the target."""
        return PurePath(self.target).name

    @property
    def of_ranks(self) -> str:
        """Name of the configuration and of the task with several ranks."""
        return f"Lockstep: {self.name}, rank {self.rank} of --devices {self.devices}"


def launch_entries(plan: DebugPlan) -> list[dict[str, Any]]:
    """The entries of ``configurations`` in ``launch.json``."""
    return [_one_rank(plan), _one_of_several(plan), _running_rank(plan.port)]


def task_entries(plan: DebugPlan) -> list[dict[str, Any]]:
    """The entries of ``tasks`` in ``tasks.json``: the run whose rank waits for the debugger."""
    started = ["--devices", plan.devices, "--debug-rank", str(plan.rank), "--debug-port", str(plan.port)]
    words = (
        ["run", *started, plan.target, *plan.arguments]
        if plan.is_script
        else ["train", *_job(plan), *started]
    )
    return [
        {
            "label": plan.of_ranks,
            "type": "process",
            "command": "${command:python.interpreterPath}",
            "args": ["-m", "lockstep", *words],
            "options": {"cwd": _WORKSPACE},
            "isBackground": True,
            "problemMatcher": {
                "pattern": {"regexp": "^lockstep: ((?!rank).*)$", "kind": "file", "file": 1, "message": 1},
                "background": {
                    "activeOnStart": True,
                    "beginsPattern": "^lockstep: starts",
                    "endsPattern": "^lockstep: (rank \\d+ waits for a debugger at|(?!rank))",
                },
            },
        }
    ]


def _one_rank(plan: DebugPlan) -> dict[str, Any]:
    name = f"Lockstep: {plan.name}, one rank in this process"
    how: dict[str, Any] = (
        {"program": f"{_WORKSPACE}/{plan.target}", "args": list(plan.arguments)}
        if plan.is_script
        else {"module": "lockstep", "args": ["train", *_job(plan)], "env": dict(_ALONE)}
    )
    start = {"name": name, "type": "debugpy", "request": "launch", **how}
    return {**start, "console": "integratedTerminal", "cwd": _WORKSPACE, **_COMMON}


def _one_of_several(plan: DebugPlan) -> dict[str, Any]:
    return {
        "name": plan.of_ranks,
        "type": "debugpy",
        "request": "attach",
        "connect": {"host": "127.0.0.1", "port": plan.port},
        "preLaunchTask": plan.of_ranks,
        **_COMMON,
    }


def _running_rank(port: int) -> dict[str, Any]:
    address = {"host": "127.0.0.1", "port": port}
    name = "Lockstep: rank that 'lockstep debug --attach' has asked"
    return {"name": name, "type": "debugpy", "request": "attach", "connect": address, **_COMMON}


def _job(plan: DebugPlan) -> list[str]:
    return [plan.target, *plan.arguments]
