"""The script that the notes explain, unchanged where it can be had, and one of our own with its habits.

The public script is not part of this repository. ``LOCKSTEP_NOTES_SCRIPT=DIR`` names the folder
``pytorch_classification/train_multi_GPU`` of WZMIAOMIAO/deep-learning-for-image-processing. It asks for CUDA and
sets no seed; ``sitecustomize.py`` below, on PYTHONPATH, does both for it. No line of the script is changed.
"""

import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.errors import EXIT_RANK
from lockstep.lint.check import check_text

OURS = Path(__file__).with_name("notes_script.py")
FOLDER = os.environ.get("LOCKSTEP_NOTES_SCRIPT", "")
public = pytest.mark.skipif(not FOLDER, reason="LOCKSTEP_NOTES_SCRIPT names no folder with the public script")
LAUNCHERS = {
    "lockstep": ["-c", "import sys; from lockstep.cli import main; sys.exit(main())", "run", "--devices"],
    "torchrun": ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node"],
    "launch": ["-m", "torch.distributed.launch", "--use_env", "--standalone", "--nproc_per_node"],
}

SITECUSTOMIZE = '''
"""Declares two operators that torchvision misses beside a CPU build of torch, and seeds; may answer for CUDA."""
import os, sys

class BeforeTorchvision:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(BeforeTorchvision)
            prepare()

def prepare():
    import torch, torch.distributed as dist
    torch.library_of_test = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        torch.library_of_test.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    torch.manual_seed(0)
    if "CUDA_STAND_IN" in os.environ:
        available, init = torch.cuda.is_available, dist.init_process_group
        ddp = torch.nn.parallel.DistributedDataParallel
        of_script = lambda: "train_multi_gpu" in sys._getframe(2).f_code.co_filename
        torch.cuda.is_available = lambda: of_script() or available()
        torch.cuda.set_device = lambda device: None
        dist.init_process_group = lambda backend, **options: init("gloo", **options)
        torch.nn.parallel.DistributedDataParallel = lambda model, device_ids: ddp(model)

sys.meta_path.insert(0, BeforeTorchvision)
'''


def run(launcher, ranks, script, folder, *arguments, path=(), **environment):
    """Starts a script in a folder of its own; returns what it wrote, after the exit status."""
    folder.mkdir()
    (folder / "tmp").mkdir()
    paths = [*map(str, path), *filter(None, [os.environ.get("PYTHONPATH")])]
    devices = f"cpu:{ranks}" if launcher == "lockstep" else str(ranks)
    own = {"TMPDIR": str(folder / "tmp"), "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *LAUNCHERS[launcher], devices, str(script), *arguments],
        cwd=folder,
        env={**os.environ, **own, **environment},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def weights(path):
    return {name: tensor.numpy().tobytes() for name, tensor in torch.load(path).items()}


@pytest.mark.parametrize("ranks", [pytest.param(1, marks=pytest.mark.slow), 3])
def test_a_script_with_the_habits_of_the_notes_runs_and_rank_0_alone_logs(ranks, tmp_path):
    code, said = run("lockstep", ranks, OURS, tmp_path / "run")
    assert code == 0, said
    assert re.findall(r"\[epoch (\d)\] loss \d\.\d{4} accuracy [01]\.\d{3}$", said, re.M) == ["0", "1"]
    assert sorted(path.name for path in (tmp_path / "run").iterdir()) == ["model-0.pth", "model-1.pth", "tmp"]
    assert not (tmp_path / "run" / "tmp" / "initial_weights.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize("launcher", ["torchrun", "launch"])
def test_it_ends_in_the_bits_that_torch_gives_it(launcher, tmp_path):
    for name in ("lockstep", launcher):
        code, said = run(name, 2, OURS, tmp_path / name)
        assert code == 0, said
    assert weights(tmp_path / "lockstep" / "model-1.pth") == weights(tmp_path / launcher / "model-1.pth")


def rules(script):
    return Counter(finding.rule for finding in check_text(script.read_text()))


def test_lint_finds_its_mistakes():
    assert rules(OURS) == {"LS004": 1, "LS061": 1}


@public
def test_lint_finds_the_mistakes_of_the_public_scripts():
    folder = Path(FOLDER)
    assert rules(folder / "train_multi_gpu_using_launch.py") == {"LS004": 1, "LS061": 2}
    assert rules(folder / "train_multi_gpu_using_spawn.py") == {"LS004": 1, "LS015": 1, "LS061": 2}
    assert rules(folder / "train_single_gpu.py") == {"LS061": 1}


@pytest.fixture
def started(tmp_path):
    """Starts the public script on eight drawn photos of each of five classes."""
    support, photos = tmp_path / "support", tmp_path / "photos"
    (support / "matplotlib").mkdir(parents=True)
    (support / "sitecustomize.py").write_text(SITECUSTOMIZE)
    for name in ("__init__", "pyplot"):  # imported, and used only where plot_image is True
        (support / "matplotlib" / f"{name}.py").touch()
    generator = np.random.default_rng(0)
    for label in range(5):
        (photos / f"class{label}").mkdir(parents=True)
        for number in range(8):
            pixels = generator.integers(40 * label, 40 * label + 90, (60, 60, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(photos / f"class{label}" / f"{number}.jpg")

    def start(launcher, ranks, folder, **environment):
        options = ["--data-path", str(photos), "--epochs", "1", "--batch-size", "4", "--weights", "none"]
        options += ["--device", "cpu", "--syncBN", ""]  # bool("") is the only False that it knows
        script = Path(FOLDER) / "train_multi_gpu_using_launch.py"
        return run(launcher, ranks, script, tmp_path / folder, *options, path=[support], **environment)

    return start


@public
def test_without_a_gpu_the_public_script_says_so_and_the_rank_and_line_are_named(started):
    code, said = started("lockstep", 2, "bare")
    assert code == EXIT_RANK
    assert re.search(r"rank [01] failed first.*using_launch\.py\", line 21, in main", said, re.S)
    assert "OSError: not find GPU device for training." in said and "the same error" in said


@public
@pytest.mark.timeout(600)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_the_public_script_trains_under_every_launcher_to_the_same_bits(started, ranks, tmp_path):
    found = []
    for launcher in ("lockstep", "torchrun"):
        code, said = started(launcher, ranks, launcher, CUDA_STAND_IN="1")
        assert code == 0, said
        assert len(re.findall(r"\[epoch 0\] accuracy: [01]\.\d+", said)) == 1
        assert "35 images for training" in said and "5 images for validation" in said
        found.append(weights(tmp_path / launcher / "weights" / "model-0.pth"))
    assert found[0] == found[1]
