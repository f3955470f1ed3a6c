"""Variables of the user's loop: which of them it reads again, and what becomes of them over a resume."""

import copy
import ctypes
import functools
import json
import random
import re
import sys
import textwrap
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from types import ModuleType

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from lockstep.core.generators import encoded_state
from lockstep.core.values import parts_of
from lockstep.errors import ConfigError
from lockstep.run import frame_variables
from lockstep.run.changed_names import changed_by_reading
from lockstep.run.frame_variables import Variables
from lockstep.run.live_variables import live_in, live_in_next_pass
from lockstep.run.loop_state import LoopState
from lockstep.run.lost_variables import LoopNotes

STEPS = 3


def live_here(level=1):
    return live_in([sys._getframe(level)])[0]


def next_pass_here(level=1):
    frame = sys._getframe(level)
    return live_in_next_pass(frame.f_code, frame.f_lasti)


def test_notes_are_the_same_after_json() -> None:
    notes = LoopNotes(saved={"n": "1"}, read={"b", "a"}, generators={"rng": ["numpy", 1]}, walks=2)
    assert LoopNotes.from_json(json.loads(json.dumps(notes.as_json()))) == notes
    assert LoopNotes.from_json({}) == LoopNotes()
    assert LoopNotes.from_json({"taken": ["lr"], "walks": 1}) == LoopNotes(walks=1)  # of an earlier version


def test_a_counter_is_live_and_what_is_set_anew_is_not():
    total, step = 0.0, 0
    for _ in range(2):
        total = 0.0
        for number in range(2):
            step += 1
            total += number
            inner = live_here()
        printed = total / step
        outer = live_here()
    assert {"step", "total"} <= inner
    assert "step" in outer
    assert not {"total", "number"} & outer
    assert printed


def test_a_value_that_every_pass_computes_from_its_number_is_not_live():
    rate = 0.1
    for number in range(2):
        rate = 0.1 / (number + 1)
        assert rate * 2
        found = live_here()
    assert "rate" not in found


def test_the_variable_of_a_comprehension_is_its_own():
    kept = "c"
    for _ in range(2):
        found = live_here()
        lengths = [len(kept) for kept in "ab"]
        table = {(other, step): [step * 2 for step in "c"] for other in lengths for step in "d"}
    for _ in range(2):
        later = live_here()
        lengths = [len(kept) for kept in "ab"]
    assert not {"step", "other"} & found
    assert "kept" in found & later
    assert (kept, lengths, table) == ("c", [1, 1], {(1, "d"): ["cc"]})


@pytest.mark.parametrize(
    "reads",
    [
        "[rate * factor for rate in (1, 2)]",
        "sum(rate * factor for rate in (1, 2))",
        "list(map(lambda rate: rate * factor, (1, 2)))",
        "sorted((1, 2), key=lambda rate: max(rate * factor for _ in (1, 2)))",
    ],
)
def test_what_a_script_reads_within_an_expression_is_live(reads):
    lines = (
        "factor = 1",
        "for number in range(2):",
        "    found = here()",
        f"    {reads}",
        "    factor = number",
    )
    space = {"here": lambda: live_here(2)}
    exec(compile("\n".join(lines), "script.py", "exec"), space)
    assert "factor" in space["found"]
    assert "rate" not in space["found"]


def test_what_one_branch_keeps_is_live():
    last = None
    for number in range(3):
        if number % 2:
            last = number
        found = live_here()
    assert last == 1
    assert "last" in found


LOOPS = {
    "for": "for epoch in range(2):",
    "while": "while rate > 0.1 and bound:",
    "while True": "while True:",
    "lines": "while (\n        rate > 0.1\n        and bound\n    ):",
    "name": "while (fresh := rate - 0.1) > 0:",
}


@pytest.mark.parametrize("leaves", ["return found", "break", "raise ValueError", "continue", "pass"])
@pytest.mark.parametrize("loop", LOOPS)
def test_what_the_next_pass_reads_is_known_where_a_loop_is_left(loop, leaves):
    """As by ``run.save(); return``: a resumed run makes that pass, and the value was not in the checkpoint."""
    lines = (
        "def script():",
        "    rate, other, mean, late, bound = 1, 2, 3, 4, 5",
        "    for rest in range(2):",
        "        rest += late",
        f"    {LOOPS[loop]}",
        "        if len(begun) > 3:",
        "            raise ValueError",
        "        fresh, other = 0.5 * rate, 0",
        "        try:",
        "            for number in (range(2), begun.append(here()))[0]:",
        "                other = number + fresh",
        "        finally:",
        "            mean = other",
        "        rate = fresh",
        "        if rate < 0.2:",
        f"            {leaves}",
        "        print(mean)",
        "    while late:",
        "        late -= 1",
        "    print(other)",
        "script()",
    )
    space = {"here": lambda: next_pass_here(2), "begun": [], "found": [], "print": str}
    with suppress(ValueError):
        exec(compile("\n".join(lines), "script.py", "exec"), space)
    after = ["late"] if loop != "while True" or leaves == "break" else []
    names = {"rate", "other", "mean", "late", "fresh", "bound"}
    assert space["begun"][0] & names == {"rate", *after, *["bound"] * (loop in ("while", "lines"))}


def test_what_an_inner_function_sets_is_live():
    count = 0

    def counted():
        nonlocal count
        count += 1

    for _ in range(2):
        counted()
        found = live_here()
    assert "count" in found


def test_what_an_inner_function_reads_is_read_where_its_name_is():
    beta = weight = 0.0

    def loss():
        return beta + weight

    for number in range(2):
        found = live_here()
        weight = number
        assert loss() == beta + number
        beta += 1
    assert "beta" in found
    assert "weight" not in found


@pytest.mark.parametrize(
    "given",
    [
        "give(lambda: scale)",
        "hooks['of the step'] = lambda: scale",
        "def hook():\n        return scale\n    give(hook)",
        "def inner():\n        return scale\n    def hook():\n        return inner()\n    give(hook)",
        "class Rate:\n        def __call__(self):\n            return scale\n    rate = Rate()",
    ],
)
def test_what_a_function_reads_that_was_given_away_is_live(given):
    """Such as a hook of an optimizer, or the function of a schedule: the loop itself never names it again."""
    before = f"give, hooks = list, {{}}\n    {given.replace('give(', 'hooks.setdefault(1, ')}"
    assert "scale" in live_in_loop(before, "scale = number")


