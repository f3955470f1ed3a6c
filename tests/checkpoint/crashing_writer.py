"""Writes checkpoints in forked children until it is told to stop; run as a process of its own.

    python crashing_writer.py DIRECTORY        reads lines from standard input, answers one line to each

    loop FIRST         a child writes steps FIRST, FIRST + 1, ... keeping 2; answers its pid when it has begun
    until STEP N       a child writes STEP keeping 1 and kills itself before its N-th file operation; answers
                       "killed", or "finished" where it had fewer operations
    wait PID           answers once that child is gone

torch is imported once, here; this process runs none of its operators, so forking it is safe.
"""

import os
import signal
import sys

from conftest import filled
from lockstep.checkpoint import write

_SIZE = 300_000


def child(work):
    pid = os.fork()
    if pid == 0:
        try:
            work()
        finally:
            os._exit(0)
    return pid


def loop(directory, first):
    reader, writer = os.pipe()

    def work():
        os.write(writer, b"!")
        for step in range(first, first + 200):
            write(directory, filled(step, _SIZE), step=step, keep=2)

    pid = child(work)
    os.read(reader, 1)
    os.close(reader)
    os.close(writer)
    return pid


def until(directory, step, operations):
    def work():
        left = [operations]

        def count(event, arguments):
            if event.split(".")[0] in ("open", "os", "shutil") and str(directory) in repr(arguments):
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(count)
        write(directory, filled(step), step=step, keep=1)

    status = os.waitpid(child(work), 0)[1]
    return "killed" if os.WIFSIGNALED(status) else "finished"


def main():
    directory = sys.argv[1]
    print("ready", flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        if command == "loop":
            answer = loop(directory, int(numbers[0]))
        elif command == "until":
            answer = until(directory, int(numbers[0]), int(numbers[1]))
        else:
            answer = os.waitpid(int(numbers[0]), 0)[0]
        print(answer, flush=True)


if __name__ == "__main__":
    main()
