"""Where the ranks of a SLURM job step meet: a pure function of the step's variables."""

from __future__ import annotations

import re
from collections.abc import Mapping

_FIRST_PORT, _PORTS = 20000, 12000
"""Below the ports that Linux hands out by itself (32768 and up)."""
_NAME = re.compile(r"([^,\[]+)(?:\[([^\]]+)\])?([^,]*)")


def first_host(nodes: str) -> str:
    """The first host of SLURM's short form of a node list: ``gpu-[003-007,9]-ib,cpu1`` begins with ``gpu-003-ib``."""
    match = _NAME.match(nodes.strip())
    if match is None:
        return ""
    numbers = (match[2] or "").split(",")[0].partition("-")[0]
    return f"{match[1]}{numbers}{match[3]}"


def meeting_place(variables: Mapping[str, str]) -> str:
    """Where the ranks of a step meet: the first host of its nodes, on a port that follows from job and step.

    A ``MASTER_ADDR`` that the batch script exports comes first.

    Args:
        variables: of a process inside a step.
    """
    if "MASTER_ADDR" in variables and "MASTER_PORT" in variables:
        return "env://"
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    host = variables.get("MASTER_ADDR") or first_host(nodes)
    if not host:
        return "env://"
    return f"tcp://{host}:{port_of(variables.get('SLURM_JOB_ID', '0'), variables.get('SLURM_STEP_ID', '0'))}"


def port_of(job: str, step: str) -> int:
    """The port of a step. Jobs that run at the same time have numbers near each other, and so other ports."""
    numbers = [int(text) if text.isdecimal() else 0 for text in (job, step)]
    return _FIRST_PORT + (numbers[0] * 7 + numbers[1]) % _PORTS
