"""Runs the text of a program on the ranks of a layout, and says how it ended.

    text = "RECIPE = {...}" and "def train(run, epochs): ... return found"
    run_trial(text, [Layout("ddp 3", 3, {"strategy": "ddp"})])   # Ended("ran", ...), "refused", "raised" or "hung"

Ranks are forked from one process that has torch imported. A rank that fails is not waited for by the others; the first
failure is what the launcher would report, and decides.
"""

import contextlib
import gc
import linecache
import multiprocessing
import os
import pickle
import shutil
import sys
import tempfile
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path

from tests.ranks import answers_of, forked

_AFTER_FAILURE = 0.7
_MOST_RUNS = 40
"""Programs that a world runs; what they leave behind is not kept for longer."""
PROGRAM = "program.py"


@dataclass(frozen=True)
class Layout:
    """Processes and the options of `lockstep.init` that say how they share the work."""

    name: str
    ranks: int
    options: dict = field(default_factory=dict)
    exact: bool = True
    stop: int | None = None
    """The step after which a request to stop comes; None: it trains to the end."""


@dataclass
class Ended:
    """How a program ended: ``ran``, ``refused`` (a sentence), ``raised`` (anything else) or ``hung``."""

    how: str
    found: list = field(default_factory=list)
    """The values that ``train`` returned on each rank."""
    message: str = ""
    traceback: str = ""
    own: bool = False
    """The error came out of the program's own lines, or of torch called by them."""
    ranks: int = 0
    """How many ranks refused."""
    warnings: tuple = ()
    """What was logged as a warning, in all phases."""

    @property
    def sentence(self):
        """The beginning of the message, without numbers that differ from program to program."""
        return " ".join(self.message.split())[:110]


class Worlds:
    """Worlds of ranks that are used for one program after the other, as long as each of them runs to its end.

    A context: its ranks are killed at the end.
    """

    def __init__(self):
        self._free = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for world in self._free.values():
            world.close()
        self._free.clear()

    def run(self, ranks, task, timeout):
        """How a task of so many ranks ended, in a world that has run others, or a new one."""
        world = self._free.pop(ranks, None) or _World(ranks)
        ended = world.run(task, timeout)
        if ended.how == "ran" and world.runs < _MOST_RUNS:
            self._free[ranks] = world
        else:
            world.close()
        return ended


class _World:
    """Ranks that wait for programs."""

    def __init__(self, ranks):
        self.runs = 0
        self._stack = contextlib.ExitStack()
        context = multiprocessing.get_context("forkserver")
        pairs = [context.Pipe(duplex=False) for _ in range(ranks)]
        tasks = [(rank, ranks, inbox) for rank, (inbox, _) in enumerate(pairs)]
        self._outboxes = [outbox for _, outbox in pairs]
        self._processes, self._pipes = self._stack.enter_context(forked(_rank, tasks))
        for inbox, _ in pairs:
            inbox.close()

    def run(self, task, timeout):
        self.runs += 1
        folder = tempfile.mkdtemp(prefix="lockstep-ranks-")
        try:
            for outbox in self._outboxes:
                with contextlib.suppress(BrokenPipeError):
                    outbox.send((folder, *task))
            return _wait(self._processes, self._pipes, timeout)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self):
        self._stack.close()
        for outbox in self._outboxes:
            outbox.close()


def run_trial(text, phases, timeout=25.0, worlds=None):
    """Runs ``train`` of the text on one layout after the other, each going on from the checkpoint of the one before.

    Args:
        text: source of the program.
        phases: layouts; those before the last one are stopped.
        timeout: seconds for each.
        worlds: that may be used; None: new ones.
    """
    if worlds is None:
        with Worlds() as own:
            return run_trial(text, phases, timeout, own)
    folder = tempfile.mkdtemp(prefix="lockstep-trial-")
    try:
        merged, warnings = [], ()
        for layout in phases:
            options = dict(layout.options)
            if len(phases) > 1:
                options |= {"directory": f"{folder}/run", "resume": "auto"}
            task = (text, options, layout.stop)
            ended = worlds.run(layout.ranks, task, timeout)
            warnings = ended.warnings = (*warnings, *ended.warnings)
            if ended.how != "ran":
                return ended
            first = {key: value for key, value in merged[0].items() if key.startswith("e")} if merged else {}
            merged = [{**first, **found} for found in ended.found]
        return Ended("ran", merged, warnings=warnings)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _died(rank, code):
    # What others say follows from it, so it comes first.
    return 0.0, Ended("raised", message=f"rank {rank} ended with exit code {code}")


def _wait(processes, pipes, timeout):
    answers, failures, waiting = answers_of(processes, pipes, timeout, _AFTER_FAILURE, _died)
    if failures:
        first = min(failures, key=lambda failure: failure[:2])[2]
        # A rank that lost its neighbour may report before the neighbour that said why.
        refusing = [ended for _, _, ended in sorted(failures, key=lambda f: f[:2]) if ended.how == "refused"]
        if refusing and first.how != "refused" and "peer" in first.message:
            first = refusing[0]
        first.ranks = len(refusing)
        return first
    if waiting:
        return Ended("hung", message=f"ranks {waiting} had not ended after {timeout} s")
    warnings = tuple(words for ended in answers.values() for words in ended.warnings)
    return Ended("ran", [answers[rank].found for rank in range(len(processes))], warnings=warnings)


