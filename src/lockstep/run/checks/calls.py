"""Notices calls that make a result depend on the ranks.

gather_agreed        the loop calls the run on some ranks only, as when one of them evaluates under ``if run.is_main:``
watching_calls       a loss, a metric or a data set asks for the number of processes, or exchanges values between them
counts_read          a loss or a model holds that number
warn_of_settings     the script computes a learning rate, or another setting, from it, or something anew in each process
"""

from __future__ import annotations

import linecache
import logging
import os
import re
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import CodeType, FrameType, FunctionType
from typing import Any

import torch
import torch.distributed as dist

from lockstep.core.users_code import is_users_code, methods_of, names_reached, users_frames
from lockstep.distributed.collectives import gather_json
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import Snapshot
from lockstep.runtime.error_record import users_lines
from lockstep.runtime.torch_internals import FrameKind, kind_of_frame
from lockstep.strategies import Strategy
from lockstep.text import grouped, numbered, shorten

logger = logging.getLogger(__name__)

OFF = "checks='off' lets it run, with results that depend on the layout."
_CALLS = {
    "__init__": "lockstep.init",
    "__iter__": "run.batches",
    "__next__": "run.batches",
    "_steps": "run.batches",
}
"""Calls of a run by the names of the functions that the script, or a loop of it, enters."""
_PATIENCE = 5.0
"""Seconds after which a call that waits for other ranks tells of an error that is being handled."""


def gather_agreed(mine: object, group: dist.ProcessGroup | None, device: torch.device) -> list[Any]:
    """A value of every rank, by rank; ``ConfigError`` where they come from different calls of the run. Collective.

    Without a group it is this process's alone.
    """
    if group is None:
        return [mine]
    call = _call()
    with _telling_of_error("".join(call)):
        everyone = gather_json([*call, mine], group, device)
    known = [each if isinstance(each, list) and len(each) == 3 else ["another call", "", each] for each in everyone]
    if len({name for name, _, _ in known}) > 1:
        raise ConfigError(
            f"The ranks make different calls of the run: {by_rank([name + place for name, place, _ in known])}. Each "
            "has a part of the work, so all make the same calls in the same order: take them, and changes of their "
            "data sets, out of if run.is_main: and other conditions on the rank. What they return is the same "
            "everywhere, but of run.predict; run.print prints it once."
        )
    return [value for _, _, value in known]


@contextmanager
def _telling_of_error(call: str) -> Iterator[None]:
    """Says, if the block takes long, which error the script handles meanwhile: in a ``finally``, it is still hidden."""
    error = sys.exc_info()[1]
    if not isinstance(error, Exception):
        yield
        return
    words = (
        "%s waits for the other ranks while the error below is being handled here. If only some ranks have that error, "
        "the others wait in another call. In 'finally:' and 'except:' leave out calls that all ranks must make.%s\n%s"
    )
    lines = "".join(traceback.format_exception_only(error)).rstrip()
    timer = threading.Timer(_PATIENCE, logger.warning, (words, call, users_lines(error), lines))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _call() -> tuple[str, str]:
    """The call of a run by which this process came here, and the line that made it."""
    name, place = "", ""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith("lockstep.run."):
            name, place = frame.f_code.co_name, ""
        elif name and not place and not module.startswith("lockstep."):
            place = f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        frame = frame.f_back
    return _CALLS.get(name, f"run.{name}"), place


def require_same_names(argument: str, names: Iterable[object], strategy: Strategy) -> None:
    """Raises ``ConfigError`` where ranks give metrics of other names. Collective.

    Args:
        argument: what they are, as in "The metrics of run.evaluate".
    """
    of_all = gather_agreed(sorted(map(repr, names)), strategy.all_ranks, strategy.device)
    if any(each != of_all[0] for each in of_all):
        raise ConfigError(
            f"{argument} are not the same on every rank: {by_rank(of_all)}. Each rank computes them of a part of the "
            "samples. Give them on all ranks; run.print prints on one."
        )


def by_rank(values: list[Any]) -> str:
    """Values and the ranks that have them: ``32 on rank 0; 31 on ranks 1, 2``."""
    groups = grouped((str(value), rank) for rank, value in enumerate(values))
    return "; ".join(f"{value} on {numbered('rank', ranks)}" for value, ranks in groups.items())


