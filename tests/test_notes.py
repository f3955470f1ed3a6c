"""docs/notes.md: 63 items, each with a sound command or page, and docs/concepts.md with numbers that are right."""

import re
import shlex
import subprocess
from pathlib import Path

import pytest
import torch

from lockstep.cli.command_line import _parser
from lockstep.cli.train import overrides
from lockstep.config.job_file import BUILT_IN_JOBS, load_job
from lockstep.lint.check import check_text
from lockstep.models import resnet34

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
NOTES = (DOCS / "notes.md").read_text()
CONCEPTS = (DOCS / "concepts.md").read_text()
ROWS = [
    [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
    for line in NOTES.splitlines()
    if re.match(r"\| \d+ \|", line)
]
COMMANDS = sorted(set(re.findall(r"`(?:python -m torch[^`]* -m )?(lockstep [^`]+)`", NOTES)))

MISTAKES = {
    "LS004": "val_sampler = DistributedSampler(val_set)\naccuracy = correct / val_sampler.total_size",
    "LS010": 'os.environ["CUDA_VISIBLE_DEVICES"] == "0,1"',
    "LS019": "rank = nodes * gpus + local_rank",
    "LS029": 'dist.init_process_group("nccl", world_size=8, rank=8)',
    "LS061": 'parser.add_argument("--syncBN", type=bool)',
    "LS063": 'dist.init_process_group("nccl", word_size=8)\nmodel = torchvision.models.resnet34(num_class=5)',
    "LS064": "for batch in tqdm(loader):\n    pass",
    "LS065": "scaler = GradScaler()",
    "LS066": 'os.environ["WORLD_SIZE"] = str(rank + 1)',
}
IMPORTS = (
    "import argparse, os, torchvision, tqdm\nimport torch.distributed as dist\n"
    "from torch.utils.data.distributed import DistributedSampler\nparser = argparse.ArgumentParser()\n"
)


def anchors(page):
    """The names that a link may have behind ``#``, as GitHub makes it of headings."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_every_item_has_one_row_and_a_status():
    assert [row[0] for row in ROWS] == [str(number) for number in range(1, 64)]
    assert {len(row) for row in ROWS} == {5}
    assert {row[3] for row in ROWS} <= {"W", "G", "D", "W, G", "W, D"}


@pytest.mark.parametrize("row", [row for row in ROWS if "W" in row[3]], ids=lambda row: row[0])
def test_what_works_has_a_test(row):
    tests = re.findall(r"`(tests/[\w/]+\.py)`", row[4])
    assert tests
    assert all("def test_" in (ROOT / test).read_text() for test in tests)


@pytest.mark.parametrize("page", ["notes.md", "concepts.md"])
def test_every_link_leads_to_a_heading(page):
    for path, anchor in re.findall(r"\]\((?!https:)([^)#]*)(?:#([^)]+))?\)", (DOCS / page).read_text()):
        target = DOCS / (path or page)
        assert target.exists(), path
        assert not anchor or anchor in anchors(target), f"{path}#{anchor}"


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one_of_the_tool(command, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text((BUILT_IN_JOBS / "digits.toml").read_text())
    (tmp_path / "resnet34.pth").touch()
    for folder in ("flower_photos", "cifar-10-batches-py", "mnist"):
        (tmp_path / folder).mkdir()
    words = shlex.split(command)[1:]
    arguments = _parser(words).parse_args(words)
    assert arguments.command_main
    if words[0] == "train":
        load_job(arguments.job, overrides(arguments))


def test_the_commands_are_found():
    assert len(COMMANDS) > 40
    assert "lockstep train digits" in COMMANDS


def test_make_curves_trains_three_recipes_that_differ_in_what_batch_norm_sees(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    told = subprocess.run(
        ["make", "-n", "curves", f"PHOTOS={tmp_path}"], capture_output=True, text=True, check=True
    ).stdout.replace("\\\n", " ")
    commands = [shlex.split(line)[1:] for line in told.splitlines() if "bin/lockstep " in line]
    *trained, compared = [_parser(words).parse_args(words) for words in commands]
    jobs = [load_job(arguments.job, overrides(arguments)) for arguments in trained]
    assert [f"runs/curves/{job.run.name}" for job in jobs] == compared.runs
    assert len(compared.labels.split(",")) == 3
    seen = [(job.training.micro_batches, job.training.sync_batch_norm) for job in jobs]
    assert seen == [(1, False), (16, False), (16, True)]
    assert {job.training.global_batch for job in jobs} == {64}


@pytest.mark.parametrize("rule", MISTAKES)
def test_a_mistake_of_the_notes_is_found_by_its_rule(rule):
    found = [finding for finding in check_text(IMPORTS + MISTAKES[rule]) if finding.rule == rule]
    assert len(found) == len(re.findall(rf"\| {rule} \|$", NOTES, re.M))
    assert found


def test_the_formats_have_the_limits_of_the_page():
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        row = re.search(rf"^\| {name} \|.*", CONCEPTS, re.M).group()
        _, fraction, largest, smallest, gap = (float(word) for word in re.findall(r"[\d.]+(?:e[+-]?\d+)?", row)[1:])
        limits = torch.finfo(dtype)
        assert limits.max == pytest.approx(largest, rel=0.02)
        assert limits.tiny == pytest.approx(smallest, rel=0.03)
        assert limits.eps == pytest.approx(gap, rel=0.01) == 2**-fraction


def test_overflow_underflow_and_rounding_are_as_the_page_says():
    def half(value):
        return torch.tensor(value).half()

    assert (half(300.0) * 300).isinf()
    assert half(1e-8) == 0
    assert half(1e-8 * 65536) == pytest.approx(6.6e-4, rel=0.01)
    assert half(1.0) + half(0.0004) == 1
    assert torch.tensor(1.0).bfloat16() + torch.tensor(0.003).bfloat16() == 1


def test_a_batch_is_scattered_as_the_page_says():
    assert [len(part) for part in torch.arange(30).chunk(3)] == [10, 10, 10]


def test_the_activations_of_a_photo_are_those_of_the_page():
    model = resnet34(num_classes=5)
    own = {tensor.untyped_storage().data_ptr() for tensor in [*model.parameters(), *model.buffers()]}
    kept = {}  # the storages themselves, so that no address is used twice

    def keep(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(torch.randn(1, 3, 224, 224))
    row = re.search(r"^\| 1 \|(.*)\|$", CONCEPTS, re.M).group(1)
    parameters, _, _, activations = (int(cell) for cell in row.split("|"))
    assert round(sum(tensor.nbytes for tensor in model.parameters()) / 2**20) == parameters
    assert round(sum(storage.nbytes() for storage in kept.values()) / 2**20) == activations