@pytest.mark.parametrize(
    ("before", "within"),
    [
        ("def log():\n        return scale", "scale = number; log()"),
        ("def log():\n        return scale\n    log()", "scale = number"),
        ("total = sum(scale * each for each in range(3))", "scale = number"),
        ("def loss():\n        scale = 2\n        return sum(scale for _ in range(3))", "scale = number; loss()"),
        ("def loss():\n        return scale", "scale = number; list(map(loss, ()))"),
        (
            "def loss():\n        return scale\n    def both():\n        return loss()",
            "scale = number; both()",
        ),
    ],
)
def test_what_a_function_reads_that_the_loop_calls_or_hands_on_itself_is_read_there(before, within):
    assert "scale" not in live_in_loop(before, within)


def live_in_loop(before, within):
    """The variables that are live in the loop of a function that sets ``scale`` to 1 first."""
    text = (
        f"def script():\n    scale = 1\n    {before}\n    for number in range(2):\n        found.append(here())\n"
        f"        {within}\nscript()\n"
    )
    space = {"here": lambda: live_here(2), "found": []}
    exec(compile(text, "script.py", "exec"), space)
    return space["found"][-1]


class Cache:
    """A data set that keeps what it has read."""

    def __getitem__(self, index):
        if index not in self.read:
            self.keep(index)
        return self.labels[self.order[index]]

    def keep(self, index):
        self.read.add(index)
        self.samples[self.order[index]] = self.count = index


def test_what_a_data_set_changes_itself_is_known_by_its_code():
    assert {"read", "samples", "count"} <= changed_by_reading(Cache)
    assert not {"labels", "order"} & changed_by_reading(Cache)


def test_the_variables_of_a_script_are_looked_at_too():
    text = "step = 0\nrate = 1\nfor number in range(2):\n    step += 1\n    rate = number\n    found = live(1)\n"
    space = {"live": live_here, "__name__": "script"}
    exec(compile(text, "script.py", "exec"), space)
    assert "step" in space["found"]
    assert not {"rate", "number"} & space["found"]


def test_the_entries_of_a_dict_of_a_script_that_only_functions_read_are_noted():
    text = (
        "count = {'n': 0}\ndef hook():\n    count['n'] += 1\ndef main():\n    hooks = [hook]\n"
        "    state.begin_epoch()\n    state.begin_steps()\n    for number in range(2):\n        hooks[0]()\n"
        "        assert_noted(state.capture(), number)\nmain()\n"
    )

    def assert_noted(stored, number):
        assert stored["saved"]["count['n']"] == str(number + 1)

    space = {"state": LoopState({}, is_main=True), "assert_noted": assert_noted}
    exec(compile(text, "script.py", "exec"), {**space, "__name__": "script"})


class Task:
    def __init__(self):
        self.count, self.rng, self.model = 0, np.random.default_rng(0), nn.Linear(2, 2)


def a_loop(state, epochs, *, stop=None, first=0, task=None):
    """Walks through epochs as a run does; returns what a checkpoint at step ``stop`` holds, and a history."""
    step, history, task = first, [], task or Task()
    stored = kept = None
    for epoch in range(first // STEPS, epochs):
        state.begin_epoch()
        total = 0.0
        state.begin_steps()
        for _ in range(first % STEPS if epoch == first // STEPS else 0, STEPS):
            step += 1
            total += step
            task.count += 1
            history.append(task.rng.random())
            if step == stop:
                stored, kept = state.capture(), list(history)
        history.append(total)
        if stop is None:
            stored = state.capture()
    return stored, history if kept is None else kept


def resumed(stored, *, inside, known=()):
    state = LoopState(dict.fromkeys(known, "held"), is_main=True)
    state.resume(stored, inside=inside)
    return state


def test_generators_go_on_where_they_stood(caplog):
    whole = a_loop(LoopState({}, is_main=True), 3)[1]
    for stop in range(1, 9):
        stored, before = a_loop(LoopState({}, is_main=True), 3, stop=stop)
        after = a_loop(resumed(stored, inside=True), 3, first=stop)[1]
        drawn = [each for each in [*before, *after] if each < 1]
        assert drawn == [each for each in whole if each < 1]


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.Generator().manual_seed(3),
        lambda: np.random.default_rng(3),
        lambda: np.random.Generator(np.random.MT19937(3)),
        lambda: np.random.RandomState(3),
        lambda: random.Random(3),
    ],
)
def test_every_kind_of_generator_is_given_back(make):
    import json

    def draw(own):
        return torch.rand(2, generator=own).tolist() if isinstance(own, torch.Generator) else own.random()

    own = {"rng": [make()]}
    state = LoopState({}, is_main=True)
    state.begin_epoch()
    state.begin_steps()
    draw(own["rng"][0])
    stored = json.loads(json.dumps(state.capture()))
    expected = draw(own["rng"][0])
    own["rng"][0] = make()
    again = resumed(stored, inside=True)
    again.begin_epoch()
    again.begin_steps()
    assert draw(own["rng"][0]) == expected


class Numbers:
    """A loop without ``run.epochs``, whose generator goes on, or begins anew in each epoch."""

    def __init__(self, *, anew):
        self.anew, self.drawn = anew, []
        self.rng = np.random.default_rng(0)

    def walk(self, state, epochs):
        for _ in epochs:
            if self.anew:
                self.rng = np.random.default_rng(0)
            state.begin_steps()
            self.drawn += [self.rng.random() for _ in range(STEPS)]
            stored = state.capture()
        return stored


def drawn_in(epochs, *, anew, stored=None):
    numbers = Numbers(anew=anew)
    state = LoopState({}, is_main=True) if stored is None else resumed(stored, inside=False)
    return numbers.walk(state, epochs), numbers.drawn


@pytest.mark.parametrize("anew", [True, False])
def test_without_epochs_a_generator_goes_on_where_the_epochs_before_tell_that_it_does(anew):
    _, whole = drawn_in(range(4), anew=anew)
    stored, first = drawn_in(range(2), anew=anew)
    _, second = drawn_in(range(2, 4), anew=anew, stored=stored)
    assert first + second == whole


