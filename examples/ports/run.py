"""Applies the patches of this folder to public training scripts, and runs each on several numbers of devices.

    make ports SCRIPTS=DIR [ARGS="--only mnist vae"]           on 1, 2 and 3 processes of the CPU
    make ports SCRIPTS=DIR ARGS="--devices 1 2"                on GPUs

``DIR`` holds clones of the repositories, each under its name: ``examples`` (pytorch), ``nanoGPT``, ``minGPT``,
``accelerate``, ``pytorch-image-models``, ``pytorch-lightning``, ``stanford_alpaca``, ``PyTorch-GAN``,
``deep-learning-for-image-processing``. Neither the scripts nor data are part
of this project: each port runs in a temporary copy, with tiny settings, on data that ``stand_ins.py`` makes in the
format that the script reads. A port passes if it prints the same fingerprint on each number of processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
OURS = ("lockstep", "adapter")
"""Folders of patches: with ``lockstep.init``, and with ``lockstep.integrations``."""
OTHERS = ("accelerate", "fabric")
"""The same scripts by other libraries, for comparison; they run on one process."""
COLUMNS = "{:26} {:10} {:>5} {:>7} {:>5}  {}"


@dataclass(frozen=True)
class Port:
    """A script, and how it is run."""

    repository: str
    folder: str
    """The part of the repository that is copied: a folder, or "" for its Python files and the packages beside them."""
    command: str
    """The script and its arguments, in ``cwd``."""
    data: str
    """The function of ``stand_ins.py`` that writes data below the folder in which the script runs."""
    needs: tuple[str, ...] = ()
    cwd: str | None = None
    """The folder in which the script runs, ``folder`` by default."""
    metric: str = ""
    """A pattern of the last number that the script prints about its test set."""


PORTS = {
    "mnist": Port(
        "examples",
        "mnist",
        "main.py --epochs 2 --lr 0.3",
        "mnist",
        ("torchvision",),
        metric=r"Average loss: ([\d.]+)",
    ),
    "imagenet": Port(
        "examples",
        "imagenet",
        "main.py photos --epochs 1 -b 16 -j 0 --seed 1",
        "photos",
        ("torchvision",),
    ),
    "word_language_model": Port(
        "examples",
        "word_language_model",
        "main.py --epochs 2 --emsize 16 --nhid 16 --bptt 10 --lr 5",
        "words",
        metric=r"test ppl +([\d.]+)",
    ),
    "dcgan": Port(
        "examples",
        "dcgan",
        "main.py --dataset folder --dataroot photos/train --niter 1 --batchSize 16 --ngf 4 --ndf 4 --workers 0 "
        "--manualSeed 1",
        "photos",
        ("torchvision",),
    ),
    "vae": Port("examples", "vae", "main.py --epochs 2", "mnist", ("torchvision",), metric=r"Test set loss: ([\d.]+)"),
    "siamese_network": Port(
        "examples", "siamese_network", "main.py --epochs 1 --lr 0.1", "few_digits", ("torchvision",)
    ),
    "super_resolution": Port(
        "examples",
        "super_resolution",
        "main.py --upscale_factor 8 --nEpochs 2 --batchSize 8 --threads 0",
        "bsds",
        ("torchvision", "six"),
    ),
    "gcn": Port("examples", "gcn", "main.py --epochs 20 --val-every 5", "cora", metric=r"accuracy ([\d.]+)"),
    "gat": Port(
        "examples",
        "gat",
        "main.py --epochs 5 --val-every 1 --hidden-dim 8",
        "cora",
        metric=r"accuracy ([\d.]+)",
    ),
    "fast_neural_style": Port(
        "examples",
        "fast_neural_style/neural_style",
        "neural_style.py train --dataset photos/train --style-image photos/style.jpg --save-model-dir saved "
        "--epochs 1 --batch-size 4 --image-size 32",
        "style",
        ("torchvision",),
    ),
    "actor_critic": Port(
        "examples",
        "reinforcement_learning",
        "actor_critic.py --episodes 20",
        "nothing",
        ("gymnasium",),
    ),
    "wgan_gp": Port(
        "PyTorch-GAN",
        "implementations",
        "wgan_gp.py --n_epochs 1",
        "gan_digits",
        ("torchvision",),
        cwd="implementations/wgan_gp",
    ),
    "time_sequence_prediction": Port(
        "examples", "time_sequence_prediction", "train.py --steps 2", "waves", ("matplotlib",)
    ),
    "nanoGPT": Port(
        "nanoGPT",
        "",
        "train.py --device=cpu --dtype=float32 --compile=False --dataset=text --n_layer=2 --n_head=2 --n_embd=32 "
        "--block_size=32 --batch_size=2 --gradient_accumulation_steps=6 --max_iters=20 --eval_interval=10 "
        "--eval_iters=2 --dropout=0.1 --warmup_iters=5 --lr_decay_iters=20",
        "tokens",
    ),
    "minGPT": Port(
        "minGPT",
        "",
        "chargpt.py --model.model_type=gpt-nano --trainer.max_iters=20 --trainer.batch_size=16 "
        "--trainer.num_workers=0 --data.block_size=32",
        "characters",
        cwd="projects/chargpt",
    ),
    "timm": Port(
        "pytorch-image-models",
        "",
        "train.py --data-dir photos --train-split train --val-split val --model resnet10t --num-classes 2 --epochs 1 "
        "--img-size 64 -b 16 -j 1 --no-prefetcher --device cpu --lr 0.05 --warmup-epochs 0 --model-ema --clip-grad 1 "
        "--mixup 0.2",
        "photos",
        ("timm", "torchvision"),
    ),
    "nlp_example": Port(
        "accelerate",
        "examples",
        "nlp_example.py --cpu",
        "paraphrases",
        ("accelerate", "transformers", "datasets"),
    ),
    "complete_nlp_example": Port(
        "accelerate",
        "examples",
        "complete_nlp_example.py --cpu --checkpointing_steps epoch --output_dir saved",
        "paraphrases",
        ("accelerate", "transformers", "datasets"),
    ),
    "cv_example": Port(
        "accelerate",
        "examples",
        "cv_example.py --cpu --data_dir pets",
        "pets",
        ("accelerate", "timm", "torchvision"),
    ),
    "alpaca": Port(
        "stanford_alpaca",
        "",
        "train.py --model_name_or_path tiny --data_path records.json --output_dir saved --use_cpu --report_to none "
        "--num_train_epochs 2 --learning_rate 1e-2 --warmup_steps 2 --lr_scheduler_type cosine --logging_steps 2 "
        "--save_strategy no --disable_tqdm true",
        "instructions",
        ("accelerate", "transformers"),
    ),
    "lightning_mnist": Port(
        "pytorch-lightning",
        "examples/pytorch/basics",
        "backbone_image_classifier.py",
        "many_digits",
        ("lightning", "torchvision"),
    ),
    "train_multi_GPU": Port(
        "deep-learning-for-image-processing",
        "pytorch_classification/train_multi_GPU",
        "train_multi_gpu_using_launch.py --epochs 1 --num_classes 2 --syncBN= --data-path photos/all",
        "photos",
        ("torchvision", "matplotlib", "tensorboard"),
    ),
}


def count(patch: Path) -> tuple[int, int]:
    """Lines that a patch adds, and lines that it takes away; blank ones aside."""
    lines = [line for line in patch.read_text().splitlines() if line[1:].strip() and line[:3] not in ("+++", "---")]
    return sum(line[0] == "+" for line in lines), sum(line[0] == "-" for line in lines)


def kept(patch: Path, root: Path) -> float:
    """The share of the lines of the patched files, as they are below ``root``, that the patch keeps."""
    files = re.findall(r"^--- a/(.+)$", patch.read_text(), re.MULTILINE)
    lines = sum(bool(line.strip()) for name in files for line in (root / name).read_text().splitlines())
    return 1 - count(patch)[1] / lines


def environment(folder: Path) -> dict[str, str]:
    """Without a network; with the operators that torchvision lacks beside some builds of torch."""
    path = [str(folder)]
    probe = subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False)
    if probe.returncode and b"torchvision::nms" in probe.stderr:
        path.insert(0, str(HERE / "torchvision_operators"))
    old = os.environ.get("PYTHONPATH")
    return {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HF_HOME": str(folder / "hf_home"),
        "TORCH_HOME": str(folder / "torch_home"),
        "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1",  # a script of an older torch loads arrays
        "PYTHONPATH": os.pathsep.join([*path, *([old] if old else [])]),
        "MPLBACKEND": "Agg",
    }


def copied(port: Port, scripts: Path, folder: Path) -> Path:
    """Copies the port's files to ``folder``; returns where it runs."""
    source = scripts / port.repository
    if port.folder:
        shutil.copytree(source / port.folder, folder / port.folder, dirs_exist_ok=True)
    else:
        shutil.copytree(source, folder, ignore=shutil.ignore_patterns(".git"), dirs_exist_ok=True)
    place = folder / (port.folder if port.cwd is None else port.cwd)
    make = [sys.executable, str(HERE / "stand_ins.py"), port.data, str(place)]
    subprocess.run(make, env=environment(folder), check=True)
    return place