_FOLDER = Path(torch.__file__).parent
_COMPILER, _DISTRIBUTED = str(_FOLDER / "_dynamo/convert_frame.py"), dist.get_world_size.__code__.co_filename
_FILES = (_COMPILER, _DISTRIBUTED, os.getenv.__code__.co_filename)
_VARIABLES = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")
"""Those of the environment that hold a number of processes."""
_COUNTS = re.compile(r"(local_)?world(_size)?|n(um)?_?(procs?|processes|gpus?|replicas)", re.IGNORECASE)
"""Names of variables and attributes that hold one, if it is their value."""
_WORDS = re.compile(r"'(\w+)'")
_EXCHANGES = re.compile(r"(all_|reduce|broadcast|gather|scatter|barrier|i?send|i?recv|batch_isend)")

ASKED = (
    "%s asks how many processes there are, or which one this is (%s). What is computed from that depends on the number "
    "of processes: leave it out, since losses, gradients and metrics are those of the global batch. A message may show "
    "it."
)


_IN_PARTS = (
    ". It would combine the micro-batches that the processes happen to compute at the same time, so the result would "
    "depend on their number, and it would wait forever where one process has more of them. A loss that compares all "
    "samples of the batch takes whole_batch=True; one that is divided by a count returns the pair (sum, count), and "
    "the run divides by the count of all. Where it is for a log, give also= of run.backward a function, or call "
    "run.evaluate."
)
OF_WHOLE_BATCH = (
    ", which is given the outputs and the targets of all samples on every process: leave the call out. A loss of a "
    "library may have an option for it, such as gather_distributed=False; otherwise override the method that calls."
)
"""The reason why a loss of the whole batch exchanges nothing."""


@contextmanager
def watching_once(where: str, *, looks: bool) -> Iterator[None]:
    """As ``watching_calls``, if it ``looks``; rank 0 says what was noted."""
    found: list[str] = []
    with watching_calls(found, where, variables_too=True) if looks else nullcontext():
        yield
    if found and dist.get_rank() == 0:
        logger.warning(ASKED, where[0].upper() + where[1:], shorten(dict.fromkeys(found), 3))


@contextmanager
def watching_calls(
    found: list[str],
    where: str,
    *,
    ranks: bool = False,
    variables_too: bool = False,
    no_exchange: str = _IN_PARTS,
) -> Iterator[None]:
    """Notes where this thread, in the block, asks for the number of processes in the user's code.

    Not on one process, and not under a profiler of Python's own. It ends where torch's compiler begins, which it would
    slow down.

    Args:
        found: gets the places, and what is asked there.
        where: what is called, as in "the loss".
        ranks: note also where it asks for its rank, which no other process shows that computes the same.
        variables_too: note also functions that read that number from a variable, or from the run.
        no_exchange: why values are not exchanged there, as the end of the sentence that names the call.

    Raises:
        ConfigError: where a process exchanges values with others, before it waits for them.
    """

    variables = (*_VARIABLES, "RANK", "LOCAL_RANK") if ranks else _VARIABLES
    functions = ("get_world_size", "get_rank") if ranks else ("get_world_size",)

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if variables_too and event == "call" and (read := _count_in(frame)):
            found.append(read)
        if event != "call" or code.co_filename not in _FILES:
            return
        if code.co_filename == _COMPILER:
            sys.setprofile(None)
        elif code.co_filename != _DISTRIBUTED:
            key = frame.f_locals.get("key") if code.co_name == "__getitem__" else None
            if key in variables and (place := _place(frame)):
                found.append(f"{place}: os.environ[{key!r}]")
        elif code.co_name in functions and (place := _place(frame)):
            found.append(f"{place}: torch.distributed.{code.co_name}()")
        elif _EXCHANGES.match(code.co_name) and (place := _place(frame, installed=True)):
            raise ConfigError(f"torch.distributed.{code.co_name} is called in {where} ({place}){no_exchange} {OFF}")

    if sys.getprofile() is not None or not dist.is_initialized():
        yield
        return
    sys.setprofile(note)
    try:
        yield
    finally:
        sys.setprofile(None)


def _place(frame: FrameType, *, installed: bool = False) -> str:
    """The line that calls a function of torch or Python; empty where it is not the user's, or of a package."""
    name, caller, tools = frame.f_code.co_name, frame.f_back, _tools()
    while caller is not None:
        code, module = caller.f_code, caller.f_globals.get("__name__", "")
        is_between = code.co_filename.startswith("<frozen ") or code.co_name == name or module in tools
        if not is_between and kind_of_frame(code.co_filename, code.co_name) is not FrameKind.WRAPPER:
            others = installed and module.partition(".")[0] not in ("torch", "lockstep")
            is_told = others or is_users_code(code, module)
            return f"{Path(code.co_filename).name}:{caller.f_lineno}" if is_told else ""
        caller = caller.f_back
    return ""