def test_without_epochs_a_resume_after_the_first_one_is_refused_unless_the_script_gives_the_state_back():
    stored = Numbers(anew=False).walk(LoopState({}, is_main=True), range(1))
    with pytest.raises(ConfigError, match=r"self.rng of the loop has drawn numbers.*Loop over run.epochs"):
        Numbers(anew=False).walk(resumed(stored, inside=False), range(1, 2))
    again = Numbers(anew=False)
    again.rng.random(STEPS)
    again.walk(resumed(stored, inside=False), range(1, 2))


def lazily(state, epochs, stop):
    if stop is None:
        lazily.rng = None
    for _ in range(epochs):
        state.begin_epoch()
        state.begin_steps()
        for _ in range(STEPS):
            lazily.rng = lazily.rng or np.random.default_rng(0)
            lazily.rng.random()
        stored = state.capture()
    return stored


def test_a_generator_that_is_made_in_a_step_cannot_go_on_and_is_refused():
    stored = lazily(LoopState({}, is_main=True), 2, None)
    with pytest.raises(ConfigError, match=r"draws random numbers from lazily.rng, which does not exist yet"):
        lazily(resumed(stored, inside=True), 1, None)


def test_a_generator_that_is_set_as_an_attribute_in_a_step_is_named(caplog):
    def walk(state):
        state.begin_epoch()
        state.begin_steps()
        for _ in range(STEPS):
            walk.rng = getattr(walk, "rng", None) or np.random.default_rng(0)
            walk.rng.random()
        return state.capture()

    stored = walk(LoopState({}, is_main=True))
    del walk.rng
    walk(resumed(stored, inside=True))
    (record,) = caplog.records
    assert "walk.rng had drawn random numbers" in record.getMessage()


def test_a_generator_that_each_step_makes_anew_is_not_named(caplog):
    def walk(state):
        state.begin_epoch()
        state.begin_steps()
        for step in range(STEPS):
            rng = np.random.default_rng(step)
            rng.random()
            stored = state.capture()
        return stored

    walk(resumed(walk(LoopState({}, is_main=True)), inside=True))
    assert caplog.records == []


def test_a_generator_is_stored_by_a_save_in_another_thread():
    rng, state = np.random.default_rng(0), LoopState({}, is_main=True)
    state.begin_steps()
    rng.random()
    with ThreadPoolExecutor(1) as pool:
        stored = pool.submit(state.capture).result()
    assert encoded_state(rng) in stored["generators"].values()


def test_a_sum_that_a_stop_within_an_epoch_has_lost_is_named(caplog):
    stored, _ = a_loop(LoopState({}, is_main=True), 3, stop=4)
    a_loop(resumed(stored, inside=True), 3, first=4)
    (record,) = caplog.records
    assert "a_loop: total (0.0, was 4.0)" in record.getMessage()
    assert "a_loop: task.count (0, was 4)" in record.getMessage()
    assert "run.extra" in record.getMessage()


def summed(state, epoch, done, stop):
    """Sums up in each of two epochs from where a run stands; returns what a checkpoint at ``stop`` holds."""
    stored = None
    for number in range(epoch, 2):
        state.begin_epoch()
        total = 0.0
        state.begin_steps()
        for step in range(done if number == epoch else 0, STEPS):
            if (number, step) == stop:
                stored = state.capture()
            total += step + 1
        print(total)
    return stored


def test_what_a_stop_has_lost_is_named_again_after_another_stop_at_the_same_place(caplog):
    """The second checkpoint noted the value that the first stop had left, and the run after it said nothing."""
    first = summed(LoopState({}, is_main=True), 0, 0, (0, 2))
    second = summed(resumed(first, inside=True), 0, 2, (0, 2))
    caplog.clear()
    summed(resumed(second, inside=True), 0, 2, None)
    assert "summed: total (0.0, was 3.0)" in caplog.text


def test_what_a_stop_has_lost_and_the_next_epoch_sets_is_not_named_again(caplog):
    first = summed(LoopState({}, is_main=True), 0, 0, (0, 2))
    second = summed(resumed(first, inside=True), 0, 2, (1, 0))
    caplog.clear()
    summed(resumed(second, inside=True), 1, 0, None)
    assert "summed: total" not in caplog.text


def said_of_a_resumed(script, caplog):
    """The warning of a script's second run, which goes on where the first was stopped, after its second step."""
    stored = None
    for state in (LoopState({}, is_main=True), None):
        own = {"__name__": "script"}
        exec(compile(script, "script.py", "exec"), own)
        stored = own["train"](state or resumed(stored, inside=True), 0 if state else 2, 1 if state else None)
    (said,) = (each.getMessage() for each in caplog.records)
    return said


A_LAZY_SCRIPT = """
class Meter:
    def add(self, loss):
        if not hasattr(self, "total"):
            self.total, self.sums, self.table = 0.0, {}, [1.0]
        self.total += loss
        self.sums["loss"] = self.total
        self.shown = {"shown": loss}
        return self.table

def mean(loss):
    mean.all = [*getattr(mean, "all", []), loss]

def count():
    global calls
    try:
        calls += 1
    except NameError:
        calls = 1

def train(state, first, stop, stored=None):
    meter = Meter()
    for batch in (range(first, 3), state.begin_steps(any_left=True), first)[0]:
        meter.add(batch / 2)
        mean(batch)
        count()
        if batch == stop:
            stored = state.capture(inside=True)
        state.note_made()
    state.end_steps()
    return stored
"""


def test_what_the_first_step_makes_and_later_ones_go_on_with_is_named(caplog):
    """It was lost without a word, as it was not there when the steps of the run began."""
    said = said_of_a_resumed(A_LAZY_SCRIPT, caplog)
    for name in ("calls", "own['mean'].all", "train: meter.total"):
        assert f"{name} (nothing, was " in said
    assert "table" not in said, "a cache"
    assert "shown" not in said, "each step sets it before it reads it"


