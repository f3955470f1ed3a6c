"""``python -m lockstep``: the same as the command ``lockstep``, also for ``torchrun -m lockstep train JOB``."""

from lockstep.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
