"""Runs a program under many layouts: every one has the bits of ``single``, or is refused in a sentence.

A program is a function of ``(world, settings)`` at module level that trains and returns tensors by name, or a class of
which each object has such a method ``train``.
"""

import logging
import traceback
from dataclasses import dataclass, field

from tests.ranks import run_ranks

from lockstep.core.fingerprint import digest_tensors
from lockstep.errors import LockstepError
from lockstep.runtime.lazy_compiler import postpone_compiler


@dataclass(frozen=True)
class Layout:
    """A strategy on a number of processes."""

    strategy: str
    world: int
    options: dict = field(default_factory=dict)

    @property
    def settings(self):
        return {"strategy": self.strategy, **self.options}


LAYOUTS = {
    "single": Layout("single", 1),
    "dp": Layout("dp", 1, {"dp": {"replicas": 2}}),
    "layers": Layout("layers", 1, {"layers": {"devices": 2}}),
    "ddp": Layout("ddp", 2),
    "fsdp": Layout("fsdp", 2),
    "fsdp-3": Layout("fsdp", 3),
    "pipeline": Layout("pipeline", 2),
    "tensor": Layout("tensor", 2),
    "server": Layout("parameter_server", 2),
    "servers": Layout("parameter_server", 3, {"parameter_server": {"servers": 2}}),
    "data-pipeline": Layout("hybrid", 4, {"mesh": "data=2,pipeline=2"}),
    "fsdp-pipeline": Layout("hybrid", 4, {"mesh": "fsdp=2,pipeline=2"}),
}
"""Small worlds of every kind."""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a program: digests by name, or an error."""

    digests: dict
    refusal: str = ""
    """The sentence of a refusal; empty for none."""
    fault: str = ""
    """The traceback of any other error; empty for none."""


def outcomes(programs, layout, timeout=120):
    """The outcome of each program, one after the other in one world; refusals must be the same on every rank."""
    chosen = LAYOUTS[layout]
    everyone = run_ranks(_run_all, chosen.world, programs, chosen.settings, timeout=timeout)
    for number, program in enumerate(programs):
        kinds = {(bool(each[number].refusal), bool(each[number].fault)) for each in everyone}
        assert len(kinds) == 1, f"{program.__name__}, {layout}: {[each[number] for each in everyone]}"
    return everyone[0]


def require_ends(programs, expected, found, layout, refused):
    """Asserts equal bits for each program, or the words of ``refused`` in its refusal."""
    for program, wanted, outcome in zip(programs, expected, found, strict=True):
        case = f"{program.__name__}, {layout}"
        assert not outcome.fault, f"{case}: {outcome.fault}"
        if program in refused:
            assert outcome.refusal, f"{case}: not refused"
            assert refused[program] in outcome.refusal, f"{case}: {outcome.refusal}"
            continue
        assert not outcome.refusal, f"{case}: {outcome.refusal}"
        assert not wanted.refusal and not wanted.fault, f"{case}, single: {wanted.refusal}{wanted.fault}"
        names = {*wanted.digests, *outcome.digests}
        different = sorted(name for name in names if wanted.digests.get(name) != outcome.digests.get(name))
        assert not different, f"{case}: {len(different)} of {len(names)} differ, first {different[:4]}"


def _run_all(world, programs, settings):
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    return [_run(world, program, dict(settings)) for program in programs]


def _run(world, program, settings):
    try:
        train = program().train if isinstance(program, type) else program
        return Outcome(digest_tensors(train(world, settings)))
    except LockstepError as error:
        return Outcome({}, refusal=f"{type(error).__name__}: {error}")
    except Exception:
        return Outcome({}, fault=traceback.format_exc())