A_SHARED_BEGINNING = """
class Meter:
    best = None

    def add(self, loss):
        self.best = loss if self.best is None else max(self.best, loss)

def train(state, first, stop, stored=None):
    meter, shown, losses = Meter(), (), ()
    for batch in (range(first, 3), state.begin_steps(any_left=True), first)[0]:
        meter.add(batch / 2)
        losses += (batch,)
        globals()["rate"] = globals().get("rate", 1.0) / (2 + len(shown))
        if batch == stop:
            stored = state.capture(inside=True)
        state.note_made()
        float(rate)
    state.end_steps()
    return stored
"""


def test_what_begins_as_an_object_that_others_share_is_named(caplog):
    """A value of the class, ``()``, and a global by ``globals()``: they were lost without a word."""
    said = said_of_a_resumed(A_SHARED_BEGINNING, caplog)
    assert "train: meter.best (None, was 0.5)" in said
    assert "train: losses (0 entries, was 2 entries)" in said
    assert "rate (nothing, was 0.25)" in said
    assert "shown" not in said


AN_OBJECT_THAT_SEES_ALL = """
from tqdm import tqdm

def train(state, first, stop, stored=None):
    shell = tqdm(disable=True)
    rate = 1.0
    losses = shell.held = []
    for batch in (range(first, 3), state.begin_steps(any_left=True), first)[0]:
        losses.append(len(losses) + batch / 2)
        if batch == stop:
            stored = state.capture(inside=True)
        state.note_made()
    state.end_steps()
    return stored
"""


def test_a_list_that_an_object_of_a_package_holds_too_is_named(caplog):
    """In a notebook, all variables can be reached from IPython's, which come first."""
    assert "train: losses (0 entries, was 2 entries)" in said_of_a_resumed(AN_OBJECT_THAT_SEES_ALL, caplog)


A_SCRIPT = """
loss = float("nan")
for epoch in range(2):
    for batch in (range(first, 3), state.begin_steps(any_left=any_left), first)[0]:
        loss = batch / 2
        if batch == stop:
            stored = stored or state.capture()
    state.end_steps()
    say(loss)
"""


@pytest.mark.parametrize("any_left", [True, False])
def test_a_loss_that_is_set_before_the_loop_as_recommended_is_not_named_where_a_step_sets_it(caplog, any_left):
    """``loss = float("nan")`` was named in every run that was resumed within an epoch."""
    space = {"any_left": any_left, "say": lambda loss: None, "stored": None, "__name__": "script"}
    first = {**space, "state": LoopState({}, is_main=True), "first": 0, "stop": 1}
    exec(compile(A_SCRIPT, "script.py", "exec"), first)
    state = resumed(first["stored"], inside=True)
    exec(compile(A_SCRIPT, "script.py", "exec"), {**space, "state": state, "first": 2, "stop": None})
    assert ["loss (nan, was 0.5)" in each.getMessage() for each in caplog.records] == [True] * (not any_left)


A_MEAN = """
def train(state, epochs, mean=10.0, stored=None):
    for epoch in epochs:
        state.begin_epoch()
        fresh = epoch
        fresh = fresh + 1
        mean = 0.9 * mean + epoch
        for _ in (range(2), state.begin_steps(any_left=True))[0]:
            pass
        state.end_steps()
        if epoch == 1:
            stored = state.capture()
    return stored, mean, fresh
"""


@pytest.mark.parametrize("in_function", [True, False])
@pytest.mark.parametrize("is_given_back", [True, False])
def test_a_mean_that_the_start_of_each_epoch_moves_is_named(caplog, in_function, is_given_back):
    """The mean of the rewards in REINFORCE began anew in a run that was resumed between two epochs, without a word."""
    text = A_MEAN if in_function else textwrap.dedent(A_MEAN.partition(":")[2].rpartition("return")[0])

    def train(state, epochs, mean):
        space = {"state": state, "epochs": epochs, "mean": mean, "stored": None, "__name__": "script"}
        exec(compile(text, "script.py", "exec"), space)
        return space["train"](state, epochs, mean) if in_function else (space["stored"], space["mean"])

    stored, mean, *_ = train(LoopState({}, is_main=True), range(2), 10.0)
    train(resumed(stored, inside=False), range(2, 4), mean if is_given_back else 10.0)
    said = "".join(each.getMessage() for each in caplog.records)
    assert (re.search(r"[ :]mean \(11\.0, was 9\.1\)", said) is None) is is_given_back
    assert "fresh" not in said


A_START = """
class Loss:
    factor = 1.0

loss, levels, rates = Loss(), iter([0.1, 0.05, 0.01]), [3, 2, 1]

def train(state, epochs, stored=None):
    for epoch in epochs:
        state.begin_epoch()
        loss.factor *= 0.5
        level = next(levels), rates.pop()
        for _ in (range(2), state.begin_steps(any_left=True))[0]:
            loss.seen = level
        state.end_steps()
        stored = stored or state.capture()
    return stored
"""


def test_what_the_start_of_the_first_epoch_has_changed_is_named_after_it(caplog):
    """Beside what the first steps began with it had not changed, and was lost without a word."""
    stored = None
    for state, epochs in ((LoopState({}, is_main=True), range(1)), (None, range(1, 2))):
        space = {"__name__": "script"}
        exec(compile(A_START, "script.py", "exec"), space)
        stored = space["train"](state or resumed(stored, inside=False), epochs)
    (said,) = (each.getMessage() for each in caplog.records)
    for name in ("['loss'].factor", "['levels']", "['rates']"):
        assert f"{name} (other values)" in said


LEFT = """
def train(state, epoch, stop, held, mark=1.0, loss=float("nan")):
    best = 9.0
    {loop}
        {begin}
        rate = 2 * mark
        for _ in (range(2), state.begin_steps(any_left=True))[0]:
            loss = rate
        state.end_steps()
        best = min(best, loss)
        mark = 0.5 ** epoch
        epoch += 1
        if epoch == stop:
            held.append(state.capture())
            {leaves}
    return loss
"""


