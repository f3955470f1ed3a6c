"""What can be wrong before the first step: values, seeds, frozen parameters, the order of the layers."""

from __future__ import annotations

from lockstep.verify.diagnosis import Cause, Diagnosis
from lockstep.verify.plain.pair import Pair
from lockstep.verify.plain.record import Recording


def frozen(pair: Pair, step: int) -> Diagnosis | None:
    """A parameter that some of the ranks that hold it train, and others do not."""
    records = pair.other.at(step)
    for name in dict.fromkeys(name for record in records for name in record.begin):
        holders = [rank for rank, record in enumerate(records) if name in record.begin]
        without = [rank for rank in holders if name not in records[rank].trained]
        if without and len(without) < len(holders):
            return Diagnosis(Cause.FROZEN, step, repr(name), f"not on rank {_list(without)}")
    return None


def values(pair: Pair) -> Diagnosis | None:
    """Parameters that do not begin as the reference's, or not alike on all ranks."""
    ranks = pair.other.ranks
    for name in dict.fromkeys(name for rank in ranks for name in rank.start):
        held = {rank.rank: rank.start[name].digest for rank in ranks if name in rank.start}
        known = pair.first.start.get(name)
        odd = [rank for rank, digest in held.items() if known is None or digest != known.digest]
        if not odd:
            continue
        if len(set(held.values())) == 1:
            return Diagnosis(
                Cause.START, -1, repr(name), "equal on all ranks, and not the reference's" if known else ""
            )
        seeds = {rank: ranks[rank].seed for rank in held}
        detail = f"rank {_list(odd)} began with other values than the reference"
        if len(set(seeds.values())) == len(set(held.values())) == len(held):
            listed = ", ".join(str(seed) for seed in seeds.values())
            return Diagnosis(Cause.SEEDS, -1, repr(name), f"{detail}; the seeds are {listed}")
        return Diagnosis(Cause.START, -1, repr(name), detail)
    return None


def stages(pair: Pair) -> Diagnosis | None:
    """A module that takes its input from another module than in the reference."""
    mine, theirs = _sources(pair.reference), _sources(pair.other)
    for name, before in mine.items():
        found = theirs.get(name, set())
        if before and found and not before & found:
            detail = f"its input comes from {_names(found)}, and from {_names(before)} in the reference"
            return Diagnosis(Cause.STAGES, 0, repr(name), detail)
    return None


def _sources(run: Recording) -> dict[str, set[str]]:
    """For each module, the modules whose output some call of it was given, bit for bit."""
    calls = [call for record in run.at(0) for call in record.calls]
    givers: dict[str, set[str]] = {}
    for name, _, output in calls:
        givers.setdefault(output, set()).add(name)
    found: dict[str, set[str]] = {}
    for name, given, _ in calls:
        found.setdefault(name, set()).update(givers.get(given, set()) - {name} if given else set())
    return found


def _list(ranks: list[int]) -> str:
    return ", ".join(str(rank) for rank in ranks)


def _names(modules: set[str]) -> str:
    return " or ".join(repr(name) for name in sorted(modules))
