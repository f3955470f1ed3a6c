"""Records what small trainings give under every layout, and compares it with what they gave before.

    python tests/safety/fingerprints.py record before.json        # more cases are added to a record that exists
    python tests/safety/fingerprints.py compare before.json       # after a change that must not move a bit

Every case has a digest of the result (losses, norms, evaluation, fingerprint of the model) and one of the checkpoint's
files. Only public names are used, so that the file runs unchanged before and after modules are moved. The bits depend
on the CPU and on torch: a record of another machine is refused, not compared.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import lockstep

EXIT_EQUAL, EXIT_DIFFERENT, EXIT_NOT_COMPARABLE = 0, 1, 2
UNTIED = ("perceptron", "resnet", "attention_untied")
"""The jobs without a weight that is tied across stages of a pipeline."""
OWN_LOOP = ("digits", "experts", "augmented", "saving", "frozen")
"""Jobs that use what a result could come to depend on beside the layout; trained under ddp."""
ONLY_FP32 = ("recurrent", "mixed")
"""More of them: torch has no LSTM in bf16 for every CPU, and no loss scale for parameters in fp16."""


@dataclass(frozen=True)
class Layout:
    """A strategy on a number of processes, and what is trained under it."""

    world: int
    options: dict[str, Any]
    jobs: tuple[str, ...] = ("perceptron", "resnet", "attention")
    precisions: tuple[str, ...] = ("fp32", "bf16", "fp16")
    alone: bool = False
    """Needs processes of its own, since it leaves the process group."""
    level_a: bool = True
    """Gives the bits of one device."""
    threads: int = 1

    @property
    def name(self) -> str:
        told = ",".join(f"{key}={value}" for key, value in _flat(self.options))
        return f"{self.world} {told}"


def _flat(options: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for key, value in options.items():
        if isinstance(value, dict):
            yield from ((f"{key}.{inner}", each) for inner, each in value.items())
        else:
            yield key, value


def _layouts() -> list[Layout]:
    ddp, interleaved = {"strategy": "ddp"}, {"pipeline": {"schedule": "interleaved"}}
    short = ("fp32", "fp16")
    mesh = [
        (2, {"mesh": "data=2,layers=2"}),
        (4, {"mesh": "data=2,pipeline=2"}),
        (4, {"mesh": "pipeline=2,data=2", **interleaved}),
        (4, {"mesh": "fsdp=2,pipeline=2"}),
        (4, {"mesh": "pipeline=2,fsdp=2", **interleaved}),
        (4, {"mesh": "data=2,pipeline=2", "pipeline": {"schedule": "gpipe"}}),
    ]
    return [
        Layout(1, {"strategy": "single"}, (*UNTIED, "attention")),
        Layout(1, {"strategy": "single"}, OWN_LOOP, short),
        *[Layout(world, ddp, ONLY_FP32, ("fp32",)) for world in (2, 3)],
        Layout(1, {"strategy": "single"}, ONLY_FP32, ("fp32",)),
        Layout(1, {**ddp, "threads": 2}, ("perceptron", "resnet"), ("fp32",), level_a=False, threads=2),
        Layout(1, {**ddp, "channels_last": True}, ("resnet", "augmented"), short, level_a=False),
        Layout(2, {**ddp, "channels_last": True}, ("resnet", "augmented"), short, level_a=False),
        *[Layout(world, ddp, OWN_LOOP, short) for world in (2, 3)],
        *[Layout(world, ddp) for world in (1, 2, 3, 4)],
        Layout(3, {**ddp, "shared_memory": False}, precisions=short),
        *[Layout(1, {"strategy": "dp", "dp": {"replicas": n}}, precisions=short) for n in (2, 3)],
        *[Layout(1, {"strategy": "layers", "layers": {"devices": n}}, UNTIED, short) for n in (2, 3)],
        *[Layout(world, {"strategy": "fsdp"}) for world in (1, 2, 3, 4)],
        Layout(2, {"strategy": "fsdp", "fsdp": {"reshard_after_forward": False}}, precisions=short),
        Layout(
            2,
            {"strategy": "fsdp", "fsdp": {"mixed_precision": "bf16"}},
            ("perceptron", "attention"),
            ("fp32",),
            level_a=False,
        ),
        *[Layout(world, {"strategy": "pipeline"}, UNTIED) for world in (1, 2, 3, 4)],
        Layout(2, {"strategy": "pipeline", "pipeline": {"schedule": "gpipe"}}, UNTIED, short),
        Layout(3, {"strategy": "pipeline", "pipeline": {"schedule": "gpipe"}}, UNTIED, short),
        Layout(2, {"strategy": "pipeline", **interleaved}, UNTIED, short),
        *[Layout(world, {"strategy": "hybrid", **told}, UNTIED, short) for world, told in mesh],
        *[
            Layout(world, {"strategy": "parameter_server", "parameter_server": {"servers": n}}, precisions=short)
            for world, n in ((2, 1), (3, 1), (4, 2))
        ],
        Layout(2, {"strategy": "tensor"}, precisions=("fp32", "bf16"), level_a=False),
        Layout(4, {"strategy": "hybrid", "mesh": "data=2,tensor=2"}, precisions=("fp32",), level_a=False),
        *[Layout(w, {"strategy": "single", "sync_batch_norm": True}, ("resnet",), short, level_a=False) for w in (1,)],
        *[Layout(w, {**ddp, "sync_batch_norm": True}, ("resnet",), short, level_a=False) for w in (2, 3)],
        *[
            Layout(w, {**ddp, "reduce": name}, precisions=("fp32", "bf16"), level_a=False)
            for name in ("ring", "bf16", "powersgd")
            for w in (2, 3)
        ],
        Layout(
            2,
            {"strategy": "parameter_server", "parameter_server": {"mode": "asynchronous"}},
            ("perceptron",),
            ("fp32",),
            alone=True,
            level_a=False,
        ),
    ]


COMMANDS = {
    "digits on 1": ("train", "digits", "--devices", "1"),
    "digits on 2": ("train", "digits", "--devices", "2"),
    "digits on 2, fsdp, bf16": (
        "train",
        "digits",
        "--devices",
        "2",
        "--strategy",
        "fsdp",
        "--precision",
        "bf16",
    ),
    "digits on 2, pipeline": ("train", "digits", "--devices", "2", "--strategy", "pipeline"),
}
"""Whole jobs by the command line, two epochs each."""


@dataclass
class Job:
    """A training; made anew in every process. Each epoch ends with a smaller step."""

    model: Any
    optimizer: Any
    data: Any
    loss: Callable[..., Any]
    metric: Callable[..., Any]
    options: dict[str, Any] = field(default_factory=dict)
    clip: float = 0.1
    workers: int | None = None


def _right(output: Any, target: Any) -> Any:
    return output.argmax(-1) == target


def _jobs() -> dict[str, Callable[[], Job]]:
    """The jobs by name. torch is imported here, so that the process that launches the ranks does without."""
    import torch
    from torch import nn
    from torch.nn import functional
    from torch.utils.checkpoint import checkpoint
    from torch.utils.data import Dataset, TensorDataset

    from lockstep import data, models

    def random(seed: int) -> torch.Generator:
        return torch.Generator().manual_seed(seed)

    def sgd(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-4)

    def adamw(model: nn.Module) -> torch.optim.Optimizer:
        plain = [p for p in model.parameters() if p.dim() < 2 and p.requires_grad]
        matrices = [p for p in model.parameters() if p.dim() >= 2 and p.requires_grad]
        groups = [{"params": matrices, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]
        return torch.optim.AdamW(groups, lr=3e-3)

    def photos(count: int) -> TensorDataset:
        rows = torch.randn(count, 3, 8, 8, generator=random(1))
        return TensorDataset(rows, torch.randint(5, (count,), generator=random(2)))

    def perceptron() -> Job:
        model = models.perceptron(in_features=64, hidden=(32, 16), dropout=0.1)
        digits = data.Digits("train")
        images = torch.stack([digits[index][0] for index in range(86)])
        labels = torch.tensor([int(digits[index][1]) for index in range(86)])
        options = {"global_batch": 32, "micro_batches": 8}
        return Job(model, sgd(model), TensorDataset(images, labels), nn.CrossEntropyLoss(), _right, options)

    class Residual(nn.Module):
        """Two convolutions beside a shortcut."""

        def __init__(self, width: int) -> None:
            super().__init__()
            self.body = nn.Sequential(
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
                nn.ReLU(),
                nn.Conv2d(width, width, 3, padding=1, bias=False),
                nn.BatchNorm2d(width),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return functional.relu(x + self.body(x))

    def small_resnet() -> nn.Sequential:
        start = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()
        end = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)
        return nn.Sequential(*start, Residual(8), Residual(8), *end)

    def resnet() -> Job:
        model = small_resnet()
        options = {"global_batch": 16, "micro_batches": 8}
        return Job(model, adamw(model), photos(42), nn.CrossEntropyLoss(), _right, options)

    def frozen() -> Job:
        model = small_resnet()
        models.freeze(model, ["0", "3"])
        model[3].eval()
        loss = nn.CrossEntropyLoss(reduction="none")
        options = {"global_batch": 16, "micro_batches": 8}
        return Job(model, sgd(model), photos(43), loss, _right, options)

    def tokens(count: int) -> TensorDataset:
        text = torch.randint(13, (count, 8), generator=random(3))
        targets = text[:, 1:].clone()
        lengths = torch.randint(1, 8, (count, 1), generator=random(4))
        targets[torch.arange(7) >= lengths] = -100
        return TensorDataset(text[:, :-1].contiguous(), targets)

    def token_loss(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        flat = logits.flatten(0, 1).float()
        total = functional.cross_entropy(flat, targets.flatten(), ignore_index=-100, reduction="sum")
        return total, (targets != -100).sum()

    def token_count(logits: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        known = targets != -100
        return ((logits.argmax(2) == targets) & known).sum(), known.sum()

    def attention(tied: bool = True) -> Job:
        size = {"vocabulary_size": 13, "max_length": 7, "width": 16, "depth": 2, "heads": 2}
        model = models.transformer(**size, dropout=0.2, tied=tied)
        options = {"global_batch": 8, "micro_batches": 8}
        return Job(model, adamw(model), tokens(21), token_loss, token_count, options, clip=0.3)

    def attention_untied() -> Job:
        return attention(tied=False)

    def digits() -> Job:
        model = models.digits_net(width=4)
        rows = data.Digits("validation")
        rows.transform = data.PadCropFlip(padding=1, flip=0.5)
        options = {"global_batch": 104, "micro_batches": 8}
        return Job(model, sgd(model), rows, nn.CrossEntropyLoss(), _right, options, workers=1)

    def recurrent() -> Job:
        model = models.lstm(num_classes=3, vocabulary_size=13, hidden_size=12, num_layers=2, dropout=0.2)
        rows = torch.randint(13, (42, 6), generator=random(5)), torch.randint(3, (42,), generator=random(6))
        loss = nn.CrossEntropyLoss(label_smoothing=0.1)
        options = {"global_batch": 16, "micro_batches": 8}
        return Job(model, adamw(model), TensorDataset(*rows), loss, _right, options)

    class Experts(nn.Module):
        """Uses one of four experts per micro-batch, and one never."""

        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(5)])
            self.gains = nn.ParameterList([nn.Parameter(torch.full((), 1.0 + index)) for index in range(3)])
            self.head = nn.Linear(6, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen = int(x[0, 0].abs() * 16) % 4
            x = self.experts[chosen](x).tanh()
            if chosen % 2:
                x = functional.dropout(x * self.gains[chosen // 2], 0.3, self.training)
            return self.head(x)

    def weighted_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        losses = functional.cross_entropy(output, target[:, 0].long(), reduction="none")
        return (losses * target[:, 1]).sum(), target[:, 1].sum()

    def weighted_right(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return ((output.argmax(1) == target[:, 0]) * target[:, 1]).sum(), target[:, 1].sum()

    def experts() -> Job:
        model = Experts()
        labels = torch.randint(2, (39,), generator=random(7)).float()
        targets = torch.stack([labels, torch.rand(39, generator=random(8))], 1)
        rows = TensorDataset(torch.randn(39, 6, generator=random(9)), targets)
        options = {"global_batch": 12, "micro_batches": 6}
        return Job(model, adamw(model), rows, weighted_loss, weighted_right, options)

    class Augmented(Dataset[Any]):
        """Rows with noise from torch's generator, for loader workers."""

        rows, labels = torch.randn(42, 6, generator=random(10)), torch.arange(42) % 2

        def __len__(self) -> int:
            return 42

        def __getitem__(self, index: int) -> Any:
            return self.rows[index] + 0.3 * torch.randn(6) * (torch.rand(()) < 0.7), self.labels[index]

    def augmented() -> Job:
        model = nn.Sequential(nn.Linear(6, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
        options = {"global_batch": 16, "micro_batches": 8}
        return Job(model, sgd(model), Augmented(), nn.CrossEntropyLoss(), _right, options, workers=2)

    class Mixed(nn.Module):
        """Parameters of four number types, one used twice, one empty."""

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(3, 4, 3)
            self.wide = nn.Parameter(torch.randn(4, dtype=torch.float64))
            self.empty = nn.Parameter(torch.zeros(0, 3, dtype=torch.float16))
            self.narrow = nn.Parameter(torch.randn(5).to(torch.bfloat16))
            self.twice = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.conv(x).mean((2, 3)) * self.wide.float() + self.narrow[:4].float() + self.empty.sum()
            return functional.pad(self.twice(self.twice(x).tanh()), (0, 1)) + self.narrow.float()

    def mixed() -> Job:
        model = Mixed()
        options = {"global_batch": 16, "micro_batches": 8}
        return Job(model, sgd(model), photos(43), nn.CrossEntropyLoss(), _right, options)

    class Saving(nn.Module):
        """Activation checkpointing around draws of its own, InstanceNorm's statistics, and a buffer of the user's."""

        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList([nn.Sequential(nn.Conv2d(3, 3, 1), nn.Dropout(0.3)) for _ in range(2)])
            self.norm = nn.InstanceNorm2d(3, track_running_stats=True)
            self.head = nn.Linear(3, 5)
            self.register_buffer("mean", torch.zeros(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.norm(checkpoint(self._twice, x, use_reentrant=False)).amax((2, 3))
            if self.training:
                self.mean = 0.9 * self.mean + 0.1 * x.mean(0)
            return self.head(x - self.mean)

        def _twice(self, x: torch.Tensor) -> torch.Tensor:
            for block in (self.blocks[0], self.blocks[1], self.blocks[0]):
                x = functional.dropout(block(x), 0.1)
            return x

    def saving() -> Job:
        model = Saving()
        options = {"global_batch": 16, "micro_batches": 8, "running_buffers": ("mean",)}
        return Job(model, sgd(model), photos(43), nn.CrossEntropyLoss(), _right, options)

    made = (
        perceptron,
        resnet,
        attention,
        attention_untied,
        digits,
        recurrent,
        experts,
        augmented,
        mixed,
        saving,
    )
    return {make.__name__: make for make in (*made, frozen)}


def train_all(cases: list[list[Any]], directory: str) -> dict[str, dict[str, str]]:
    """Trains all cases (name, job, options) of a world on this rank; the digests by name, on rank 0."""
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    jobs = _jobs()
    alone = len(cases) == 1
    # Holds the process group for all
    first = None if alone else lockstep.init(global_batch=8, strategy="ddp")
    found = {}
    for number, (name, job, options) in enumerate(cases):
        try:
            found[name] = _train(jobs[job], options, Path(directory) / str(number))
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise
    if first is not None:
        first.close()
    return found if int(os.environ["RANK"]) == 0 else {}


def _train(make: Callable[[], Job], options: dict[str, Any], directory: Path) -> dict[str, str]:
    import torch

    torch.manual_seed(int(os.environ["RANK"]))  # every rank builds another model; rank 0's counts
    job, lines = make(), []
    told = {"seed": 3, "threads": 1, "fingerprint_every": 5, "directory": directory, **job.options, **options}
    run = lockstep.init(**told)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(job.optimizer, 8)
    _, optimizer, schedule = run.prepare(job.model, job.optimizer, schedule)
    for epoch in run.epochs(3):
        for batch in run.batches(job.data, workers=job.workers):
            lines.append(f"loss {float(run.backward(batch, job.loss)).hex()}")
            if not told.get("parameter_server", {}).get("mode"):
                lines.append(f"norm {float(run.clip_gradients(job.clip)).hex()}")
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        lines.append(f"evaluation {epoch} {float(run.evaluate(job.data, job.metric)).hex()}")
    lines += [f"model {run.fingerprint()}", f"skipped {run.skipped_steps}", f"at {run.position}"]
    folder = run.save(wait=True)
    run.close()
    found = {
        "result": _digest("\n".join(lines)),
        "model": lines[-3].removeprefix("model "),
        "end": ", ".join(lines[-2:]),
    }
    return {**found, "checkpoint": _checkpoint(folder)} if folder is not None else found


def _checkpoint(folder: Path) -> str:
    """One digest of all files of a checkpoint, but for the id of the run that wrote it."""
    lines = []
    for path in sorted(folder.iterdir()):
        if path.name == "manifest.json":
            body = json.loads(path.read_bytes())["body"]
            lines.append(f"{path.name} {body['format']} {body['step']} {sorted(body['files'])}")
        elif path.name == "state.json":
            state = json.loads(path.read_bytes())
            del state["progress"]["run"]
            lines.append(f"{path.name} {json.dumps(state, sort_keys=True)}")
        else:
            lines.append(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return _digest("\n".join(lines))


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _groups() -> dict[str, tuple[int, int, list[list[Any]]]]:
    """The cases in groups that share processes: world, threads, and (name, job, options) of each case."""
    groups: dict[str, tuple[int, int, list[list[Any]]]] = {}
    for layout in _layouts():
        for job in layout.jobs:
            for precision in layout.precisions:
                name = f"{job} {precision} / {layout.name}"
                key = name if layout.alone else f"{layout.world} {layout.threads}"
                group = groups.setdefault(key, (layout.world, layout.threads, []))
                group[2].append([name, job, {**layout.options, "precision": precision}])
    return groups


def environment() -> dict[str, str]:
    """The machine and software that bits depend on beside the code."""
    import torch

    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    vectors = [name for name in flags[1].split() if name.startswith(("avx", "amx"))] if flags else []
    return {
        "CPU": f"{model[1] if model else platform.processor()} ({platform.machine()})",
        "vector instructions": " ".join([torch.backends.cpu.get_cpu_capability(), *vectors]),
        "torch": str(torch.__version__),
    }


def measure(only: str) -> dict[str, dict[str, str]]:
    """Trains everything whose name contains ``only``."""
    found: dict[str, dict[str, str]] = {}
    for key, (world, threads, cases) in _groups().items():
        chosen = [case for case in cases if only in case[0]]
        if chosen:
            print(f"group {key}: {len(chosen)} cases on {world} processes", file=sys.stderr, flush=True)
            with tempfile.TemporaryDirectory() as folder:
                settings = {"devices": f"cpu:{world}", "threads": threads, "log_directory": f"{folder}/logs"}
                try:
                    found |= lockstep.launch(train_all, chosen, folder, **settings)[0]
                except lockstep.RankError as error:
                    print(f"group {key}: {error}", file=sys.stderr)
                    found |= {case[0]: {"failed": "yes"} for case in chosen}
    for name, words in COMMANDS.items():
        if only in name:
            print(name, file=sys.stderr, flush=True)
            found[name] = {"model": _command(words)}
    return found


def _command(words: tuple[str, ...]) -> str:
    more = ["--epochs", "2", "--threads", "1", "--set", "log.tensorboard=false"]
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "lockstep", *words, *more]
        result = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    line = re.search(r"^fingerprint\s+([0-9a-f]{64})", result.stdout, re.MULTILINE)
    if result.returncode or line is None:
        raise SystemExit(f"{' '.join(command)} failed:\n{result.stdout}{result.stderr}")
    return line[1]


def require_level_a(found: dict[str, dict[str, str]]) -> list[str]:
    """The cases of level A that do not end in the model of one device."""
    wrong = [f"{name}: failed" for name, case in found.items() if "failed" in case]
    for layout in (each for each in _layouts() if each.level_a):
        for job in layout.jobs:
            for precision in layout.precisions:
                name, alone = f"{job} {precision} / {layout.name}", f"{job} {precision} / 1 strategy=single"
                both = name in found and alone in found
                if both and found[name].get("result") != found[alone].get("result"):
                    wrong.append(f"{name}: not the result of one device")
    return wrong


def differences(before: dict[str, dict[str, str]], now: dict[str, dict[str, str]]) -> list[str]:
    """One line for each case that differs, or that only one side has."""
    lines = []
    for name in sorted(before.keys() | now.keys()):
        if name not in now or name not in before:
            lines.append(f"{name}: only {'before' if name in before else 'now'}")
            continue
        keys = sorted(before[name].keys() | now[name].keys())
        if changed := [key for key in keys if before[name].get(key) != now[name].get(key)]:
            lines.append(f"{name}: another {', '.join(changed)}")
    return lines


def main() -> int:
    """Runs the command of the module's docstring."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("mode", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="cases whose name contains this")
    arguments = parser.parse_args()
    here = environment()
    if arguments.mode == "compare":
        record = json.loads(arguments.file.read_text())
        if record["environment"] != here:
            print(f"Cannot compare: {arguments.file} was recorded under {record['environment']}, this is {here}.")
            return EXIT_NOT_COMPARABLE
    found = measure(arguments.only)
    wrong = require_level_a(found)
    if arguments.mode == "record":
        if arguments.file.exists():
            kept = json.loads(arguments.file.read_text())
            found = {**(kept["cases"] if kept["environment"] == here else {}), **found}
        text = json.dumps({"environment": here, "cases": found}, indent=1, sort_keys=True)
        arguments.file.write_text(text + "\n")
    else:
        before = {name: case for name, case in record["cases"].items() if arguments.only in name}
        wrong += differences(before, found)
    print("\n".join([*wrong, f"{len(found)} cases, {len(wrong)} differences"]))
    return EXIT_DIFFERENT if wrong else EXIT_EQUAL


if __name__ == "__main__":
    sys.exit(main())