@pytest.mark.parametrize("leaves", ["return", "break", "pass"])
@pytest.mark.parametrize("is_given_back", [True, False])
@pytest.mark.parametrize(
    ("loop", "begin"),
    [
        ("while epoch < 4:", ""),
        ("for epoch in range(epoch, 4):", ""),
        ("for epoch in range(epoch, 4):", "state.begin_epoch()"),
    ],
)
def test_what_the_end_of_an_epoch_sets_for_the_next_is_named(caplog, loop, begin, is_given_back, leaves):
    """It is read before the steps begin and set anew after them: a resumed run ended in other bits without a word."""
    space, held = {"__name__": "script"}, []
    text = LEFT.format(loop=loop, begin=begin, leaves=leaves)
    exec(compile(text, "script.py", "exec"), space)
    space["train"](LoopState({}, is_main=True), 0, 2, held)
    space["train"](resumed(*held, inside=False), 2, None, held, *[0.5] * is_given_back)
    said = "".join(each.getMessage() for each in caplog.records)
    assert ("train: mark (1.0, was 0.5)" in said) is not is_given_back
    assert "loss" not in said


class Box:
    """Holds what the loop keeps."""

    def __init__(self, mark):
        self.mark = mark


@pytest.mark.parametrize("leaves", ["return", "pass"])
@pytest.mark.parametrize("is_given_back", [True, False])
def test_what_the_end_of_an_epoch_sets_in_an_object_for_the_next_is_named(caplog, is_given_back, leaves):
    space, held = {"__name__": "script"}, []
    text = LEFT.format(loop="while epoch < 4:", begin="", leaves=leaves).replace("mark=1.0", "box=None")
    exec(compile(text.replace(" mark", " box.mark"), "script.py", "exec"), space)
    space["train"](LoopState({}, is_main=True), 0, 3, held, Box(1.0))
    space["train"](resumed(*held, inside=False), 3, None, held, Box(0.25 if is_given_back else 1.0))
    said = "".join(each.getMessage() for each in caplog.records)
    assert ("train: box.mark (1.0, was 0.25)" in said) is not is_given_back


TWO_LOOPS = """
def train(state, epoch, stop, held):
    rate, level = 1.0, 1.0
    while epoch < 2:
        level *= 0.5
        for _ in (range(2), state.begin_steps(any_left=True))[0]:
            print(level)
        state.end_steps()
        epoch += 1
    while epoch < 4:
        rate *= 0.5
        for _ in (range(2), state.begin_steps(any_left=True))[0]:
            print(rate)
            if epoch == stop:
                held.append(state.capture(inside=True))
                return
        state.end_steps()
        epoch += 1
"""


def test_what_a_second_loop_keeps_is_named(caplog):
    """It was compared with what it was when the first loop began."""
    space, held = {"__name__": "script", "print": str}, []
    exec(compile(TWO_LOOPS, "script.py", "exec"), space)
    space["train"](LoopState({}, is_main=True), 0, 3, held)
    space["train"](resumed(*held, inside=True), 3, None, held)
    (said,) = (each.getMessage() for each in caplog.records)
    assert "train: rate (0.5, was 0.25)" in said
    assert "level" not in said


ONCE = """
def train(state, first, stop, held):
    for epoch in range(first, 4):
        if not epoch:
            before = BEFORE
            state.begin_epoch()
        for number in (range(2), state.begin_steps(any_left=True))[0]:
            loss = number
            if epoch == stop:
                held.append(state.capture(inside=True))
                return
        print((before, loss))
        before = loss if before == 1.0 else before
"""


@pytest.mark.parametrize("before", ["1.0", "nn.ReLU().register_forward_hook(str)"])
def test_a_variable_that_only_the_first_epoch_sets_is_named(caplog, before):
    """The resumed run ended in a NameError, without a word before it."""
    space, held = {"__name__": "script", "print": str, "nn": nn}, []
    exec(compile(ONCE.replace("BEFORE", before), "script.py", "exec"), space)
    space["train"](LoopState({}, is_main=True), 0, 2, held)
    with pytest.raises(UnboundLocalError):
        space["train"](resumed(*held, inside=True), 2, None, held)
    (said,) = (each.getMessage() for each in caplog.records)
    assert "may read variables that are not there in this resumed run: before. That" in said


def test_what_the_body_sets_and_is_not_there_after_a_loop_without_steps_is_named(caplog):
    """A run that stopped after the last step of an epoch ended in a NameError when it went on."""

    def trains(state, steps):
        stored = {}
        for step in (range(steps), state.begin_steps(any_left=steps > 0))[0]:
            loss = step
            stored = state.capture(inside=True)
        with suppress(NameError):
            assert loss is not None
        return stored

    stored = trains(LoopState({}, is_main=True), 2)
    for steps in (1, 0):
        trains(resumed(stored, inside=True), steps)
        assert caplog.text.count("not there in this resumed run: loss. That") == (not steps)


def test_what_only_a_hook_reads_and_each_step_sets_first_is_not_named(caplog):
    """The strength of a gradient reversal, which a layer asks for: it was named, with a NameError that never came."""

    def trains(state, first, held):
        layer = nn.ReLU()
        layer.register_forward_hook(lambda *_: strength)
        state.begin_epoch()
        for step in (range(first, 3), state.begin_steps(any_left=True))[0]:
            strength = 1 / (1 + step)
            held.append((layer(torch.ones(1)), state.capture(inside=True)))

    held = []
    trains(LoopState({}, is_main=True), 0, held)
    trains(resumed(held[0][1], inside=True), 1, held)
    assert [each.getMessage() for each in caplog.records] == []


class Decay:
    """A schedule of the script's own, which begins with the learning rate that an optimizer has."""

    def __init__(self, optimizer):
        self.base = [group["lr"] for group in optimizer.param_groups]


