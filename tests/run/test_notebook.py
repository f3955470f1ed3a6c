"""Cells of a notebook end as the script of the same lines; a loop whose cell is run again goes on."""

import ast
import linecache

import pytest

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
