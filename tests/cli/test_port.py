"""``lockstep port``: what it prints, and how it ends."""

import json

SCRIPT = """import torch

torch.manual_seed(0)
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for epoch in range(3):
    for x, y in loader:
        torch.nn.functional.mse_loss(model(x), y).backward()
    print("é\\x1b", epoch)
    print(epoch)
"""


def test_changes_are_told_by_section_with_the_lines_that_are_alike(command, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    status, output, errors = command("port", "train.py")
    assert (status, errors) == (0, "")
    lines = output.splitlines()
    assert lines[0].startswith("train.py: 7 places to look at.")
    assert [line for line in lines if line[:1].isalpha()][1:] == [
        "Setup",
        "The loop",
        "Output and files",
        "Then check the port:",
    ]
    assert '    9  print("é\\x1b", epoch)  (and 10)' in lines
    assert (
        "       -> for batch in run.batches(loader):  # a step of all processes together, of len(batch) samples"
        in lines
    )
    assert lines[-1] == "    lockstep verify --devices 2 --stop-after 5 --script train.py"


def test_json_holds_the_same(command, tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT, encoding="utf-8")
    status, output, _ = command("port", "--json", "train.py")
    report = json.loads(output)
    assert (status, report["path"]) == (0, "train.py")
    assert [(each["section"], each["lines"]) for each in report["changes"]] == [
        ("Setup", [1]),
        ("Setup", [3]),
        ("Setup", [5]),
        ("The loop", [6]),
        ("The loop", [7]),
        ("The loop", [8]),
        ("Output and files", [9, 10]),
    ]


def test_a_script_without_a_loop_is_refused(command, tmp_path):
    (tmp_path / "train.py").write_text("import torch\n")
    status, output, errors = command("port", "train.py")
    assert (status, output) == (2, "")
    assert "its training loop must be in another file" in errors and "as SVI.step of Pyro does" in errors