@pytest.mark.parametrize("inside", [True, False])
def test_numbers_that_a_resumed_script_takes_from_the_run_before_its_loop_are_named(caplog, inside):
    """A learning rate after ``run.prepare`` was that of the stop, and the schedule went on from there, silently."""

    def loop(state, rate, loss, stored, first=0):
        optimizer.param_groups[0]["lr"] = rate
        decay, best, alpha = Decay(optimizer), {"loss": loss}, 0.1
        state.note_results(best)
        for epoch in range(first, 2):
            state.begin_epoch()
            shown = optimizer.param_groups[0]["lr"]
            state.begin_steps()
            for step in range(STEPS):
                optimizer.param_groups[0]["lr"] = decay.base[0] * alpha**step
                if inside and epoch == first and step == 1:
                    stored.update(state.capture())
            assert shown
            assert best
            if not inside and epoch == first:
                stored.update(state.capture())

    def begun():
        return LoopState({}, is_main=True, settings=lambda: {optimizer.param_groups[0]["lr"]})

    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    stored = {}
    loop(begun(), 0.1, 2.5, stored)
    state = begun()
    state.resume(stored, inside=inside)
    loop(state, 0.001, 1.5, {}, first=0 if inside else 1)
    (record,) = caplog.records
    said = record.getMessage()
    assert "decay.base[0] (0.001, was 0.1)" in said
    assert "best['loss'] (1.5, was 2.5)" in said
    assert "alpha" not in said
    assert ("shown" in said) == inside


def forever(loader):
    while True:
        yield from loader


@pytest.mark.parametrize(
    ("begin", "said"),
    [
        (iter, "pairs (after 0 batches, was after 2 batches)"),
        (forever, "pairs (an iterator at its beginning, was an iterator)"),
    ],
)
def test_an_iterator_that_the_loop_goes_on_to_read_is_named(caplog, begin, said):
    """Such as a second data set's; the steps after the stop were given what it begins with, in silence."""

    def loop(state, first=0, stop=None):
        pairs = begin(DataLoader(list(range(8))))
        state.begin_epoch()
        state.begin_steps()
        for step in range(first, STEPS):
            next(pairs)
            if step + 1 == stop:
                stored.update(state.capture())

    stored = {}
    loop(LoopState({}, is_main=True), stop=2)
    loop(resumed(stored, inside=True), first=2)
    (record,) = caplog.records
    assert said in record.getMessage()


def test_after_an_epoch_only_what_is_carried_over_is_named(caplog):
    stored, _ = a_loop(LoopState({}, is_main=True), 2)
    a_loop(resumed(stored, inside=False), 3, first=6)
    (record,) = caplog.records
    assert "task.count" in record.getMessage()
    assert "total" not in record.getMessage()


class Followed:
    """A loop with a copy of the model that follows it, and one that is set anew in each epoch."""

    def __init__(self, value):
        self.model = nn.Linear(1, 1, bias=False)
        self.set(self.model, value)
        self.average, self.target = copy.deepcopy(self.model), copy.deepcopy(self.model)

    @staticmethod
    def set(module, value):
        with torch.no_grad():
            module.weight.fill_(value)

    def walk(self, state, epochs):
        for epoch in epochs:
            state.begin_epoch()
            self.target.load_state_dict(self.model.state_dict())
            state.begin_steps()
            for step in range(STEPS):
                self.set(self.model, 10 * epoch + step)
                self.average.weight.data.lerp_(self.model.weight.data, 0.1)
                self.target.weight.data.add_(1)
            stored = state.capture()
        return stored


def test_a_copy_that_follows_the_model_is_named_though_it_begins_with_other_values(caplog):
    stored = Followed(0.0).walk(LoopState({}, is_main=True), range(2))
    Followed(5.0).walk(resumed(stored, inside=False), range(2, 3))
    (record,) = caplog.records
    assert "self.average (other values)" in record.getMessage()
    assert "self.target" not in record.getMessage()


class Damped:
    """A warm-up as installed packages have it."""

    __module__ = "pip.of_another_package"

    def __init__(self):
        self.last_step = 0

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state):
        vars(self).update(state)


class Falling:
    """A schedule of an installed package that has no ``state_dict``, as those of speechbrain."""

    __module__ = "pip.of_another_package"

    def __init__(self):
        self.calls = 0

    def __call__(self, optimizer):
        self.calls += 1
        for group in optimizer.param_groups:
            group["lr"] = 1 / self.calls


class Annealing:
    """A schedule of an installed package that returns the learning rate."""

    __module__ = "pip.of_another_package"

    def __init__(self):
        self.rate = 1.0

    def __call__(self):
        self.rate /= 2
        return self.rate

    def save(self, path):
        raise AssertionError

    load = save


class Averaging:
    """A meter of an installed package, as that of timm."""

    __module__ = "pip.of_another_package"

    def __init__(self):
        self.reset()

    def reset(self):
        self.count = 0

    def update(self, value):
        self.count += value


class Bar(Averaging):
    """A progress bar of an installed package: what it shows is of no account."""

    __module__ = "pip.of_another_package"

    def close(self):
        raise AssertionError


class Holding(nn.Module):
    """An average that holds the model, too."""

    def __init__(self, model):
        super().__init__()
        self.online_model, self.ema_model = model, copy.deepcopy(model)


def beside(state, model, stop=None):
    average, warmup, schedule, annealing = Holding(model), Damped(), Falling(), Annealing()
    meter, bar = Averaging(), Bar()
    stored = None
    optimizer = torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=1.0)
    state.begin_epoch()
    state.begin_steps()
    for step in range(STEPS):
        average.ema_model.weight.data.add_(1)
        warmup.last_step += 1
        schedule(optimizer)
        annealing()
        meter.update(1)
        bar.update(1)
        stored = state.capture() if step == stop else stored
    return stored


def test_averages_warmups_and_meters_of_installed_packages_that_prepare_was_not_given_are_named(caplog):
    model = nn.Linear(1, 1, bias=False)
    known = dict.fromkeys(map(id, (model, model.weight)), "held")
    stored = beside(LoopState(known, is_main=True), model, 1)
    beside(resumed(stored, inside=True, known=known), model)
    (record,) = caplog.records
    assert "beside: average (other values)" in record.getMessage()
    assert "beside: warmup.last_step (0, was 2)" in record.getMessage()
    assert "beside: schedule.calls (0, was 2)" in record.getMessage()
    assert "beside: annealing.rate (1.0, was 0.25)" in record.getMessage()
    assert "beside: meter.count (0, was 2)" in record.getMessage()
    assert "bar." not in record.getMessage()


def timed(state, rate, stop=None):
    began, tick, end, stored = time.time(), time.perf_counter(), time.time() + 3600, None
    state.begin_epoch()
    state.begin_steps()
    for step in range(STEPS):
        assert rate < end - began and tick
        stored = state.capture() if step == stop else stored
    return stored