def run(name: str, scripts: Path, patches: str, devices: str | None, timeout: float, more: str = "") -> str:
    """Runs a port in a copy of its own; returns its output.

    Args:
        name: of the port.
        scripts: the folder with the clones.
        patches: the folder of its patch, "" for the script as it is.
        devices: of ``lockstep run``, such as ``cpu:2``; None for plain ``python``.
        timeout: seconds.
        more: further arguments of the script.
    """
    port = PORTS[name]
    with tempfile.TemporaryDirectory(prefix="lockstep-port-") as folder:
        root = Path(folder)
        place = copied(port, scripts, root)
        if patches:
            patch = (HERE / patches / f"{name}.patch").resolve()
            subprocess.run(["git", "apply", "--whitespace=nowarn", str(patch)], cwd=root, check=True)
        launcher = [] if devices is None else ["-m", "lockstep", "run", "--devices", devices, "--threads", "1"]
        on_cpu = devices is None or devices.startswith("cpu")
        command = port.command if on_cpu else re.sub(r" --(use_)?cpu\b| --device[= ]cpu\b", "", port.command)
        completed = subprocess.run(
            [sys.executable, *launcher, *command.split(), *more.split()],
            cwd=place,
            env=environment(root),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    if completed.returncode:
        tail = "\n".join((completed.stdout + completed.stderr).splitlines()[-30:])
        raise RuntimeError(f"{name} on {devices}: exit status {completed.returncode}\n{tail}")
    return completed.stdout


def missing(port: Port, scripts: Path) -> str:
    """Why a port cannot run here; empty if it can."""
    absent = [package for package in port.needs if importlib.util.find_spec(package) is None]
    if absent:
        return f"not run: needs {', '.join(absent)}"
    return "" if (scripts / port.repository / port.folder).is_dir() else f"not run: no {port.repository}"


def check(name: str, patches: str, scripts: Path, devices: list[str], timeout: float, verbose: bool) -> bool:
    """Runs one port and prints its line; False if it failed or its fingerprints differ."""
    patch = HERE / patches / f"{name}.patch"
    added, removed = count(patch)
    if verdict := missing(PORTS[name], scripts):
        print(COLUMNS.format(name, patches, added, removed, "", verdict), flush=True)
        return True
    share = f"{kept(patch, scripts / PORTS[name].repository):.0%}"
    worlds: list[str | None] = [*devices] if patches in OURS else [None]
    try:
        outputs = [run(name, scripts, patches, world, timeout) for world in worlds]
    except (RuntimeError, subprocess.SubprocessError) as error:
        print(COLUMNS.format(name, patches, added, removed, share, error), flush=True)
        return False
    if verbose:
        print(outputs[0])
    found = [re.findall(r"\b[0-9a-f]{64}\b", output)[-1:] for output in outputs]
    equal = patches not in OURS or all(each and each == found[0] for each in found)
    verdict = "ran" if patches not in OURS else f"{found[0][0][:16]} equal" if equal else f"DIFFERENT: {found}"
    print(COLUMNS.format(name, patches, added, removed, share, verdict), flush=True)
    return equal


def compare(name: str, scripts: Path, seeds: list[int], timeout: float) -> None:
    """Prints what the script and its port on two processes say about the test set, for some seeds."""
    values = []
    for patches, devices in (("", None), ("lockstep", "cpu:2")):
        found = []
        for seed in seeds:
            output = run(name, scripts, patches, devices, timeout, f"--seed {seed}")
            found.append(float(re.findall(PORTS[name].metric, output)[-1]))
        values += [
            ", ".join(f"{value:g}" for value in found),
            statistics.mean(found),
            statistics.stdev(found),
        ]
    print(
        "{:22} script {} (mean {:.4g}, sd {:.2g})  port {} (mean {:.4g}, sd {:.2g})".format(name, *values),
        flush=True,
    )


def main() -> int:
    """Runs what was asked for; 1 if a port failed."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("scripts", type=Path, metavar="DIR", help="the folder with the clones")
    parser.add_argument("--only", nargs="+", choices=PORTS, default=list(PORTS), metavar="NAME")
    parser.add_argument("--patches", nargs="+", choices=[*OURS, *OTHERS], default=list(OURS))
    parser.add_argument(
        "--devices", nargs="+", default=["cpu:1", "cpu:2", "cpu:3"], help="of each run, as of 'lockstep run'"
    )
    parser.add_argument("--timeout", type=float, default=600, help="seconds for each run")
    parser.add_argument("-v", "--verbose", action="store_true", help="print what the scripts print")
    parser.add_argument("--seeds", nargs="+", type=int, default=[], help="compare numbers of the test set instead")
    arguments = parser.parse_args()
    if arguments.seeds:
        for name in arguments.only:
            if PORTS[name].metric and not missing(PORTS[name], arguments.scripts):
                compare(name, arguments.scripts.resolve(), arguments.seeds, arguments.timeout)
        return 0
    verdict = "fingerprint on " + ", ".join(arguments.devices)
    print(COLUMNS.format("script", "patches", "added", "removed", "kept", verdict), flush=True)
    how = arguments.scripts.resolve(), arguments.devices, arguments.timeout, arguments.verbose
    passed = [
        check(name, patches, *how)
        for name in arguments.only
        for patches in arguments.patches
        if (HERE / patches / f"{name}.patch").is_file()
    ]
    return int(not all(passed))


if __name__ == "__main__":
    sys.exit(main())
