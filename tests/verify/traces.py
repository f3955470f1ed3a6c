"""Traces made by hand."""

import copy

from lockstep.verify import StepTrace, Trace, compare


def trace(steps=3, **settings):
    made = Trace("ddp on 2", "ddp", 2, "A", context={"threads": "1", "optimizers": "SGD"}, start={"w": "s", "b": "s"})
    for key, value in settings.items():
        setattr(made, key, value)
    made.steps = [
        StepTrace(
            step=n,
            loss=(2.0 - n / 10).hex(),
            samples={"0": f"i{n}0", "1": f"i{n}1"},
            inputs={"0": f"x{n}0", "1": f"x{n}1"},
            losses=[(4.0 - n).hex(), (3.0 - n).hex()],
            gradients={name: (f"g{n}{name}", 1.0 + n) for name in ("w", "b", "c", "d")},
            parameters={"w": f"p{n}", "b": f"q{n}"},
            buffers={"mean": f"m{n}"},
            optimizer={"0|w|momentum_buffer": f"o{n}"},
            settings={"lr": "0.1"},
        )
        for n in range(steps)
    ]
    return made


def changed(change, at=1, **settings):
    other = copy.deepcopy(trace(**settings))
    for step in other.steps[at:]:
        change(step)
    return other


def scaled(factor, names=("w", "b", "c", "d")):
    def change(step):
        for name in names:
            digest, norm = step.gradients[name]
            step.gradients[name] = digest + "!", norm * factor

    return change


def put(field, key, value):
    return lambda step: getattr(step, field).__setitem__(key, value)


def level_b(difference, sensitivity=None, factor=1.0 + 1e-7):
    other = changed(scaled(factor))
    other.level, other.memory = "B", [2**20]
    return compare(trace(), other, difference, sensitivity=sensitivity)
