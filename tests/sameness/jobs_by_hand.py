"""Random job files against loops written by hand, in float64: every logged number, the weights, the best checkpoint.

    python -m tests.sameness.jobs_by_hand --seeds 0:50            what differs, and a count
    python -m tests.sameness.jobs_by_hand --seeds 17:18 --show    the job of a seed

The loop by hand is ordinary PyTorch without micro-batches. Of Lockstep it takes the order of the samples alone.
"""

import argparse
import json
import math
import os
import random
import subprocess
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file
from torch import nn

from lockstep.core.plan import BatchShape, SamplePlan

ROOT = Path(__file__).resolve().parents[2]
BLOCKS = {"stem": 0, "norm": 0, "layers.0": 1, "layers.1": 2, "head": 3}
IGNORED = -100
TIMES = ("seconds", "samples_per_second")


class Points(torch.utils.data.Dataset):
    """Random points with classes, some of which may be ignored, with probabilities of classes, or with numbers."""

    def __init__(self, count, seed, kind):
        draws = torch.Generator().manual_seed(seed)
        self.x = torch.randn(count, 6, generator=draws, dtype=torch.float64)
        self.y = torch.randint(0, 4, (count,), generator=draws)
        if kind == "ignored":
            self.y[torch.rand(count, generator=draws) < 0.2] = IGNORED
        elif kind == "numbers":
            self.y = self.x[:, :2] * 2 + torch.randn(count, 2, generator=draws, dtype=torch.float64)
        elif kind == "probabilities":
            self.y = torch.rand(count, 4, generator=draws, dtype=torch.float64).softmax(1)

    def __len__(self):
        return len(self.x)

    def __getitem__(self, index):
        return self.x[index], self.y[index]


class Net(nn.Module):
    def __init__(self, outputs, norm):
        super().__init__()
        self.stem = nn.Linear(6, 8)
        self.norm = {"none": nn.Identity, "layer": nn.LayerNorm, "batch": nn.BatchNorm1d}[norm](8)
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(2)])
        self.head = nn.Linear(8, outputs)
        self.double()
        draws = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.randn(each.shape, generator=draws, dtype=torch.float64) * 0.4)

    def forward(self, x):
        x = self.norm(self.stem(x)).tanh()
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.head(x)


def size(output, target):
    return output.abs().mean(1)


def top_two(output, target):
    return (output.topk(2, 1).indices == target[:, None]).any(1).double()


