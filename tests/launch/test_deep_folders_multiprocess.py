"""Temporary files in a deep folder, where the paths of sockets would be longer than the system takes."""

import pytest

LOOP = """
import torch
from torch import nn
from torch.utils.data import Dataset
import lockstep

class Numbers(Dataset):
    def __len__(self):
        return 32

    def __getitem__(self, index):
        return torch.full((4,), float(index)), index % 3

run = lockstep.init(global_batch=16, micro_batches=8)
model, optimizer = nn.Linear(4, 3), None
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.01))
for batch in run.batches(Numbers(), workers=2):
    run.backward(batch, nn.CrossEntropyLoss())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_loaders_with_workers_run_and_leave_no_file(command):
    deep = command.folder / ("x" * 90)
    deep.mkdir()
    script = command.folder / "loop.py"
    script.write_text(LOOP)
    places = {"TMPDIR": str(deep), "XDG_RUNTIME_DIR": str(deep)}
    command.start(script, devices="cpu:2", environment=places)
    code, lines = command.end()
    assert (code, list(deep.iterdir())) == (0, []), lines
