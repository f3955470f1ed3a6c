"""Cells of a notebook end as the script of the same lines; a loop whose cell is run again goes on."""

import ast
import linecache

import pytest

from lockstep.errors import ConfigError

CELLS = """
import lockstep
from tests.run.jobs import begin, dataset, train_step
#
run, model, optimizer = begin()
losses = []
#
for epoch in run.epochs(2):
    for batch in run.batches(dataset()):
        losses.append(float(train_step(run, batch, optimizer)))
        if len(losses) == stop:
            raise KeyboardInterrupt
#
fingerprint = run.fingerprint()
run.close()
"""


def run_cell(number, text, variables):
    """As IPython does it: each statement by itself, among the variables of all cells."""
    name = f"<cell {number}>"
    linecache.cache[name] = len(text), None, text.splitlines(keepends=True), name
    for statement in ast.parse(text).body:
        exec(compile(ast.Module([statement], []), name, "exec"), variables)


def test_cells_end_as_the_script_also_where_one_is_interrupted_and_run_again():
    script = {"stop": None}
    exec(compile(CELLS, "script.py", "exec"), script)
    variables = {"stop": 4}
    for number, text in enumerate(CELLS.split("#\n")):
        if number == 2:
            with pytest.raises(KeyboardInterrupt):
                run_cell(number, text, variables)
        run_cell(number, text, variables)
    assert variables["fingerprint"] == script["fingerprint"]
    assert variables["losses"] == script["losses"] and len(script["losses"]) == 6


EVALUATED = """
from tests.run.jobs import begin, dataset, train_step
run, model, optimizer = begin()
losses, ends = [], []
#
for epoch in run.epochs(2):
    for batch in run.batches(dataset()):
        losses.append(float(train_step(run, batch, optimizer)))
    if epoch == fails:
        raise NameError("a slip in a line of the evaluation")
    ends.append((epoch, len(losses)))
"""

UNSTEPPED = """
from torch.nn.functional import cross_entropy
from tests.run.jobs import begin, dataset
run, model, optimizer = begin()
#
for epoch in run.epochs(2):
    for batch in run.batches(dataset()):
        run.backward(batch, cross_entropy)
        if batch.plan.step == fails:
            raise KeyboardInterrupt
        optimizer.step()
        optimizer.zero_grad()
"""


def as_script(text):
    variables = {"fails": None}
    exec(compile(text, "script.py", "exec"), variables)
    return variables


def first_run(text, fails, error):
    """The variables after a loop's cell, the second one, has ended with an error; and that cell."""
    variables = {"fails": fails}
    first, loop = text.split("#\n")
    run_cell(0, first, variables)
    with pytest.raises(error):
        run_cell(1, loop, variables)
    variables["fails"] = None
    return variables, loop


@pytest.fixture
def console(monkeypatch):
    """The prompt that consoles and notebooks set."""
    monkeypatch.setattr("sys.ps1", "In : ", raising=False)


@pytest.mark.parametrize("fails", [0, 1])
def test_after_an_error_behind_the_steps_the_cell_goes_on_there(console, fails):
    variables, loop = first_run(EVALUATED, fails, NameError)
    run_cell(1, loop, variables)
    script = as_script(EVALUATED)
    assert (variables["losses"], variables["ends"]) == (script["losses"], script["ends"])
    assert variables["run"].fingerprint() == script["run"].fingerprint()


@pytest.mark.parametrize("fails", [1, 2])  # within an epoch, and in its last step
def test_a_cell_that_was_interrupted_before_the_step_asks_for_it(console, fails):
    variables, loop = first_run(UNSTEPPED, fails, KeyboardInterrupt)
    with pytest.raises(ConfigError, match=rf"left between run.backward and optimizer.step\(\) of step {fails}"):
        run_cell(1, loop, variables)
    run_cell(2, "optimizer.step()\noptimizer.zero_grad()", variables)
    run_cell(1, loop, variables)
    assert variables["run"].fingerprint() == as_script(UNSTEPPED)["run"].fingerprint()


def test_the_step_may_be_left_out(console):
    variables, loop = first_run(UNSTEPPED, 1, KeyboardInterrupt)
    run_cell(2, "optimizer.zero_grad()", variables)
    run_cell(1, loop, variables)
    assert variables["run"].position.step == 6
