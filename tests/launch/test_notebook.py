"""``lockstep.launch`` from a cell of a real notebook: its functions, their output, errors, interrupts."""

import os
import threading
from pathlib import Path

import pytest
from tests.launch.command import wait_until

nbclient = pytest.importorskip("nbclient", reason="needs nbclient")
nbformat = pytest.importorskip("nbformat", reason="needs nbformat")
pytest.importorskip("ipykernel", reason="needs ipykernel")
pytest.importorskip("cloudpickle", reason="needs cloudpickle")

BEGIN = """
import os
import lockstep, torch

scale = 3


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, x):
        return self.layer(x) * scale


def train(lr, fails=False):
    run = lockstep.init(global_batch=8, micro_batches=4, seed=0)
    data = torch.utils.data.TensorDataset(torch.arange(64.0).view(16, 4) / 64, torch.arange(16) % 2)
    model = Net()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    for batch in run.batches(data):
        run.backward(batch, torch.nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    if fails and run.world.rank == 1:
        raise ValueError("of rank 1")
    print("rank 0 says", run.world.world_size)
    return run.fingerprint()


def forever(folder):
    open(f"{folder}/{os.getpid()}", "w").close()
    while True:
        lockstep.heartbeat()
"""
CELLS = [
    BEGIN,
    "one = lockstep.launch(train, 0.1, devices='cpu:1')",
    "two = lockstep.launch(train, lr=0.1, devices='cpu:2')\nassert two == one * 2, (one, two)",
    "lockstep.launch(train, 0.1, fails=True, devices='cpu:2')",
    "print('the kernel goes on')",
]


def ran(tmp_path, *cells):
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    resources = {"metadata": {"path": str(tmp_path)}}
    return nbclient.NotebookClient(
        book, timeout=120, kernel_name="python3", allow_errors=True, resources=resources
    )


def text_of(cell):
    return "".join(each.get("text", "") for each in cell.outputs if each.output_type == "stream")


def errors_of(cell):
    return [each for each in cell.outputs if each.output_type == "error"]


def test_functions_of_the_notebook_run_on_every_rank_and_a_failure_is_its_report(tmp_path, monkeypatch):
    monkeypatch.delenv("PYTEST_CURRENT_TEST")  # with it a kernel does not show what its processes write
    book = ran(tmp_path, *CELLS).execute()
    _, one, two, failed, after = book.cells
    assert not errors_of(one) and not errors_of(two), [each.traceback for each in errors_of(two)]
    assert "rank 0 says 1" in text_of(one) and "rank 0 says 2" in text_of(two)
    (error,) = errors_of(failed)
    assert error.ename == "RankError"
    shown = "\n".join(error.traceback)
    assert "rank 1 failed first" in shown and "ValueError: of rank 1" in shown
    assert "function.py" not in shown, "the way to the ranks is nobody's business"
    assert text_of(after) == "the kernel goes on\n"


def test_an_interrupted_cell_stops_all_ranks(tmp_path):
    (tmp_path / "ranks").mkdir()
    client = ran(tmp_path, BEGIN, f"lockstep.launch(forever, '{tmp_path}/ranks', devices='cpu:2')", CELLS[-1])
    ranks = []

    def interrupt():
        wait_until(lambda: len(list((tmp_path / "ranks").iterdir())) == 2, 60, "two ranks")
        ranks.extend(int(path.name) for path in (tmp_path / "ranks").iterdir())
        os.killpg(client.km.provisioner.process.pid, 2)

    thread = threading.Thread(target=interrupt)
    thread.start()
    book = client.execute()
    thread.join()
    assert [each.ename for each in errors_of(book.cells[1])] == ["KeyboardInterrupt"]
    assert text_of(book.cells[2]) == "the kernel goes on\n"
    assert ranks and not any(Path(f"/proc/{pid}").exists() for pid in ranks)
