"""What becomes of a run with each fault: its exit code, its report, and the processes that it leaves."""

import os
import subprocess
import time
import uuid
from pathlib import Path

for fault in ("none", "hang", "die"):
    mark = uuid.uuid4().hex  # the processes of this run inherit it in their environment
    begin = time.perf_counter()
    run = subprocess.run(
        f"lockstep run --devices cpu:2 --stall-limit 3 12/with_lockstep.py {fault}".split(),
        env=os.environ | {"MARK": mark},
        capture_output=True,
        text=True,
        check=False,
    )
    seconds = time.perf_counter() - begin
    left = 0
    for process in Path("/proc").glob("[0-9]*/environ"):
        try:
            left += mark.encode() in process.read_bytes()
        except OSError:  # it has just ended, or belongs to somebody else
            continue
    report = run.stderr.splitlines() or ["(no report)"]
    print(f"{fault}: exit code {run.returncode} after {seconds:.0f} s, processes left: {left}\n    {report[0]}")
