"""The code of docs/own-loop.md runs as it is printed, and again, when nothing is left to do."""

import re
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import lockstep

PAGE = (Path(__file__).parents[2] / "docs" / "own-loop.md").read_text()
LOOP, *_, CALLBACK = [
    code for code in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "run.epochs" in code or "Callback" in code
]
EPOCHS = "run.epochs(30)"


@pytest.fixture
def names(tmp_path, monkeypatch):
    """Runs the code in a folder of its own and gives its names."""
    monkeypatch.chdir(tmp_path)

    def executed(code, known=()):
        torch.manual_seed(0)
        inputs = torch.randn(300, 4)
        data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        found = {
            "lockstep": lockstep,
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 5),
            "train_set": data,
            "test_set": data,
            "loss_fn": nn.CrossEntropyLoss(),
            "correct": lambda output, target: output.argmax(1) == target,
            **dict(known),
        }
        exec(code, found)
        return found

    return executed


def test_the_loop_trains_and_a_second_start_finds_it_done(names, capsys):
    assert EPOCHS in LOOP
    first = names(LOOP.replace(EPOCHS, "run.epochs(2)"))
    first["run"].close()
    said = capsys.readouterr().out.split()
    second = names(LOOP.replace(EPOCHS, "run.epochs(2)"))
    second["run"].close()
    assert capsys.readouterr().out.split() == [said[-1]]  # the same fingerprint, and no epoch
    assert (said[0], said[2]) == ("0", "1") and float(said[1]) < float(said[3])


def test_the_callback_is_called_in_every_step_until_it_is_removed(names):
    before, loop, after = LOOP.replace(EPOCHS, "run.epochs(1)").partition("for epoch")
    found = names(CALLBACK.replace("...\n", loop + after), names(before))
    assert len(found["watched"].norms) == 3 and min(found["watched"].norms) > 0
    found["run"].close()