def _count_in(frame: FrameType) -> str:
    """Where a function of the user's reads the number of processes from a variable, or from the run; else empty."""
    code, globals_ = frame.f_code, frame.f_globals
    names = {name for name in (*code.co_names, *code.co_freevars) if _COUNTS.fullmatch(name)}
    if not names or not is_users_code(code, globals_.get("__name__", "")):
        return ""
    values = {name: frame.f_locals.get(name, globals_.get(name)) for name in names}
    found = [n for n in sorted(names) if type(values[n]) is int and values[n] == dist.get_world_size()]
    found += ["run.world.world_size"] if names >= {"world", "world_size"} and not found else []
    return f"{Path(code.co_filename).name}:{code.co_firstlineno}: {found[0]}" if found else ""


def _tools() -> set[str]:
    """The modules of tools that have replaced functions of torch.distributed."""
    functions = [each for each in vars(dist).values() if type(each) is FunctionType]
    return {each.__module__ for each in functions if not each.__module__.startswith("torch.")}


def counts_read(found: Snapshot, codes: Iterable[CodeType], ranks: int) -> list[str]:
    """The places of a loss and a model that hold the number of processes, and that their code names."""
    names = names_reached(codes, found.functions)
    is_called = "the environment variable"  # for which watching_calls looks
    places = {n: words[0] for n in found.texts if (words := _WORDS.findall(n)) and is_called not in n}
    equal = [n for n in places if found.texts[n] in (str(ranks), f"{ranks}.0")]
    read = [n for n in equal if places[n] in names and _COUNTS.fullmatch(places[n])]
    is_of_run = "world_size" in names and "world_size" not in places.values()
    return [*read, "an attribute world_size"] if is_of_run else read


_REMEDIES = {
    "LS059": "Give all samples to run.evaluate, or also= to run.backward, and count samples by len(batch)",
    "LS067": "Sort it, or start the script by lockstep run",
    "LS069": "Print it as it is returned",
    "LS070": "Give the samples to run.evaluate, or make a metric of torchmetrics with sync_on_compute=False",
    "LS071": "Pass driver='gels', or 'gelsd' where columns may depend on each other",
}
"""The remedy for the findings of a rule, by its number."""


def warn_of_settings(callbacks: Iterable[object] = (), *, is_alone: bool, device: torch.device) -> None:
    """Warns of what the loop's files, and those of callbacks, make depend on the number of processes or the process.

    ``is_alone`` is True for one process. What starts ranks for Lockstep gives all of them one order of sets.
    """
    codes = [frame.f_code for frame in users_frames()]
    codes += [method.__code__ for each in callbacks for _, method in methods_of(type(each))]
    files = dict.fromkeys(code.co_filename for code in codes)
    texts = [("".join(linecache.getlines(file)), Path(file).name) for file in files]
    holds = {"LS067": bool(sys.flags.hash_randomization), "LS071": device.type == "cpu"}
    asked = [word for word, rule in (("set(", "LS067"), ("lstsq(", "LS071")) if holds[rule]]
    if is_alone and not any(word in text for text, _ in texts for word in asked):
        return
    from lockstep.lint.check import findings_in_a_run  # seldom needed, and slow to import

    found = [each for text, name in texts for each in findings_in_a_run(text, name)]
    found = [each for each in found if holds.get(each.rule, not is_alone)]
    settings = [each for each in found if each.rule == "LS068"]
    told = [f"{each.path}:{each.line}: {each.wrong.partition(' is another value')[0]}" for each in settings]
    if told:
        logger.warning(
            "The script computes settings from the number of processes (%s), so the result depends on it. "
            "Global batch and learning rate are those of all processes together: give them once. Where a line is "
            "right, write '# lockstep: ignore[LS068]' there.",
            shorten(told, 3),
        )
    for each in found:
        if each.rule in _REMEDIES:
            wrong = each.wrong[:1].upper() + each.wrong[1:]
            logger.warning(
                "%s:%s: %s %s, or write '# lockstep: ignore[%s]' there.",
                *(each.path, each.line, wrong, _REMEDIES[each.rule], each.rule),
            )
