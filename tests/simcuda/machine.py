"""A process that has torch and the simulated devices loaded, or leaves the real ones to its ranks, and forks ranks.

with Machine() as machine:
    results = machine.run(body, 2, *args)     # what body(world, *args) returned, by rank
"""

from __future__ import annotations

import multiprocessing
import os
import pickle
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Self

from tests.simcuda.build import library

ROOT = Path(__file__).parent.parent.parent
_LONGEST_END = 20.0


class Machine:
    """A machine with GPUs; ``run`` calls a function of a module on ranks of it.

    Args:
        simulated: False for the GPUs that are there.
        environment: variables of its processes, beside this one's.
    """

    def __init__(self, *, simulated: bool = True, environment: Mapping[str, str] | None = None) -> None:
        path = os.pathsep.join([str(ROOT), str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
        self._start = partial(
            subprocess.Popen,
            [sys.executable, "-m", __name__, *([str(library())] if simulated else [])],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **(environment or {})},
        )
        self._process = self._start()
        self.deadline: float | None = None
        """The moment, of ``time.monotonic``, after which ranks are not waited for."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def _end(self) -> None:
        self._process.kill()
        self._process.communicate()

    def run(self, body: Callable[..., Any], ranks: int, *args: Any, timeout: float = 120.0) -> list[Any]:
        """The value of ``body(world, *args)`` on each rank; raises a rank's exception, with its traceback."""
        if self.deadline is not None:
            timeout = max(1.0, min(timeout, self.deadline - time.monotonic()))
        request = f"{body.__module__}:{body.__qualname__}", ranks, args, timeout
        assert self._process.stdin and self._process.stdout
        pickle.dump(request, self._process.stdin)
        self._process.stdin.flush()
        try:
            results, failures, waiting = pickle.load(self._process.stdout)
        except BaseException:  # as when a test's time is over
            self._end()  # else the next request would get the answer to this one
            self._process = self._start()
            raise
        if failures:
            from lockstep.runtime.torch_internals import LOST_PEER

            # A rank that loses another says so before the end of that one is noticed.
            _, rank, (error, text) = min(failures, key=lambda failed: (LOST_PEER.is_in(str(failed[2][0])), *failed[:2]))
            error.add_note(f"raised on rank {rank} of {ranks}:\n{text}")
            raise error
        assert not waiting, f"ranks {waiting} had not ended after {timeout} s"
        return [results[rank] for rank in range(ranks)]


def serve(path: Path | None) -> None:
    """Answers requests on standard input until it is closed; what ranks print goes to standard error."""
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    if path is not None:
        from tests.simcuda import cuda

        cuda.install(path)
        from tests.simcuda import nccl

        nccl.install()
    from tests.ranks import RankFailed, answers_of

    from lockstep.runtime.lazy_compiler import postpone_compiler

    def died(rank: int, code: int) -> tuple[float, tuple[Exception, str]]:
        return time.monotonic(), (RankFailed(f"rank {rank} ended with exit code {code}"), "")

    postpone_compiler()
    context = multiprocessing.get_context("fork")
    while True:
        try:
            name, ranks, args, timeout = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        processes, pipes = [], []
        with tempfile.TemporaryDirectory(prefix="simcuda-") as folder:
            for rank in range(ranks):
                receiver, sender = context.Pipe(duplex=False)
                process = context.Process(target=_rank, args=(rank, ranks, folder, name, args, sender))
                process.start()
                sender.close()
                processes.append(process)
                pipes.append(receiver)
            answer = answers_of(processes, pipes, timeout, 3.0, died)  # type: ignore[no-untyped-call]  # tests
            for process in processes:
                process.kill()
                process.join(_LONGEST_END)  # a driver that hangs keeps a process from ending
        pickle.dump(answer, answers)
        answers.flush()


def _rank(rank: int, ranks: int, folder: str, name: str, args: tuple[Any, ...], sender: Connection) -> None:
    from lockstep.core.world import World
    from lockstep.runtime.parent_death import die_with_parent

    die_with_parent()
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_RANK=str(rank))
    world = World(
        rank=rank,
        world_size=ranks,
        local_rank=rank,
        local_world_size=ranks,
        launcher="lockstep",
        rendezvous=f"file://{folder}/rendezvous",
        run_id="simcuda",
    )
    try:
        module, _, function = name.partition(":")
        __import__(module)
        answer = True, getattr(sys.modules[module], function)(world, *args)
    except BaseException as error:
        answer = False, (error, traceback.format_exc())
    moment = time.monotonic()
    try:
        message = pickle.dumps((moment, *answer))
        pickle.loads(message)
    except Exception as problem:
        text = str(answer[1][1]) if not answer[0] else repr(problem)
        message = pickle.dumps((moment, False, (AssertionError(f"rank {rank} failed"), text)))
    sender.send_bytes(message)
    sys.stderr.flush()
    os._exit(0 if answer[0] else 1)


if __name__ == "__main__":
    serve(Path(sys.argv[1]) if len(sys.argv) > 1 else None)
