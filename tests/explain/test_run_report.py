"""``lockstep report``: each number on the page is recorded or computed again, and what is missing is said."""

import json
import re
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.scale.browser import needs_browser, open_page
from torch.utils.data import default_collate

from lockstep.cli import main
from lockstep.data import Digits
from lockstep.explain.run_report import Answers, answers_of, picture_of, run_page
from lockstep.job.run_folder import read_starts
from lockstep.models.weights import metadata_of

LOCKSTEP = [sys.executable, "-m", "lockstep"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A run of one epoch on the digits, and what it printed."""
    home = tmp_path_factory.mktemp("report")
    words = ["train", "digits", "--epochs", "1", "--devices", "cpu:1", "--set", "log.tensorboard=false"]
    done = subprocess.run([*LOCKSTEP, *words], cwd=home, capture_output=True, text=True, timeout=170, check=True)
    return home / "runs" / "digits-001", done.stdout


@pytest.fixture
def folder(trained, tmp_path):
    """A copy of the run, which a test may change."""
    return shutil.copytree(trained[0], tmp_path / "digits-001")


def test_the_page_has_what_the_run_printed_and_recorded(trained):
    folder, printed = trained
    page = subprocess.run(
        [*LOCKSTEP, "report", str(folder), "--html", str(folder.parent / "page.html")],
        capture_output=True,
        text=True,
        timeout=170,
    )
    assert page.returncode == 0, page.stderr
    text = (folder.parent / "page.html").read_text()
    fingerprint = re.search(r"^fingerprint +(\w{64})", printed, re.M)[1]
    proof = re.search(r"^prove it +(lockstep .*?)   \(", printed, re.M)[1]
    assert f"<code>{fingerprint}</code>" in text
    assert f"<pre>{proof}</pre>" in text
    last = json.loads((folder / "log.jsonl").read_text().splitlines()[-1])
    right, of, percent = re.search(r"weights: ([\d,]+) of ([\d,]+) samples are correct \((\S+) %\)", text).groups()
    assert int(of) == len(Digits("validation"))
    assert int(right) == round(last["validation_accuracy"] * int(of))
    assert f"The last evaluation in the log, after {last['step']} steps, has {percent} %." in text
    for name in ("loss", "validation accuracy", "learning rate", "samples per second"):
        assert f">{name}</text>" in text
    assert "The time of each rank was not recorded" in text
    assert "optimizer.lr</td><td>0.1</td>" in text


def test_the_confusion_matrix_counts_every_sample_once_in_its_place(trained):
    found = answers_of(trained[0], read_starts(trained[0])[-1].job)
    digits, counts = Digits("validation"), found.confusion()
    assert found.labels.tolist() == digits.labels.tolist()
    assert counts.sum(1).tolist() == torch.bincount(digits.labels, minlength=10).tolist()
    assert int(counts.sum() - counts.trace()) == len(found.wrong)
    certainties = [float(found.certainty[index]) for index in found.wrong]
    assert certainties == sorted(certainties, reverse=True)
    assert set(found.pictures) == set(found.wrong[:24])


def test_rows_are_what_is_and_columns_what_was_said():
    found = Answers(("a", "b"), ("x", "y"), torch.tensor([0, 0]), torch.tensor([0, 1]), torch.ones(2), {})
    assert found.confusion().tolist() == [[1, 1], [0, 0]]


def test_weights_that_were_changed_are_found_out(folder, trained):
    weights = load_file(folder / "model.safetensors")
    next(iter(weights.values())).view(-1)[0] += 1
    save_file(weights, folder / "model.safetensors")
    page = run_page(folder, computes=False)
    assert "The weights were changed since" in page
    assert "ends in the same fingerprint" not in page
    assert "This command ends in the fingerprint in which the run ended" in page


def test_what_is_missing_is_said(folder):
    for name in ("log.jsonl", "outcome.json", "model.safetensors"):
        (folder / name).unlink()
    page = run_page(folder, computes=False)
    for words in (
        "There are no curves: the run has no log.jsonl",
        "There is none: the run has not ended",
        "No command is known that trains it again",
        "Not computed, because --recorded-only was given",
    ):
        assert words in page


def test_a_run_that_went_on_after_its_end_has_no_fingerprint_yet(folder):
    """The weights and the command beside them are those of the first end."""
    (last,) = folder.glob("step-*")
    shutil.copytree(last, folder / f"step-{int(last.name[5:]) + 3:08}")
    page = run_page(folder, computes=False)
    assert "the run ended once, went on, and has not ended again" in page
    assert "ends in the same fingerprint" not in page


def test_a_run_that_goes_on_with_resume_auto_is_computed_again(folder):
    table = json.loads((folder / "job.json").read_text())
    table["starts"][-1]["job"]["checkpoint"]["resume"] = "auto"
    (folder / "job.json").write_text(json.dumps(table))
    assert "samples are correct" in run_page(folder)


def test_an_evaluation_before_the_last_epoch_is_not_said_to_be_of_it(folder):
    """With evaluate_every = 2, the page of a run that was stopped said "for its last epoch"."""
    records = [json.loads(line) for line in (folder / "log.jsonl").read_text().splitlines()]
    later = {"kind": "epoch", "step": 2 * records[-1]["step"], "epoch": 1, "seconds": 9.0, "loss": 0.1}
    with (folder / "log.jsonl").open("a") as file:
        file.write(json.dumps(later) + "\n")
    page = run_page(folder)
    assert f"The last evaluation in the log, after {records[-1]['step']} steps, has " in page


def test_a_run_with_a_moving_average_says_so_before_its_end_too(folder):
    """Its file is written at the end; until then the log's accuracy stood beside that of the weights themselves."""
    table = json.loads((folder / "job.json").read_text())
    table["starts"][-1]["job"]["training"]["ema_decay"] = 0.9
    (folder / "job.json").write_text(json.dumps(table))
    page = run_page(folder)
    assert "is that of the moving average of the weights" in page and "The last evaluation" not in page


def shifted(samples):
    """Nine digits in place of ten: 9 counts as 8."""
    inputs, labels = default_collate(samples)
    return inputs, labels.clamp_max(8)


def test_what_the_loss_ignores_is_left_out_and_labels_are_those_of_the_evaluation(folder):
    """As they are in the accuracy of the log, which the page shows beside it."""
    table = json.loads((folder / "job.json").read_text())
    job = table["starts"][-1]["job"]
    job["loss"] = {"target": "torch.nn:CrossEntropyLoss", "ignore_index": 3}
    job["data"]["collate"] = {"target": f"{__name__}:shifted"}
    (folder / "job.json").write_text(json.dumps(table))
    found, labels = answers_of(folder, read_starts(folder)[-1].job), Digits("validation").labels.clamp_max(8)
    assert found.labels.tolist() == labels[labels != 3].tolist()
    assert found.names == tuple(f"sample {n}" for n in range(len(labels)) if labels[n] != 3)
    assert set(found.pictures) == set(found.wrong[:24])


def test_a_failure_of_the_last_start_is_on_the_page(folder):
    (folder / "ranks").mkdir(exist_ok=True)
    (folder / "ranks" / "report.txt").write_text("NonFiniteError: The loss of step 1 is <nan>\n")
    assert "NonFiniteError: The loss of step 1 is &lt;nan&gt;" in run_page(folder, computes=False)
    for number in (9, 10):
        (folder / "ranks" / f"restart-{number}").mkdir()
    assert "The last start failed" not in run_page(folder, computes=False)
    (folder / "ranks" / "restart-10" / "report.txt").write_text("rank 1 killed")
    assert "rank 1 killed" in run_page(folder, computes=False)
    shutil.rmtree(folder / "ranks")


def test_the_answer_is_the_highest_score_also_where_probabilities_are_equal(folder):
    """It was the first of the classes of the highest probability, and the accuracy beside it another one."""
    weights = load_file(folder / "model.safetensors")
    metadata = metadata_of(folder / "model.safetensors")
    for name in ("14.weight", "14.bias"):
        weights[name].mul_(1e-18)
    save_file(weights, folder / "model.safetensors", metadata=metadata)
    found = answers_of(folder, read_starts(folder)[-1].job)
    assert len(found.predicted.unique()) > 1


def test_scores_that_are_nan_are_no_answers(folder):
    weights = load_file(folder / "model.safetensors")
    metadata = metadata_of(folder / "model.safetensors")
    next(each for each in weights.values() if each.is_floating_point()).fill_(float("nan"))
    save_file(weights, folder / "model.safetensors", metadata=metadata)
    assert "The model gives NaN for 359 of 359 samples" in run_page(folder)


def test_a_data_set_that_is_gone_is_said_and_the_rest_of_the_page_is_there(folder):
    table = json.loads((folder / "job.json").read_text())
    table["starts"][-1]["job"]["data"]["validation"] = {
        "target": "lockstep.data:ImageFolder",
        "root": "/gone",
    }
    (folder / "job.json").write_text(json.dumps(table))
    page = run_page(folder)
    assert "This cannot be computed again: " in page
    assert "<h2>Fingerprint</h2>" in page


@pytest.mark.parametrize(
    ("shape", "dtype", "is_picture"),
    [
        ((3, 8, 8), torch.uint8, True),
        ((1, 8, 8), torch.float32, True),
        ((8, 8), torch.float32, True),
        ((64,), torch.float32, False),
        ((5, 8, 8), torch.float32, False),
        ((10, 2), torch.float32, False),
    ],
)
def test_a_picture_has_one_or_three_colours(shape, dtype, is_picture):
    assert picture_of(torch.zeros(shape, dtype=dtype)).startswith("data:image/png") == is_picture


def test_a_folder_that_is_no_run_is_refused(tmp_path, capsys):
    assert main(["report", str(tmp_path)]) == 2
    assert "holds no job.json" in capsys.readouterr().err


@needs_browser
@pytest.mark.slow
@pytest.mark.parametrize("width", [1280, 420])
def test_the_page_needs_no_network_and_fits_its_window(trained, tmp_path, width):
    path = tmp_path / "page.html"
    path.write_text(run_page(trained[0]))
    with open_page(path, width=width) as page:
        assert [url for url in page.requests if not url.startswith("data:")] == []
        assert page.complaints == []
        assert page.value("document.documentElement.scrollWidth") <= width
