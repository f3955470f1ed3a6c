"""Starts ``lockstep`` commands in a tenth of the time, from one process that has torch imported already.

The command, its supervisor, the fork server and the ranks are the real ones; only the import is spared, by forking
the fork server where ``lockstep`` would start a new interpreter. Reads one JSON line per command from standard
input and answers with two: its process id, and its exit code once it has ended. Whatever outlives its parent
becomes a child of this process, where a test finds it.
"""

import ctypes
import gc
import importlib
import json
import os
import signal
import sys
import traceback
from contextlib import contextmanager

_PR_SET_CHILD_SUBREAPER = 36


@contextmanager
def nothing_returns():
    """Ends a fork here, whatever happens in it."""
    try:
        yield
    except BaseException:
        traceback.print_exc()
    os._exit(1)


class Forked:
    """Stands in for the supervisor's ``subprocess.Popen``, with a fork server that is forked."""

    def __init__(self, arguments, *, env, pass_fds, start_new_session):
        assert start_new_session
        self._code = None
        self.pid = os.fork()
        if self.pid == 0:
            with nothing_returns():
                self._serve(arguments, env, pass_fds)

    def _serve(self, arguments, environment, pass_fds):
        from lockstep.launch import fork_server
        from lockstep.runtime import stop_signals

        os.setsid()
        signal.set_wakeup_fd(-1)
        for number in stop_signals.REASONS:
            signal.signal(number, signal.SIG_DFL)
        os.environ.clear()
        os.environ.update(environment)
        first = 3
        for kept in sorted(pass_fds):
            os.closerange(first, kept)
            first = kept + 1
        os.closerange(first, os.sysconf("SC_OPEN_MAX"))
        sys.argv = ["-c", *arguments[4:]]
        fork_server.main()

    def wait(self, timeout=None):
        import subprocess
        import time

        deadline = None if timeout is None else time.monotonic() + timeout
        while self._code is None:
            pid, status = os.waitpid(self.pid, 0 if deadline is None else os.WNOHANG)
            if pid:
                self._code = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                raise subprocess.TimeoutExpired("fork server", timeout)
            else:
                time.sleep(0.002)
        return self._code


def command(order):
    """Becomes the command; never returns."""
    from lockstep.cli import main
    from lockstep.launch import fork_server
    from lockstep.runtime.parent_death import die_with_parent

    die_with_parent()
    os.setsid()
    os.environ.update(order["environment"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    outputs = [os.open(order[name], os.O_WRONLY | os.O_CREAT | os.O_TRUNC) for name in ("stdout", "stderr")]
    for number, descriptor in enumerate([nothing, *outputs]):
        os.dup2(descriptor, number)
    fork_server.subprocess.Popen = Forked
    code = main(order["arguments"])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main():
    import torch.distributed

    for name in ("lockstep.cli.run", "lockstep.run", "lockstep.strategies.fsdp"):
        importlib.import_module(name)
    from lockstep.runtime.lazy_compiler import postpone_compiler
    from lockstep.runtime.parent_death import die_with_parent
    from lockstep.runtime.stop_signals import REASONS

    die_with_parent()
    for number in REASONS:  # a shell starts what runs in its background with SIGINT ignored
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    postpone_compiler()
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    print(json.dumps({"ready": torch.__version__}), file=answers)
    for line in iter(sys.stdin.readline, ""):
        pid = os.fork()
        if pid == 0:
            with nothing_returns():
                command(json.loads(line))
        print(json.dumps({"pid": pid}), file=answers)
        ended, status = os.wait()
        while ended != pid:
            ended, status = os.wait()
        print(json.dumps({"code": os.waitstatus_to_exitcode(status)}), file=answers)


if __name__ == "__main__":
    main()