def test_a_float_that_a_resumed_run_makes_with_another_value_is_named_unless_it_is_a_time(caplog):
    """One that the script computes from the model, such as the loss at the beginning, is another one there."""
    stored = timed(LoopState({}, is_main=True), 0.5, 1)
    timed(resumed(stored, inside=True), 0.25)
    (record,) = caplog.records
    assert "at the checkpoint: timed: rate (0.25, was 0.5). What" in record.getMessage()


@pytest.mark.parametrize(("before", "now"), [(25, 32), (25, 25), (0, 4), (0, 7)])
def test_a_whole_number_that_a_resumed_run_computes_anew_after_prepare_is_named(before, now, caplog):
    """Such as the number of weights above a bound. One that says where the run stands differs by itself."""

    def loop(state, value, stop=None):
        count, stored = value, None
        state.begin_epoch()
        state.begin_steps()
        for step in range(STEPS):
            assert count + processes + step
            stored = state.capture() if step == stop else stored
        return stored

    processes = 1
    stored = loop(LoopState({}, is_main=True, settings=lambda: {0, 1}), before, 1)
    processes = 2
    state = LoopState({}, is_main=True, settings=lambda: {4, 1})
    state.resume(stored, inside=True)
    loop(state, now)
    said = [each.getMessage() for each in caplog.records]
    assert ["loop: count (" in each for each in said] == [True] * (now not in (before, 4))


class Average:
    """As of an installed package: its list has a tensor for each parameter."""

    __module__ = "filelock"

    def __init__(self, shadow):
        self.shadow = shadow


class FollowedByMany(Followed):
    def __init__(self, value, hold):
        super().__init__(value)
        self.average = hold([torch.full((1,), value) for _ in range(70)])

    def walk(self, state, epochs):
        for _ in epochs:
            state.begin_epoch()
            state.begin_steps()
            for step in range(STEPS):
                for each in getattr(self.average, "shadow", self.average):
                    each.lerp_(torch.full((1,), float(step)), 0.1)
            stored = state.capture()
        return stored


@pytest.mark.parametrize("hold", [list, Average])
def test_an_average_in_a_long_list_is_named(caplog, hold):
    """It began anew with the weights of the resumed run, and nothing said so."""
    stored = FollowedByMany(0.0, hold).walk(LoopState({}, is_main=True), range(2))
    FollowedByMany(5.0, hold).walk(resumed(stored, inside=False), range(2, 3))
    assert "self.average" in caplog.text


class Trainer:
    def __init__(self):
        self.step = 0

    def train(self, state, stop):
        stored = None
        for _ in range(2):
            state.begin_epoch()
            state.begin_steps()
            for _ in range(STEPS):
                self.step += 1
                stored = state.capture() if self.step == stop else stored
        return stored


def trained(state, stop=None):
    task = Trainer()
    return task.train(state, stop)


def test_attributes_of_an_object_that_only_an_inner_function_goes_on_to_read_are_named(caplog):
    stored = trained(LoopState({}, is_main=True), 4)
    trained(resumed(stored, inside=True))
    (record,) = caplog.records
    assert "trained: task.step (0, was 4)" in record.getMessage()


class Annealed(nn.Module):
    """A loss, whose ``beta`` a loop changes."""

    def __init__(self):
        super().__init__()
        self.beta, self.inner = 0.5, nn.CrossEntropyLoss(label_smoothing=0.25)


def annealing(state, stop=None):
    loss, stored = Annealed(), None
    for epoch in range(2):
        state.begin_epoch()
        state.begin_steps()
        for step in range(STEPS):
            loss.beta *= 2
            loss.inner.label_smoothing *= 0.5
            stored = state.capture() if epoch * STEPS + step == stop else stored
    return stored


def test_numbers_of_a_module_beside_the_model_are_named(caplog):
    stored = annealing(LoopState({}, is_main=True), 0)
    annealing(resumed(stored, inside=True))
    (record,) = caplog.records
    assert "annealing: loss.beta (0.5, was 1.0)" in record.getMessage()
    assert "annealing: loss.inner.label_smoothing (0.25, was 0.125)" in record.getMessage()


class Once:
    class Rate:
        value = 1.0


class Twice:
    class Rate:
        value = 1.0


def halving(state, changed, stop=None):
    both, stored = (Once.Rate, Twice.Rate), None
    both[changed].value = 1.0
    for epoch in range(2):
        state.begin_epoch()
        state.begin_steps()
        for step in range(STEPS):
            both[changed].value *= 0.5
            stored = state.capture() if epoch * STEPS + step == stop else stored
    return stored


@pytest.mark.parametrize("changed", [0, 1])
def test_of_two_classes_with_one_name_the_one_that_the_loop_has_changed_is_named(caplog, changed):
    """The text of the one stood in the place of the other's, and neither was named."""
    stored = halving(LoopState({}, is_main=True), changed, 4)
    halving(resumed(stored, inside=True), changed)
    (record,) = caplog.records
    assert "Rate.value (1.0, was 0.03125)" in record.getMessage()


ENGINE = """
STEPS = 1.0

def fit(state, stop=None):
    global STEPS
    for epoch in range(2):
        state.begin_epoch()
        state.begin_steps()
        for step in range(3):
            STEPS *= 0.5
            if epoch * 3 + step == stop:
                return state.capture()
"""


def engine():
    space = {"__name__": "engine"}
    exec(compile(ENGINE, "engine.py", "exec"), space)
    return space["fit"]


def test_a_global_of_another_module_with_the_name_of_one_of_the_script_is_named(caplog):
    assert STEPS == 3  # read here: that of this module stood in the place of the other's
    stored = engine()(LoopState({}, is_main=True), 4)
    engine()(resumed(stored, inside=True))
    (record,) = caplog.records
    assert "engine.STEPS (1.0, was 0.03125)" in record.getMessage()


WITHIN = """
def fit(state, change, stop=None):
    rate = {"value": 3.0}
    for epoch in range(2):
        state.begin_epoch()
        state.begin_steps()
        for step in range(3):
            change()
            if epoch * 3 + step == stop:
                return state.capture(), rate
"""
AROUND = """
def fit(inner, state, stop=None):
    rate = {"value": 1.0}
    def halve():
        rate["value"] *= 0.5
    return inner(state, halve, stop), rate
"""