def draw(seed):
    """The job of a seed, as tables of settings by their names."""
    r = random.Random(f"by hand {seed}")
    here, kind = "tests.sameness.jobs_by_hand", r.choice(["classes", "classes", "ignored", "numbers", "probabilities"])
    samples, batch, epochs = r.randint(9, 40), r.choice([4, 6, 8, 12]), r.randint(1, 4)
    parts = r.choice([each for each in (1, 2, 3, 4, 6) if batch % each == 0])
    norm = r.choice(["none", "layer", "batch"])
    job = {
        "model": {"target": f"{here}:Net", "norm": norm, "outputs": 2 if kind == "numbers" else 4},
        "data": {"workers": r.choice([0, 0, 1])},
        "data.train": {"target": f"{here}:Points", "count": samples, "seed": seed, "kind": kind},
        "loss": {"target": "torch.nn:CrossEntropyLoss"},
        "optimizer": r.choice(
            [
                {"target": "torch.optim:SGD", "momentum": 0.9},
                {"target": "torch.optim:AdamW"},
                {"target": "torch.optim:Adam"},
            ]
        ),
        "schedule": {"kind": r.choice(["constant", "cosine", "linear", "step"])},
        "training": {"epochs": epochs, "global_batch": batch, "micro_batches": parts, "seed": seed},
        "run": {"devices": f"cpu:{r.choice([1, 1, 1, 2]) if parts > 1 else 1}"},
        "checkpoint": {"every_epochs": r.choice([0, 1]), "every_steps": r.choice([0, 0, 2])},
        "log": {"every": r.choice([1, 2, 3, 10]), "tensorboard": False},
    }
    job["optimizer"] |= {"lr": r.choice([0.01, 0.05]), "weight_decay": r.choice([0.0, 0.1])}
    if kind == "numbers":
        job["loss"] = {"target": r.choice(["torch.nn:MSELoss", "torch.nn:SmoothL1Loss", "torch.nn.functional:l1_loss"])}
    elif kind == "classes":
        job["loss"] = {"target": r.choice(["torch.nn:CrossEntropyLoss", "torch.nn.functional:cross_entropy"])}
    if kind in ("classes", "ignored") and r.random() < 0.5:
        job["loss"]["label_smoothing"] = 0.1
    training, schedule = job["training"], job["schedule"]
    if norm == "batch" and parts > 1:
        training["sync_batch_norm"] = True
    if r.random() < 0.3 and samples >= batch:
        training["drop_last"] = True
    steps = epochs * (samples // batch if "drop_last" in training else -(-samples // batch))
    if r.random() < 0.4:
        training["max_steps"] = steps = r.randint(1, steps)
    if r.random() < 0.9:
        job["data.validation"] = {"target": f"{here}:Points", "count": r.randint(3, 30), "seed": seed + 1, "kind": kind}
        training |= {"evaluate_every_steps": r.randint(1, 5)} if r.random() < 0.4 else {}
        training |= {"early_stop": r.randint(1, 2)} if r.random() < 0.4 else {}
        job |= {"metrics.size": {"target": f"{here}:size"}} if r.random() < 0.4 else {}
        if kind == "classes" and r.random() < 0.5:
            job["metrics.top_two_accuracy"] = {"target": f"{here}:top_two"}
    training |= {"clip_norm": r.choice([0.1, 0.5, 3.0])} if r.random() < 0.5 else {}
    training |= {"evaluate_every": r.randint(1, 3)} if r.random() < 0.4 else {}
    training |= {"ema_decay": r.choice([0.5, 0.9])} if r.random() < 0.4 else {}
    if steps > 1 and r.random() < 0.4:
        schedule["warmup_steps"] = r.randint(1, min(4, steps - 1))
    if schedule["kind"] in ("cosine", "linear"):
        schedule["final_factor"] = r.choice([0.0, 0.1])
    elif schedule["kind"] == "step":
        schedule |= {"step_epochs": r.choice([1.0, 2.0]), "step_factor": 0.3}
    parameters = {"decay": "matrices"} if r.random() < 0.4 else {}
    parameters |= {"layer_decay": 0.7} if r.random() < 0.4 else {}
    if r.random() < 0.4:
        groups = [
            {"names": ["head"], "lr": 0.003},
            {"names": ["*", "!layers.*"], "weight_decay": 0.03},
            {"names": ["layers.1"], "lr": 0.02, "weight_decay": 0.0},
        ]
        parameters["groups"] = r.sample(groups, r.randint(1, 2))
    return job | ({"parameters": parameters} if parameters else {})


def written(job):
    """The job as the text of a file."""
    lines = []
    for table, values in job.items():
        lines.append(f"[{table}]")
        lines += [f"{key} = {_toml(value)}" for key, value in values.items()]
    return "\n".join(lines) + "\n"


def _toml(value):
    if isinstance(value, list):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)


@dataclass
class Sums:
    """Of some steps: losses and what they are means over, right answers and all of them."""

    loss: float = 0.0
    weight: int = 0
    right: int = 0
    answers: int = 0

    def add(self, loss, output, target):
        of_classes = output.shape[1] == 4
        classes = target.argmax(1) if target.is_floating_point() and of_classes else target
        counts = classes != IGNORED if of_classes else torch.ones(len(target), dtype=torch.bool)
        self.loss, self.weight = self.loss + float(loss) * int(counts.sum()), self.weight + int(counts.sum())
        if of_classes:
            self.right += int((output.argmax(1) == classes)[counts].sum())
            self.answers += int(counts.sum())

    def means(self):
        found = {"loss": self.loss / self.weight} if self.weight else {}
        return found | ({"accuracy": self.right / self.answers} if self.answers else {})