def _rank(rank, ranks, inbox, sender):
    from lockstep.runtime.lazy_compiler import postpone_compiler
    from lockstep.runtime.parent_death import arm_future_children, die_with_parent

    die_with_parent()
    arm_future_children()
    postpone_compiler()
    ended = None
    while ended is None or ended.how == "ran":
        # A collection at the end would touch, and so copy, all that torch made, and what the programs before have left.
        gc.freeze()
        try:
            folder, *task = inbox.recv()
        except EOFError:
            break
        with _noted_warnings() as noted:
            ended = _ending(rank, ranks, folder, *task)
        ended.warnings = tuple(record.getMessage() for record in noted.buffer)
        with contextlib.suppress(BrokenPipeError):
            sender.send_bytes(pickle.dumps((time.monotonic(), ended.how == "ran", ended)))
    os._exit(0)


@contextlib.contextmanager
def _noted_warnings():
    """The handler of the warnings that are logged meanwhile, which are not printed."""
    import logging
    from logging.handlers import BufferingHandler

    noted, logger = BufferingHandler(sys.maxsize), logging.getLogger("lockstep")
    noted.setLevel(logging.WARNING)
    logger.addHandler(noted)
    logger.propagate = False
    try:
        yield noted
    finally:
        logger.removeHandler(noted)


def _ending(rank, ranks, folder, text, options, stop):
    from lockstep.errors import LockstepError

    try:
        return Ended("ran", _call(rank, ranks, folder, text, options, stop))
    except LockstepError as error:
        return Ended("refused", message=f"{type(error).__name__}: {error}", traceback=traceback.format_exc())
    except BaseException as error:
        message = f"{type(error).__name__}: {error}"
        return Ended("raised", message=message, traceback=traceback.format_exc(), own=_is_own(error))


def _is_own(error):
    """True where the innermost frame that is not torch's is of the program, or its backward pass cannot be run.

    A program may ask torch to raise an error where a gradient is NaN.
    """
    of_torch = ("modified by an inplace operation", "not implemented for '", "returned nan values in its")
    if any(words in str(error) for words in of_torch):
        return True
    names = [frame.f_code.co_filename for frame, _ in traceback.walk_tb(error.__traceback__)]
    if "/torch/optim/" in names[-1]:
        return True  # the user's optimizer, stepped by the run
    for name in reversed(names):
        if name == PROGRAM:
            return True
        if "/lockstep/" in name:
            return False
    return False


def _call(rank, ranks, folder, text, options, stop):
    import random
    import types
    import warnings

    import numpy
    import torch

    from lockstep.core.world import World
    from lockstep.run import Run, RunOptions
    from lockstep.runtime.control import Stopped

    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if torch.are_deterministic_algorithms_enabled():  # the call imports torch._inductor
        torch.use_deterministic_algorithms(False)
    torch.autograd.set_detect_anomaly(False)
    os.environ.update(OMP_NUM_THREADS="1", RANK=str(rank), WORLD_SIZE=str(ranks))
    os.chdir(folder)
    silence = os.open(os.devnull, os.O_WRONLY)
    for stream in (1, 2):
        os.dup2(silence, stream)
    os.close(silence)
    world = World(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        launcher="lockstep",
        rendezvous=f"file://{folder}/rendezvous",
        run_id="trial",
    )
    for seed in (random.seed, numpy.random.seed, torch.manual_seed):
        seed(rank)  # as different as the generators of processes are
    module = types.ModuleType("program")
    sys.modules["program"] = module
    module.__file__ = PROGRAM
    linecache.cache[PROGRAM] = (len(text), None, text.splitlines(keepends=True), PROGRAM)
    exec(compile(text, PROGRAM, "exec"), module.__dict__)
    run = Run(RunOptions.of(**{"timeout": 60.0, **module.RECIPE, **options}), world)
    if stop is not None:
        run.add_callback(_stopping(run, stop))
    try:
        found = module.train(run, module.EPOCHS)
    except Stopped:
        found = module.found
    run.close()
    return found


def _stopping(run, step):
    """A callback by which a run is asked to stop, as by SIGTERM, while it computes a step."""
    from lockstep.runtime.control import StopReason
    from lockstep.runtime.events import Callback

    class Stopping(Callback):
        def on_step_begin(self, batch):
            if batch.plan.step == step:
                run._session.heartbeat.control.request_stop(StopReason.PREEMPTED)

    return Stopping()


def script(text, layout):
    """The program as a file that runs by itself: ``lockstep run --devices N FILE``, and without for ``single``."""
    options = ", ".join(f"{key!r}: {value!r}" for key, value in layout.options.items())
    return (
        f"# python {PROGRAM}; lockstep run --devices {layout.ranks} {PROGRAM} there\n"
        + text.rstrip()
        + "\n\n\nif __name__ == '__main__':\n"
        + "    import sys\n\n    import lockstep\n\n"
        + f"    LAYOUT = {{{options}}} if len(sys.argv) > 1 else {{'strategy': 'single'}}\n"
        + "    run = lockstep.init(**RECIPE, **LAYOUT)\n"
        + "    found = train(run, EPOCHS)\n"
        + "    run.print('\\n'.join(f'{key}: {value}' for key, value in found.items()))\n"
    )


def folder_of(path):
    """The folder of a file, made if need be."""
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    return folder