def test_the_variables_of_two_functions_with_one_name_are_told_apart(caplog):
    """Those of the function that is called stood in the place of those of its caller."""
    inner, outer = {"__name__": "engine"}, {"__name__": "training"}
    exec(compile(WITHIN, "engine.py", "exec"), inner)
    exec(compile(AROUND, "training.py", "exec"), outer)
    (stored, _), _ = outer["fit"](inner["fit"], LoopState({}, is_main=True), 4)
    outer["fit"](inner["fit"], resumed(stored, inside=True))
    (record,) = caplog.records
    assert "training.fit: rate['value'] (1.0, was 0.03125)" in record.getMessage()


def test_what_the_script_gives_back_itself_is_not_named(caplog):
    stored, _ = a_loop(LoopState({}, is_main=True), 3, stop=4)
    task = Task()
    task.count = 4
    a_loop(resumed(stored, inside=True), 3, first=4, task=task)
    assert [each for each in caplog.records if "task.count" in each.getMessage()] == []


def test_what_checkpoints_hold_is_not_looked_at():
    model, beside = nn.Linear(2, 2), nn.Linear(2, 2)
    known = [id(each) for each in (model, model.weight, model.bias)]
    found = Variables.of_loop(dict.fromkeys(known, "held"))
    texts = {name.rpartition(" ")[2]: text for name, text in found.texts.items()}
    assert "beside" in texts
    assert texts["model"] == "held"
    assert not any("digest" in text for name, text in texts.items() if name.startswith("model"))
    before = found.texts
    with torch.no_grad():
        beside.weight.mul_(2)
    after = Variables.of_loop(dict.fromkeys(known, "held")).texts
    assert [name for name in before if before[name] != after[name]] == [
        f"{test_what_checkpoints_hold_is_not_looked_at.__qualname__}: beside"
    ]


def test_of_a_replay_buffer_few_entries_are_read(monkeypatch):
    """They were 256, each with all its tensors, several times in an epoch: of one step, in reinforcement learning."""
    read = []
    monkeypatch.setattr(frame_variables, "digest_tensor", lambda tensor: read.append(id(tensor)) or "0" * 16)
    buffer = [tuple(torch.full((4,), number + each / 8) for each in range(8)) for number in range(5000)]
    own = {id(each) for entry in buffer for each in entry}
    Variables.of_loop({})
    found = [each for each in read if each in own]
    assert 8 * 30 <= len(found) <= 8 * 33
    assert found[7] == id(buffer[0][7])


def test_values_of_every_kind_have_texts():
    class Slotted:
        __slots__ = ("value",)

    class Proxy:
        def __getattribute__(self, name):
            raise RuntimeError("asked")

    kept = {
        "tensor": torch.ones(3),
        "array": np.ones(2),
        "queue": deque([1.0]),
        "many": list(range(1000)),
        "pairs": [(f"{number}.png", number) for number in range(100)],
        "mixed": [object() for _ in range(100)],
        "objects": np.array([None], dtype=object),
        "big": torch.zeros(40_000_000),
        "meta": torch.empty(3, device="meta"),
        "empty": torch.empty(0),
        "slotted": Slotted(),
        "proxy": Proxy(),
        "text": "x" * 100,
        "large": 10**5000,
        "system": random.SystemRandom(),
        "array of a class": np.ones(1).view(type("Units", (np.ndarray,), {})),
        "structure": type("Structure", (ctypes.Structure,), {"_fields_": [("level", ctypes.c_int)]})(),
        "ordered": OrderedDict(a=1, b=2),
    }
    kept["ordered"].move_to_end("a")
    kept["itself"] = kept
    kept["array of a class"].level, kept["structure"].level = 1, 2
    found = Variables.of_loop({}).texts
    own = {name.rpartition(": ")[2]: text for name, text in found.items()}
    assert own["kept['many']"].startswith("1000 entries of digest ")
    assert own["kept['pairs']"].startswith("100 entries of digest ")
    assert own["kept['mixed']"].startswith("100 entries of digest ")
    assert own["kept['queue'][0]"] == "1.0"
    assert own["kept['tensor']"].startswith("[3] of digest ")
    assert own["kept['big']"].startswith("version 0, a sample of digest ")
    assert len(own["kept['text']"]) < 80
    assert own["kept['array of a class'].level"] == "1"
    assert own["kept['structure']"].startswith("Structure of digest ")
    ordered = [name for name in own if name.startswith("kept['ordered'][")]
    assert ordered == ["kept['ordered']['b']", "kept['ordered']['a']"]


def test_what_a_data_set_reads_from_another_module_belongs_to_it():
    """A resumed run went on with the first level, and only a warning told of it."""
    settings = ModuleType("settings_of_a_test")
    settings.level, settings.unread = 1.0, 2.0
    space = {"settings": settings, "__name__": __name__}

    class Leveled(Dataset):
        __getitem__ = eval("lambda self, index: settings.level", space)

    data = Leveled()
    found = Variables.of_loop({})
    own = [name for name in found.of_datasets if name.startswith("settings_of_a_test.")]
    assert own == ["settings_of_a_test.level"] and data[0] == 1.0


def test_a_partial_is_the_same_once_its_attributes_were_looked_at():
    """Looking makes an empty dict of them, which a resumed run was told of."""
    held = functools.partial(max, 1, key=abs)
    before = repr(parts_of(held))
    assert vars(held) == {}
    assert repr(parts_of(held)) == before
    held.extra = 1
    assert repr(parts_of(held)) != before


def test_a_library_is_the_same_once_its_functions_were_called():
    library = ctypes.CDLL(None)
    before = repr(parts_of(library))
    library.abs(-1)
    assert repr(parts_of(library)) == before


def test_the_marks_of_functions_of_packages_are_not_looked_at():
    """Activation checkpointing, called for the first time in a step, was named in a resumed run."""
    again = torch.utils.checkpoint.checkpoint
    again(torch.sin, torch.ones(1), use_reentrant=False)
    assert not any("dynamo" in name for name in Variables.of_loop({}).texts)