@dataclass
class ByHand:
    """The training of a job in one loop, and all that it logs."""

    job: dict
    log: list = field(default_factory=list)
    values: dict = field(default_factory=dict)
    """Of the newest evaluation."""
    average: dict | None = None
    best: tuple | None = None
    """The best result, and its step."""
    since_best: int = 0
    step: int = 0

    def __post_init__(self):
        job = self.job
        self.train, self.validation = (_made(Points, job.get(f"data.{name}")) for name in ("train", "validation"))
        self.model, self.settings = _made(Net, job["model"]), job["training"]
        self.of_classes = job["data.train"]["kind"] != "numbers"
        arguments = {key: value for key, value in job["loss"].items() if key != "target"}
        module, name = job["loss"]["target"].split(":")
        if module == "torch.nn":
            self.loss = getattr(nn, name)(**arguments)
        else:
            self.loss = lambda output, target: getattr(nn.functional, name)(output, target, **arguments)
        how = {key: value for key, value in job["optimizer"].items() if key not in ("target", "lr", "weight_decay")}
        groups = [self._group(*each) for each in self.model.named_parameters()]
        self.optimizer = getattr(torch.optim, job["optimizer"]["target"].split(":")[1])(groups, **how)
        self.first_rates = [group["lr"] for group in groups]
        settings, samples = self.settings, len(self.train)
        self.plan = SamplePlan(
            samples=samples,
            shape=BatchShape(global_batch=settings["global_batch"], micro_batches=settings["micro_batches"]),
            seed=settings["seed"],
            drop_last=settings.get("drop_last", False),
            smallest_micro_batch=2 if job["model"]["norm"] == "batch" else 1,
        )
        self.per_epoch = self.plan.steps_per_epoch
        self.steps = min(self.per_epoch * settings["epochs"], settings.get("max_steps", math.inf))
        self.run()

    def _group(self, name, parameter):
        job, given = self.job["optimizer"], self.job.get("parameters", {})
        block = next(number for block, number in BLOCKS.items() if name.startswith(f"{block}."))
        group = {"lr": job["lr"] * given.get("layer_decay", 1.0) ** (3 - block), "weight_decay": job["weight_decay"]}
        if given.get("decay") == "matrices" and (name.endswith("bias") or name.startswith("norm")):
            group["weight_decay"] = 0.0
        for changed in given.get("groups", ()):
            is_named = False
            for pattern in changed["names"]:
                wanted = pattern.removeprefix("!")
                if fnmatchcase(name, wanted) or fnmatchcase(name, f"{wanted}.*"):
                    is_named = wanted == pattern
            group |= {key: value for key, value in changed.items() if key != "names"} if is_named else {}
        return {"params": [parameter], **group}

    def _factor(self, step):
        schedule = self.job["schedule"]
        warmup = schedule.get("warmup_steps", 0)
        if step < warmup:
            return (step + 1) / warmup
        if schedule["kind"] == "constant":
            return 1.0
        if schedule["kind"] == "step":
            return schedule["step_factor"] ** ((step - warmup) // round(schedule["step_epochs"] * self.per_epoch))
        done, last = (step - warmup) / (self.steps - warmup), schedule["final_factor"]
        return last + (1 - last) * ((1 + math.cos(math.pi * done)) / 2 if schedule["kind"] == "cosine" else 1 - done)

    def run(self):
        for epoch in range(self.settings["epochs"]):
            if self._epoch(epoch):
                break

    def _epoch(self, epoch):
        """One epoch; returns whether the run ends with it, or within it."""
        settings, whole, since = self.settings, Sums(), Sums()
        every = settings.get("evaluate_every_steps", 0)
        for position in range(self.per_epoch):
            rates = self._step(epoch, position, (whole, since))
            step, is_last = self.step, position == self.per_epoch - 1
            is_due = every and step % every == 0 and not is_last and step != settings.get("max_steps")
            told = step % self.job["log"]["every"] == 0 or is_last or step == settings.get("max_steps")
            if told:
                self._note("step", epoch, **since.means(), rates=rates)
                since.__init__()
            if is_due:
                self._evaluate()
                if self._has_stopped() and not told:
                    self._note("step", epoch, **since.means(), rates=rates)
                self._note("step", epoch, **self.values)
            if not is_last and self._is_over():
                if step == settings.get("max_steps"):
                    self._evaluate()
                done = epoch + (position + 1) / self.per_epoch
                self._note("epoch", epoch, **whole.means(), **self.values, epochs_done=done)
                return True
        is_over = epoch + 1 == settings["epochs"] or self._is_over()
        is_due = (epoch + 1) % settings.get("evaluate_every", 1) == 0 or (every and self.step % every == 0)
        found = self._evaluate() if is_over or is_due else {}
        self._note("epoch", epoch, **whole.means(), **found)
        return is_over or self._is_over()

    def _step(self, epoch, position, sums):
        for group, rate in zip(self.optimizer.param_groups, self.first_rates, strict=True):
            group["lr"] = rate * self._factor(self.step)
        rates = sorted({group["lr"] for group in self.optimizer.param_groups})
        numbers = np.concatenate(self.plan.step(epoch, position).indices)
        target = self.train.y[numbers]
        output = self.model(self.train.x[numbers])
        is_empty = self.of_classes and not target.is_floating_point() and bool((target == IGNORED).all())
        loss = output.sum() * 0 if is_empty else self.loss(output, target)
        self.optimizer.zero_grad()
        loss.backward()
        if "clip_norm" in self.settings:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.settings["clip_norm"])
        self.optimizer.step()
        self.step += 1
        now = {name: each.clone() for name, each in self.model.state_dict().items()}
        for name, _ in self.model.named_parameters() if self.average is not None else ():  # buffers are copied
            now[name] = torch.lerp(now[name], self.average[name], self.settings.get("ema_decay", 0.0))
        self.average = now
        for each in sums:
            each.add(loss.detach(), output.detach(), target)
        return rates

    def _evaluate(self):
        if self.validation is None:
            return {}
        model, x, y = _made(Net, self.job["model"]), self.validation.x, self.validation.y
        model.load_state_dict(self.average)
        model.eval()
        with torch.no_grad():
            output, sums = model(x), Sums()
            sums.add(self.loss(output, y), output, y)
            found = {f"validation_{name}": value for name, value in sums.means().items()}
            for name, function in {"size": size, "top_two_accuracy": top_two}.items():
                if f"metrics.{name}" in self.job:
                    found[f"validation_{name}"] = float(function(output, y).mean())
        value = found["validation_accuracy"] if self.of_classes else -found["validation_loss"]
        if self.best is None or value > self.best[0]:
            self.best, self.since_best = (value, self.step), 0
        else:
            self.since_best += 1
        self.values = found
        return found

    def _has_stopped(self):
        return 0 < self.settings.get("early_stop", 0) <= self.since_best

    def _is_over(self):
        return self.step == self.settings.get("max_steps") or self._has_stopped()

    def _note(self, kind, epoch, **values):
        self.log.append({"kind": kind, "step": self.step, "epoch": epoch, **values})


