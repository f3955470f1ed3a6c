"""Takes the digests of the gradients that a step has left on the parameters, however they are held."""

from __future__ import annotations

import math

from lockstep.collectives import gather_json
from lockstep.fingerprint import digest_tensor
from lockstep.run import Run
from lockstep.sums import sum_of_squares


def digest_gradients(run: Run) -> tuple[dict[str, str], float]:
    """The digest of each parameter's whole gradient and the norm of all, on the main process. Collective.

    Returns:
        Digests by parameter name, without those that have no gradient, and the norm, summed in float64; nothing and
        NaN on the other processes.
    """
    strategy, saved = run.strategy, run.require_prepared()
    if strategy.replicated and not run.is_main:
        return {}, math.nan
    held = strategy.trainable()
    mine = [name for name, parameter in held.items() if parameter.grad is not None]
    used = set(mine)
    if not strategy.replicated and saved.group is not None:
        used = {name for names in gather_json(mine, saved.group, run.device) for name in names}
    digests, squares = {}, 0.0
    for name in sorted(used):
        part = held[name].grad if name in held else None
        whole = strategy.whole(name, part, saved.placed.tensors[name].dtype)
        if run.is_main:
            digests[name] = digest_tensor(whole)
            squares += float(sum_of_squares(whole))
    return digests, math.sqrt(squares) if run.is_main else math.nan
