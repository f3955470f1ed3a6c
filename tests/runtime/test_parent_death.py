"""Real processes: a parent is killed, and what it started ends too."""

import os
import signal
import subprocess
import sys
from pathlib import Path

from tests.launch.command import wait_until

PARENT = """
import os, signal, sys, time
from lockstep.runtime.parent_death import arm, arm_future_children
{before}
child = os.fork()
if child == 0:
    {child}
    print(os.getpid(), flush=True)
    time.sleep(600)
os.wait()
"""


def start(child, before=""):
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT.format(child=child, before=before)], stdout=subprocess.PIPE, text=True
    )
    return parent, int(parent.stdout.readline())


def end(parent):
    parent.kill()
    parent.wait()
    parent.stdout.close()


def is_gone(process):
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return True
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


def test_an_armed_child_ends_with_its_parent():
    parent, child = start("arm(os.getppid())")
    end(parent)
    wait_until(lambda: is_gone(child), 2, "the child to end")


def test_a_thread_watches_the_parent_where_the_kernel_does_not():
    parent, child = start("arm(os.getppid())", before="sys.platform = 'darwin'")
    end(parent)
    wait_until(lambda: is_gone(child), 5, "the child to end")


def test_children_forked_later_are_armed_by_themselves():
    parent, child = start("pass", before="arm_future_children()")
    end(parent)
    wait_until(lambda: is_gone(child), 2, "the child to end")


def test_a_child_that_is_not_armed_lives_on():
    """Shows that the tests above would notice."""
    parent, child = start("pass")
    end(parent)
    assert not is_gone(child)
    os.kill(child, signal.SIGKILL)


def test_a_process_whose_parent_has_gone_already_ends_at_once():
    done = subprocess.run(
        [sys.executable, "-c", "from lockstep.runtime.parent_death import arm; arm(1); print('alive')"],
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert (done.returncode, done.stdout) == (-signal.SIGKILL, "")


def test_a_loader_worker_ends_with_the_process_that_asked_for_it():
    program = (
        "import multiprocessing, os, sys, time\n"
        "from lockstep.runtime.parent_death import die_with_parent\n"
        "def work():\n    die_with_parent(); print(os.getpid(), flush=True); time.sleep(600)\n"
        "worker = multiprocessing.get_context('fork').Process(target=work)\n"
        "worker.start()\nworker.join()\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    worker = int(parent.stdout.readline())
    end(parent)
    wait_until(lambda: is_gone(worker), 2, "the worker to end")
