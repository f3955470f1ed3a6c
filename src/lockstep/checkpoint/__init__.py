"""Checkpoints that are complete or absent, verified before use, and free of any process layout."""

from lockstep.checkpoint.background import BackgroundWriter
from lockstep.checkpoint.folder import Best, committed, prune, read_best, write_best
from lockstep.checkpoint.reader import Restored, read, read_newest, read_progress, verify
from lockstep.checkpoint.state import (
    CheckpointState,
    encoded_extra_states,
    further_names,
    has_extra_state,
    load_extra_states,
    load_model_state,
    load_optimizer_state,
    model_state,
    optimizer_state,
    parameter_names,
    require_same_model,
)
from lockstep.checkpoint.writer import export, prepare, write
from lockstep.core.atomic import clean

__all__ = [
    "BackgroundWriter",
    "Best",
    "CheckpointState",
    "Restored",
    "clean",
    "committed",
    "encoded_extra_states",
    "export",
    "further_names",
    "has_extra_state",
    "load_extra_states",
    "load_model_state",
    "load_optimizer_state",
    "model_state",
    "optimizer_state",
    "parameter_names",
    "prepare",
    "prune",
    "read",
    "read_best",
    "read_newest",
    "read_progress",
    "require_same_model",
    "verify",
    "write",
    "write_best",
]
