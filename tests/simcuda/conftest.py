"""A simulated machine for each worker that tests."""

import pytest
from tests.simcuda.build import NoCompiler, library
from tests.simcuda.layouts import LAYOUTS, WIDER
from tests.simcuda.machine import Machine
from tests.simcuda.trainings import train


@pytest.fixture(scope="session")
def machine():
    """Four simulated CUDA devices; skips where there is no C++ compiler."""
    try:
        library()
    except NoCompiler as missing:
        pytest.skip(str(missing))
    with Machine() as started:
        yield started


@pytest.fixture(scope="session")
def trained(machine):
    """Trains once in each layout, and gives what came out by rank."""
    known = {}

    def once(layout, model, **options):
        key = layout, model, repr(options)
        if key not in known:
            ranks, strategy, own = {**LAYOUTS, **WIDER}[layout]
            known[key] = machine.run(train, ranks, model, strategy, {**own, **options})
        return known[key]

    return once
