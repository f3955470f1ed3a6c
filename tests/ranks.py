"""Runs a function on several real ranks, forked from one process per test session that has torch imported.

    def body(world, x): ...                       # module level; the process group is open
    results = run_ranks(body, 4, x)               # what each rank returned, by rank

A rank's exception is raised again here, with the rank's traceback as a note.
"""

import contextlib
import gc
import multiprocessing
import os
import pickle
import shutil
import tempfile
import time
import traceback
from multiprocessing import forkserver
from multiprocessing.connection import wait

PRELOAD = [
    "__main__",
    "numpy.random",
    "torch",
    "torch.distributed",
    "pytest",
    "lockstep.distributed.process_group",
    "lockstep.run",
    "lockstep.lint.check",
    "lockstep.strategies.fsdp",
    "tests.ranks",
]
_SERVES = "LOCKSTEP_TESTS_FORK_SERVER"
"""In the environment of the process that ranks are forked from while it starts."""
_AFTER_FAILURE = 3.0


class RankFailed(AssertionError):
    """A rank ended without a result, or with an exception that cannot be pickled."""


def run_ranks(body, world_size, *args, threads=1, timeout=60):
    """Calls ``body(world, *args)`` on ``world_size`` ranks and returns the results by rank.

    Args:
        body: a function at module level.
        world_size: number of processes; 1 is a process without a group.
        args: anything that can be pickled.
        threads: intra-op threads of each rank.
        timeout: seconds for all of it; then the ranks are killed and ``RankFailed`` says which had not ended.
    """
    directory = tempfile.mkdtemp(prefix="lockstep-test-")
    task = pickle.dumps((body, args))
    tasks = [(rank, world_size, threads, timeout, directory, task) for rank in range(world_size)]
    try:
        with forked(_rank, tasks) as (processes, pipes):
            return _results(processes, pipes, timeout)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextlib.contextmanager
def forked(target, tasks):
    """Forks ``target(*task, sender)`` for each task, from the process that has torch imported; kills them at the end.

    Args:
        target: sends one answer, (moment, whether it is a result, content), pickled.
        tasks: arguments of each rank.

    Yields:
        The processes, and the pipe of each.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    os.environ[_SERVES] = "1"
    forkserver.ensure_running()
    del os.environ[_SERVES]
    processes, pipes = [], []
    try:
        for rank, task in enumerate(tasks):
            receiver, sender = context.Pipe(duplex=False)
            process = context.Process(target=target, args=(*task, sender), name=f"rank {rank}")
            process.start()
            sender.close()
            processes.append(process)
            pipes.append(receiver)
        yield processes, pipes
    finally:
        for process in processes:
            process.kill()
            process.join()
            process.close()
        for pipe in pipes:
            pipe.close()


def answers_of(processes, pipes, timeout, after_failure, died):
    """Waits for the answers of all ranks, after a failure only for a moment.

    Args:
        processes, pipes: see ``forked``.
        timeout: seconds for all answers.
        after_failure: seconds for the others after a failure.
        died: gives moment and content for a rank that ended without an answer, of its number and exit code.

    Returns:
        The results by rank, the failures as (moment, rank, content), and the ranks that have not answered.
    """
    deadline, waiting = time.monotonic() + timeout, dict(zip(pipes, range(len(pipes))))
    results, failures = {}, []
    while waiting and (left := deadline - time.monotonic()) > 0:
        for pipe in wait(list(waiting), left):
            rank = waiting.pop(pipe)
            try:
                moment, good, content = pickle.loads(pipe.recv_bytes())
            except EOFError:
                processes[rank].join()
                good, (moment, content) = False, died(rank, processes[rank].exitcode)
            if good:
                results[rank] = content
            else:
                failures.append((moment, rank, content))
                deadline = min(deadline, time.monotonic() + after_failure)
    return results, failures, sorted(waiting.values())


def _results(processes, pipes, timeout):
    answers, failures, waiting = answers_of(
        processes, pipes, timeout, _AFTER_FAILURE, lambda *ended: (time.monotonic(), (_died(*ended), ""))
    )
    if failures:
        _, rank, (error, text) = min(failures, key=lambda failure: failure[:2])
        error.add_note(f"raised on rank {rank} of {len(processes)}:\n{text}")
        raise error
    if waiting:
        raise RankFailed(f"ranks {waiting} had not ended after {timeout} s")
    return [answers[rank] for rank in range(len(processes))]


def _died(rank, code):
    return RankFailed(f"rank {rank} ended with exit code {code} and without a result")


def _rank(rank, world_size, threads, timeout, directory, task, sender):
    from lockstep.runtime.parent_death import arm_future_children, die_with_parent

    die_with_parent()
    arm_future_children()
    try:
        answer = True, _call(rank, world_size, threads, timeout, directory, task)
    except BaseException as error:
        answer = False, (error, traceback.format_exc())
    moment = time.monotonic()
    try:
        message = pickle.dumps((moment, *answer))
        pickle.loads(message)
    except Exception as problem:
        said = answer[1][1] if not answer[0] else f"its result cannot be pickled: {problem!r}"
        message = pickle.dumps((moment, False, (RankFailed(f"rank {rank} failed"), said)))
    with contextlib.suppress(BrokenPipeError):
        sender.send_bytes(message)
    if not answer[0]:
        os._exit(1)


def _call(rank, world_size, threads, timeout, directory, task):
    import torch

    from lockstep.core.world import World
    from lockstep.distributed.process_group import open_process_group
    from lockstep.runtime.lazy_compiler import postpone_compiler
    from lockstep.runtime.stop_signals import wait_for_critical_threads

    postpone_compiler()
    torch.set_num_threads(threads)
    os.environ.update(OMP_NUM_THREADS=str(threads), RANK=str(rank), WORLD_SIZE=str(world_size))
    body, args = pickle.loads(task)
    gc.freeze()  # the end of each run collects, which takes longer than a small run where there are many objects
    world = World(
        rank=rank,
        world_size=world_size,
        local_rank=rank,
        local_world_size=world_size,
        launcher="lockstep",
        rendezvous=f"file://{directory}/rendezvous",
        run_id="test",
    )
    with open_process_group(world, timeout=timeout, arrival_limit=timeout):
        try:
            return body(world, *args)
        finally:
            wait_for_critical_threads()  # the caller kills the process once it has the result


if os.environ.pop(_SERVES, None):
    # Once, and not on every rank: it looks at all functions of torch, and so copies the memory that they lie in.
    from lockstep.runtime.lazy_compiler import postpone_compiler

    postpone_compiler()
