"""Ranks that are threads of one process, and their rows of a state, to write checkpoints that all write."""

import json
import threading

from lockstep.checkpoint import CheckpointState
from lockstep.checkpoint.sharded import prepare_sharded

RANKS = 3


class Meeting:
    """An exchange between ranks that are threads of one process."""

    def __init__(self, ranks=RANKS):
        self.values, self.barrier = [None] * ranks, threading.Barrier(ranks, timeout=30)

    def of(self, rank):
        """The exchange of one rank, which passes values on as JSON would."""

        def exchange(value):
            self.values[rank] = json.dumps(value)
            self.barrier.wait()
            found = [json.loads(each) for each in self.values]
            self.barrier.wait()
            return found

        return exchange


def by_all(body, ranks=RANKS):
    """The value of ``body(rank, exchange)``, or its error, on each of the ranks."""
    meeting, found = Meeting(ranks), [None] * ranks

    def run(rank):
        try:
            found[rank] = body(rank, meeting.of(rank))
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return found


def rows_of(state, rank, ranks=RANKS):
    """The state of one rank: its rows, on rank 0 also what has none."""

    def own(tensors):
        cut = {name: t.tensor_split(ranks)[rank] if t.dim() else t for name, t in tensors.items()}
        return {name: t for name, t in cut.items() if rank == 0 or (t.dim() and len(t))}

    return CheckpointState(
        own(state.model), own(state.optimizer), state.progress, state.aliases, state.optimizer_records
    )


def save(directory, state, step=7, **settings):
    """Writes by all ranks; what each gave or raised."""

    def body(rank, exchange):
        prepared = prepare_sharded(
            directory, rows_of(state, rank), step=step, rank=rank, ranks=RANKS, exchange=exchange, **settings
        )
        return prepared.write()

    return by_all(body)
