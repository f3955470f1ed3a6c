"""The rank that holds the others up, decided from what is seen of them."""

from dataclasses import replace

import pytest

from lockstep.launch.stalls.report import StallKind, describe, judge_stall, report_stall
from lockstep.launch.stalls.snapshot import Collective, Frame, RankSnapshot, main_stack, users_frame, waits_in
from lockstep.runtime.heartbeat import Beat, Membership

USER = Frame("/home/u/train.py", 12, "load")
GATHER = (
    Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 4000, "all_reduce"),
    Frame("/home/u/train.py", 30, "step"),
)
BARRIER = (
    Frame("/x/site-packages/torch/distributed/distributed_c10d.py", 5000, "barrier"),
    Frame("/home/u/train.py", 40, "step"),
)


def snapshot(rank, stack=GATHER, *, step=3, state="S", silence=9.0, limit=5.0, collectives=()):
    beat = Beat(
        phase="data",
        epoch=0,
        step=step,
        micro_batch=0,
        time=0.0,
        pid=1,
        membership=Membership.JOINED,
        samples=(),
    )
    return RankSnapshot(
        rank=rank,
        pid=1,
        state=state,
        beat=beat,
        silence=silence,
        limit=limit,
        stack=tuple(stack),
        collectives=collectives,
    )


def called(sequence, operation="gloo:all_reduce", size=4):
    return Collective(sequence, operation, ((size,),), ("Float",), pending=True)


@pytest.mark.fault("P12")
def test_a_stopped_process_comes_before_all_else():
    verdict = judge_stall([snapshot(0), snapshot(1, (), state="T"), snapshot(2, (USER,))])
    assert (verdict.kind, verdict.culprits) == (StallKind.STOPPED, (1,))


def test_the_rank_that_others_wait_for_is_missing():
    verdict = judge_stall([snapshot(0), snapshot(1, (USER,)), snapshot(2)])
    assert (verdict.kind, verdict.culprits) == (StallKind.MISSING, (1,))
    assert verdict.is_deadlock


def test_a_rank_that_still_has_time_holds_nobody_up():
    assert judge_stall([snapshot(0), snapshot(1, (USER,), silence=9.0, limit=50.0)]) is None
    assert judge_stall([snapshot(0), snapshot(1, silence=1.0)]) is None


def test_where_nobody_waits_the_run_is_merely_slow():
    verdict = judge_stall([snapshot(0, (USER,)), snapshot(1, (USER,), silence=1.0)])
    assert (verdict.kind, verdict.culprits, verdict.is_deadlock) == (StallKind.BUSY, (0,), False)


def test_the_first_collective_that_differs_decides():
    snapshots = [
        snapshot(0, collectives=(called(7), called(8))),
        snapshot(1, collectives=(called(7), called(8, size=5))),
    ]
    snapshots.append(snapshot(2, collectives=(called(7), called(8))))
    verdict = judge_stall(snapshots)
    assert (verdict.kind, verdict.culprits) == (StallKind.MISMATCH, (1,))
    assert verdict.shown[1].sizes == ((5,),)


def test_of_two_ranks_in_different_places_the_one_that_is_behind_is_to_blame():
    verdict = judge_stall([snapshot(0, BARRIER, step=3), snapshot(1, GATHER, step=4)])
    assert (verdict.kind, verdict.culprits) == (StallKind.MISMATCH, (0,))


def test_of_two_ranks_in_different_places_of_one_step_both_are_shown():
    """A call of the model on rank 0 alone, as under ``pipeline``, was said to wait for a cut connection."""
    snapshots = [snapshot(0, GATHER), snapshot(1, BARRIER)]
    verdict = judge_stall(snapshots)
    assert (verdict.kind, verdict.culprits) == (StallKind.MISMATCH, (1,))
    text = "\n".join(describe(verdict, snapshots))
    assert "train.py:30" in text and "train.py:40" in text and "cut" not in text


def test_parts_of_different_sizes_are_no_other_collective():
    """The last rank has a shorter share in each sum, and was blamed where rank 0 alone was in a barrier."""
    shares = [(called(41, "gloo:all_to_all", size),) for size in (30, 30, 15)]
    snapshots = [snapshot(rank, GATHER if rank else BARRIER, collectives=shares[rank]) for rank in range(3)]
    verdict = judge_stall(snapshots)
    assert (verdict.kind, verdict.culprits) == (StallKind.MISMATCH, (0,))


def test_ranks_that_are_all_alike_wait_for_the_network():
    verdict = judge_stall([snapshot(rank, collectives=(called(8),)) for rank in range(4)])
    assert (verdict.kind, verdict.culprits) == (StallKind.NETWORK, ())
    assert "the connection between them is cut or very slow" in describe(verdict, [snapshot(0), snapshot(1)])[0]


def test_a_report_of_many_ranks_stays_short():
    snapshots = [snapshot(rank, (USER,) * 30 if rank == 50 else GATHER) for rank in range(64)]
    lines = describe(judge_stall(snapshots), snapshots)
    assert len(lines) <= 25
    assert "the others wait for rank 50" in lines[0]
    assert all(remedy in lines[1] for remedy in ("run --stall-limit ", "train --set run.stall_limit="))
    assert lines[2].startswith("  rank 50")


def test_a_report_has_the_lines_of_the_user_of_the_rank_and_of_its_first_worker():
    library, worker = Frame("/x/site-packages/torch/fetch.py", 7, "fetch"), Frame("/home/u/data.py", 9, "__getitem__")
    late = replace(snapshot(1, (library, USER, library)), workers=((library, worker), (Frame("/u/b.py", 1, "b"),)))
    snapshots = [snapshot(0), late]
    lines = describe(judge_stall(snapshots), snapshots)
    assert lines[-2:] == [f"    {USER.text}", f"    {worker.text}"]
    assert not any("fetch" in line or "b.py" in line for line in lines)


DUMP = """Thread 0x00007f (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 327 in wait

Current thread 0x00007e (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 2810 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 83 in wrapper
  File "/home/u/train.py", line 30 in <module>
  File "/x/site-packages/lockstep/anywhere.py", line 77 in anything [runs a rank]

Thread 0x00007d (most recent call first):
  File "/home/u/other.py", line 1 in loop
"""


def test_the_main_thread_is_found_in_a_dump_over_all_threads():
    stack = main_stack(DUMP)
    assert users_frame(stack) == Frame("/home/u/train.py", 30, "<module>")
    assert waits_in(stack, collective_pending=False) == "all_reduce"


def test_a_stack_tells_waiting_from_working():
    engine = (Frame("/x/site-packages/torch/autograd/graph.py", 800, "_engine_run_backward"), USER)
    assert waits_in((USER, *GATHER), collective_pending=True) == ""
    assert waits_in(engine, collective_pending=False) == ""
    assert waits_in(engine, collective_pending=True) == "a collective in backward"
    assert waits_in(
        (Frame("/x/anywhere.py", 9, "anything [waits for the sum of gradients over ranks]"), USER),
        collective_pending=False,
    )
    assert waits_in((), collective_pending=True) == ""
    assert main_stack("nothing") == ()


@pytest.mark.fault("T2")
def test_the_report_comes_where_its_file_cannot_be_written(tmp_path):
    ranks = [snapshot(0), snapshot(1, (USER,)), snapshot(2)]
    lines = report_stall(judge_stall(ranks), ranks, tmp_path / "absent")
    assert "the others wait for rank 1" in lines[0]
    assert (
        lines[-1] == f"Its file {tmp_path / 'absent' / 'stall.json'} could not be written: No such file or directory."
    )
