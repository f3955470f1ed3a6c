"""The answer to any file is findings or one sentence."""

import random
import sysconfig
import time
from pathlib import Path

import pytest

from lockstep.errors import ConfigError
from lockstep.lint import check_file, check_text

CASES = Path(__file__).parent / "cases"
IMPORTS = """\
import os, torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP
"""
STANDARD_LIBRARY = Path(sysconfig.get_paths()["stdlib"])


def refusal(path):
    with pytest.raises(ConfigError) as caught:
        check_file(str(path))
    sentence = str(caught.value)
    assert "\n" not in sentence
    return sentence


@pytest.mark.parametrize(
    ("name", "data", "expected"),
    [
        ("a.py", b"def f(:\n", "a.py:1 is not valid Python 3"),
        ("a.py", b"print 'two'\n", "a.py:1 is not valid Python 3"),
        ("a.py", b"if x:\n\tpass\n        pass\n", "is not valid Python 3"),
        ("a.ipynb", b'{"cells": []}', "is a notebook"),
        ("a.py", b"x = 1\0", "zero bytes"),
        ("a.py", b"\x7fELF\x02\x01\x01\0\0", "zero bytes"),
        ("a.py", b"x = '\xe9'\n", "cannot be decoded"),
        ("a.py", b"# coding: klingon\n", "cannot be decoded"),
        ("a.py", b"# coding: hex\n", "cannot be decoded"),
        ("a.py", b"\xff\xfex\0=\0", "zero bytes"),
        ("a.py", b"(" * 5000, "a.py"),
        ("a.py", b"-" * 200_000 + b"1\n", "a.py"),
        ("a.py", b"x = " + b"+".join([b"1"] * 500_000), "nested too deeply"),
        ("a.py", b"x" * 5_000_001, "more than 5,000,000 bytes"),
    ],
    ids=lambda value: value[:20] if isinstance(value, bytes) else None,
)
def test_what_is_no_script_is_refused_in_one_sentence(tmp_path, name, data, expected):
    (tmp_path / name).write_bytes(data)
    assert expected in refusal(tmp_path / name)


def test_a_folder_and_a_missing_file_are_refused(tmp_path):
    assert "is a folder" in refusal(tmp_path)
    assert "does not exist" in refusal(tmp_path / "none.py")
    assert "does not exist" in refusal("a\0b.py")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n\n",
        b"\xef\xbb\xbfx = 1\n",
        b"# coding: latin-1\nx = '\xe9'\n",
        b"x = 1\r\ny = 2\r\n",
        b"x = 1\r",
    ],
)
def test_what_python_takes_is_taken(tmp_path, data):
    (tmp_path / "a.py").write_bytes(data)
    assert check_file(str(tmp_path / "a.py")) == []


def test_lines_are_counted_as_an_editor_counts_them(tmp_path):
    (tmp_path / "a.py").write_bytes(b'import os\r\n\r\nos.environ["CUDA_VISIBLE_DEVICES"] == "0"\r\n')
    (finding,) = check_file(str(tmp_path / "a.py"))
    assert (finding.line, finding.column, finding.rule) == (3, 1, "LS010")


def mutated(text, dice):
    """The text with a few lines, words or characters dropped, doubled or swapped."""
    cut = dice.choice([str.splitlines, str.split, list])
    joint = {str.splitlines: "\n", str.split: " ", list: ""}[cut]
    parts = cut(text)
    for _ in range(dice.randint(1, 4)):
        one, other = dice.randrange(len(parts)), dice.randrange(len(parts))
        change = dice.randrange(3)
        if change == 0 and len(parts) > 1:
            del parts[one]
        elif change == 1:
            parts.insert(one, parts[other])
        else:
            parts[one], parts[other] = parts[other], parts[one]
    return joint.join(parts)


def test_two_thousand_mutated_scripts_end_in_findings_or_a_sentence():
    dice = random.Random(17)
    scripts = [
        block.partition("\n")[2] for path in sorted(CASES.glob("*.txt")) for block in path.read_text().split("=== ")[1:]
    ]
    parsed = 0
    for _ in range(2000):
        text = mutated("import os, torch\nimport torch.distributed as dist\n" + dice.choice(scripts), dice)
        try:
            check_text(text)
            parsed += 1
        except ConfigError as error:
            assert "\n" not in str(error)
    assert parsed > 500


@pytest.mark.slow
def test_the_standard_library_has_no_finding():
    paths = sorted(
        path for name in ("asyncio", "email", "json", "http") for path in (STANDARD_LIBRARY / name).glob("*.py")
    )
    assert len(paths) > 40
    assert [finding.text() for path in paths for finding in check_file(str(path))] == []


def seconds_of(text):
    start = time.process_time()
    check_text(text)
    return time.process_time() - start


@pytest.mark.slow
def test_a_script_of_twenty_thousand_lines_is_checked_in_seconds():
    blocks = [block for path in sorted(CASES.glob("*.txt")) for block in path.read_text().split("=== ")[1:]]
    functions = ["def case():\n" + "".join(f"    {line}\n" for line in block.splitlines()[1:]) for block in blocks]
    text = IMPORTS + "\n".join(functions * 18)
    assert text.count("\n") > 20_000
    assert seconds_of(text) < 20


@pytest.mark.parametrize(
    "line",
    [
        "rank = rank\n",
        "a = b\nb = a\n",
        "if rank == 0:\n    f(a)\ndef f(a):\n    f(b)\n",
        "model = DDP(model)\nmodel.module(x).backward()\n",
        "sampler = DistributedSampler(val_set, rank=rank, seed=rank)\n",
    ],
)
def test_names_that_go_round_in_circles_end(line):
    imports = IMPORTS + "from torch.utils.data.distributed import DistributedSampler\ndist.init_process_group()\n"
    last = "if rank == a:\n    dist.barrier()\n    torch.save(a, b)\ntorch.cuda.set_device(rank)\n"
    assert seconds_of(imports + line * 300 + last * 100) < 60
