"""Says which options are set for strategies that a run does not have; files of jobs are shared between strategies."""

from __future__ import annotations

import logging
from dataclasses import fields

from lockstep.mesh import Mesh
from lockstep.run.options import RunOptions
from lockstep.strategy_options import OPTIONS

logger = logging.getLogger(__name__)


def unused_options(options: RunOptions) -> list[str]:
    """The options that differ from their defaults and belong to another strategy, as ``fsdp.cpu_offload``."""
    used = {options.strategy}
    if options.mesh:
        used |= {axis for axis, _ in Mesh.parse(options.mesh).axes}
    return [
        f"{name}.{option.name}"
        for name, kind in OPTIONS.items()
        if name not in used
        for option in fields(kind)
        if getattr(getattr(options, name), option.name) != getattr(kind(), option.name)
    ]


def mention_unused_options(options: RunOptions) -> None:
    """Logs one warning that names them, if there are any; the main process calls this."""
    if unused := unused_options(options):
        logger.warning(
            "Strategy %r does not use what is set for others: %s.", options.strategy, ", ".join(unused)
        )