def _made(kind, table):
    return None if table is None else kind(**{key: value for key, value in table.items() if key != "target"})


def difference(job, folder, by_hand=None):
    """Trains a job in an empty folder; returns what differs from the loop by hand, or how it failed.

    By hand it is the same job, unless another one is given.
    """
    Path(folder, "job.toml").write_text(written(job))
    path = os.pathsep.join([str(ROOT / "src"), str(ROOT), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "lockstep", "train", "job.toml"]
    ended = subprocess.run(
        command, cwd=folder, env={**os.environ, "PYTHONPATH": path}, capture_output=True, text=True, timeout=280
    )
    if ended.returncode:
        return f"exit status {ended.returncode}: {ended.stderr[-1500:]}"
    (run,) = Path(folder, "runs").iterdir()
    log = [json.loads(line) for line in (run / "log.jsonl").read_text().splitlines()]
    wanted = ByHand(by_hand or job)
    if len(log) != len(wanted.log):
        return f"the log has {len(log)} lines, and {len(wanted.log)} by hand"
    for line, expected in zip(log, wanted.log, strict=True):
        rates = {value for key, value in line.items() if key.startswith("learning_rate")}
        found = {key: each for key, each in line.items() if key not in TIMES and not key.startswith("learning_rate")}
        if rates:
            found["rates"] = sorted(rates)
        if not _is_close(found, expected):
            return f"{found}\nby hand {expected}"
    files = {"model.safetensors": wanted.model.state_dict()}
    files |= {"average.safetensors": wanted.average} if "ema_decay" in job["training"] else {}
    for file, tensors in files.items():
        stored = load_file(run / file)
        if stored.keys() != tensors.keys():
            return f"{file} has {sorted(stored)}"
        for name, tensor in tensors.items():
            if not torch.allclose(stored[name], tensor, rtol=1e-8, atol=1e-10):
                return f"{name} in {file}"
    if wanted.best is not None:
        value, step = wanted.best
        best = json.loads((run / "best.json").read_text())["body"]
        if best["step"] != step or not math.isclose(abs(value), float(best["value"]), rel_tol=1e-6):
            return f"best.json has {best}, and by hand it is {value} at step {step}"
    return ""


def _is_close(found, wanted):
    if isinstance(found, dict):
        return found.keys() == wanted.keys() and all(_is_close(found[key], wanted[key]) for key in found)
    if isinstance(found, list):
        return len(found) == len(wanted) and all(map(_is_close, found, wanted))
    return found == wanted or (isinstance(found, float) and math.isclose(found, wanted, rel_tol=1e-6, abs_tol=1e-9))


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seeds", default="0:20", help="the first and, after a colon, the first that is left out")
    parser.add_argument("--show", action="store_true", help="print the jobs instead")
    given = parser.parse_args()
    counts = Counter()
    for seed in range(*map(int, given.seeds.split(":"))):
        if given.show:
            print(written(draw(seed)))
            continue
        with tempfile.TemporaryDirectory() as folder:
            found = difference(draw(seed), folder)
        counts["equal" if not found else "refused" if found.startswith("exit status") else "differs"] += 1
        if found:
            print(f"seed {seed}: {found}")
    print(dict(counts))


if __name__ == "__main__":
    main()
