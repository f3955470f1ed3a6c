"""Stacks are parsed from faulthandler's dumps, and their frames say where a rank waits."""

from lockstep.launch.stalls.snapshot import Collective, Frame, main_stack, users_frame, waits_in

DUMP = """Thread 0x00007f01 (most recent call first):
  File "/usr/lib/python3/threading.py", line 320 in wait

Current thread 0x00007f02 (most recent call first):
  File "/x/site-packages/torch/distributed/distributed_c10d.py", line 2806 in all_reduce
  File "/x/site-packages/torch/distributed/c10d_logger.py", line 81 in wrapper
  File "/home/me/train.py", line 40 in main
"""


def test_the_last_stack_is_that_of_the_main_thread():
    stack = main_stack(DUMP)
    assert [frame.line for frame in stack] == [2806, 81, 40]
    assert users_frame(stack) == Frame("/home/me/train.py", 40, "main")
    assert main_stack("") == ()


def test_a_rank_in_a_collective_waits_and_one_in_its_own_code_does_not():
    stack = main_stack(DUMP)
    assert waits_in(stack, collective_pending=False) == "all_reduce"
    assert waits_in(stack[2:], collective_pending=True) == ""


def test_a_collective_is_shown_with_its_shapes():
    shown = Collective(41, "gloo:all_reduce", ((7,),), ("Float",), pending=True)
    assert shown.text == "#41 gloo:all_reduce [7] Float"
