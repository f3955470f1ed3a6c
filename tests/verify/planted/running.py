"""Runs all loops on real ranks, few worlds for all of them, and asks verify about what they recorded."""

from pathlib import Path

from tests.ranks import run_ranks
from tests.verify.planted.catalogue import FAULTS, Result

from lockstep.verify.plain import Recording, diagnose_plain


def run_all(folder, faults=FAULTS, **options):
    """The result for every fault, in order. All loops, without and with mistake, run on one process too.

    Args:
        folder: for the records.
        faults: of the catalogue.
        options: of every loop.
    """
    folder = Path(folder)
    alone = dict.fromkeys(loop for fault in faults for loop in (fault.sound, fault.loop))
    twice = {loop for fault in faults if fault.is_in_reference for loop in (fault.sound, fault.loop)}
    for name, loops in (("reference", alone), ("again", twice)):
        run_ranks(body, 1, [(loop, folder / name / loop.__name__) for loop in loops], options, timeout=120)
    for ranks in sorted({fault.ranks for fault in faults}):
        here = [fault for fault in faults if fault.ranks == ranks]
        loops = dict.fromkeys([*(fault.sound for fault in here), *(fault.loop for fault in here)])
        cases = [(loop, folder / str(ranks) / loop.__name__) for loop in loops]
        run_ranks(body, ranks, cases, options, timeout=120)
    return [
        Result(
            fault,
            _judge(folder, fault, fault.loop, fault.reference),
            _judge(folder, fault, fault.sound, fault.sound),
            _judge(folder, fault, fault.loop, fault.loop),
        )
        for fault in faults
    ]


def body(world, loops, options):
    for loop, folder in loops:
        loop(world.rank, world.world_size, folder, **options).run()


def _judge(folder, fault, loop, reference):
    name = reference.__name__
    reference = Recording.read(folder / "reference" / name)
    again = Recording.read(folder / "again" / name) if (folder / "again" / name).exists() else None
    other = Recording.read(folder / str(fault.ranks) / loop.__name__)
    return diagnose_plain(reference, other, again=again)
