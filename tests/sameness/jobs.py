"""Random job files on several layouts: the fingerprint, every logged number and the last lines of one device.

    python -m tests.sameness.jobs --seeds 0:50            what differs or fails, and a count
    python -m tests.sameness.jobs --seeds 17:18 --show    the job of a seed

``single`` is the reference. Two layouts are drawn for each job. Some of them go on from one of its checkpoints; others
are stopped by a signal at some step and go on in their own folder, in which every file must then be that of the run
that never stopped; of others a rank is killed, and the launcher goes on. Layouts below level A have their own whole run
as the reference. A job that is refused counts as such, on ``single`` or elsewhere.
"""

import argparse
import csv
import hashlib
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import tomllib
from collections import Counter
from pathlib import Path

from tests.sameness.job_parts import KILL, MODELS, STOP, write_photos, write_weights

ROOT = Path(__file__).resolve().parents[2]
PARTS = "tests.sameness.job_parts"
OPTIMIZERS = [
    {"target": "torch.optim:SGD", "lr": 0.05, "momentum": 0.9},
    {"target": "torch.optim:AdamW", "lr": 0.01},
    {"target": "torch.optim:Adagrad", "lr": 0.05},
    {"target": "torch.optim:RMSprop", "lr": 0.005, "momentum": 0.5},
    {"target": "torch.optim:NAdam", "lr": 0.01, "weight_decay": 0.01},
]
MORE_OPTIMIZERS = [
    {"target": "torch.optim:Adam", "lr": 0.01, "amsgrad": True, "foreach": True},
    {"target": "torch.optim:SGD", "lr": 0.05, "momentum": 0.8, "nesterov": True, "weight_decay": 0.01},
    {"target": "torch.optim:RAdam", "lr": 0.01},
    {"target": "torch.optim:Adamax", "lr": 0.01},
    {"target": "torch.optim:Adadelta", "lr": 0.5},
    {"target": "torch.optim:Rprop", "lr": 0.01},
    {"target": "torch.optim:ASGD", "lr": 0.05, "t0": 2.0},
    {"target": "torch.optim:Adafactor", "lr": 0.02},
]
SCHEDULES = [
    {"kind": "constant"},
    {"kind": "cosine", "final_factor": 0.1},
    {"kind": "linear", "warmup_steps": 3},
    {"kind": "step", "step_epochs": 1, "warmup_epochs": 0.5},
    {"target": "torch.optim.lr_scheduler:CosineAnnealingWarmRestarts", "T_0": 3},
    {"target": "torch.optim.lr_scheduler:StepLR", "step_size": "{steps_per_epoch}"},
    {
        "target": "torch.optim.lr_scheduler:OneCycleLR",
        "max_lr": 0.05,
        "total_steps": "{steps}",
        "cycle_momentum": False,
    },
]
LOSSES = [
    {"target": "torch.nn:CrossEntropyLoss"},
    {"target": "torch.nn:CrossEntropyLoss", "label_smoothing": 0.1},
    {"target": "torch.nn:CrossEntropyLoss", "ignore_index": 3},
    {"target": "torch.nn.functional:cross_entropy", "label_smoothing": 0.05},
    {"target": "torch.nn:MultiMarginLoss"},
]
MORE_LOSSES = [
    {"target": "torch.nn:CrossEntropyLoss", "weight": {"target": f"{PARTS}:weights_of_classes"}},
    {"target": f"{PARTS}:of_some"},
    {"target": "torch.nn:BCEWithLogitsLoss"},
]
"""The last is of targets that are vectors, which ``target_transform`` makes."""
SOMETIMES = {
    "clip_norm": [0.5],
    "ema_decay": [0.9],
    "drop_last": [True],
    "precision": ["bf16", "fp16"],
    "evaluate_every": [2],
    "evaluate_every_steps": [2, 3],
    "evaluation_batch": [7, 50],
    "early_stop": [1],
    "max_steps": [2, 3, 5],
    "checkpoint_activations": [["1"]],
    "gradients_every": [1],
    "fingerprint_every": [1],
    "audit": [True],
    "checks": ["always", "off"],
}
MORE = {
    "channels_last": [True],
    "portable": [True],
    "record_micro_batches": [True],
    "deterministic": [False],
}
"""Settings under ``[training]`` that one job in four has, each with its values."""
LAYOUTS = {
    "ddp 2": (2, "--strategy", "ddp"),
    "ddp 3": (3, "--strategy", "ddp"),
    "fsdp 2": (2, "--strategy", "fsdp"),
    "pipeline 2": (2, "--strategy", "pipeline"),
    "gpipe 2": (2, "--strategy", "pipeline", "--set", "pipeline.schedule=gpipe"),
    "server 3": (3, "--strategy", "parameter_server"),
    "dp": (1, "--strategy", "dp"),
    "layers": (1, "--strategy", "layers"),
    "data x pipeline": (4, "--strategy", "hybrid", "--mesh", "data=2,pipeline=2"),
    "fsdp x pipeline": (4, "--strategy", "hybrid", "--mesh", "fsdp=2,pipeline=2"),
    "fsdp whole 2": (2, "--strategy", "fsdp", "--set", "fsdp.reshard_after_forward=false"),
    "fsdp kept 3": (
        *(3, "--strategy", "fsdp", "--set", "fsdp.reshard_after_forward=false"),
        *("--set", "fsdp.reshard_after_backward=false"),
    ),
    "interleaved 2": (2, "--strategy", "pipeline", "--set", "pipeline.schedule=interleaved"),
    "timed pipeline 2": (2, "--strategy", "pipeline", "--set", "pipeline.balance=time"),
    "two servers 4": (4, "--strategy", "parameter_server", "--set", "parameter_server.servers=2"),
    "dp 3": (1, "--strategy", "dp", "--set", "dp.replicas=3"),
    "layers 3": (1, "--strategy", "layers", "--set", "layers.devices=3", "--set", "layers.balance=time"),
    "data x layers": (4, "--strategy", "hybrid", "--mesh", "data=2,layers=2"),
}
"""Processes and options of each layout."""
SHARDED = {
    "tensor 2": (2, "--strategy", "tensor"),
    "tensor 4": (4, "--strategy", "tensor"),
    "data x tensor": (4, "--strategy", "hybrid", "--mesh", "data=2,tensor=2"),
    "ddp 2": LAYOUTS["ddp 2"],
}
"""The same, for jobs whose layers are split into shards."""
LOOSE = {
    "ring 3": (3, "--strategy", "ddp", "--set", "training.reduce=ring"),
    "bf16 2": (2, "--strategy", "ddp", "--set", "training.reduce=bf16"),
    "powersgd 2": (
        *(2, "--strategy", "ddp", "--set", "training.reduce=powersgd"),
        *("--set", "training.powersgd_rank=2"),
    ),
    "whole tensor 2": (2, "--strategy", "tensor"),
    "mixed fsdp 2": (2, "--strategy", "fsdp", "--set", "fsdp.mixed_precision=bf16"),
    "asynchronous 3": (3, "--strategy", "parameter_server", "--set", "parameter_server.mode=asynchronous"),
}
"""The same, below level A: these have the records of one device, with other numbers."""
NOT_REPEATED = ("powersgd 2", "asynchronous 3")
"""Those of them whose numbers a resumed run does not have, or no second run."""
FREELY = {
    "data.workers": [0, 2, "auto"],
    "data.prefetch": [1, 3],
    "checkpoint.background": ["true", "false"],
    "run.stall_limit": [0],
}
"""Settings of a layout that change no bit."""
FILES = ("best.json", "model.safetensors", "average.safetensors")
"""Files of a run folder that have the same bytes in every layout."""
OF_THE_CLOCK = ("seconds", "samples_per_second")
REFUSED, NON_FINITE, PREEMPTED = 2, 6, 75


def draw(seed):
    """The text of a seed's job, and its layouts, each with True if it is to go on from a checkpoint."""
    r = random.Random(seed)
    k = r.choice([2, 3, 4, 4, 8])
    batch = k * r.randint(2, 12)
    training = {"epochs": r.randint(1, 3), "global_batch": batch, "micro_batches": k, "seed": r.randrange(99)}
    training |= {name: r.choice(values) for name, values in SOMETIMES.items() if r.random() < 0.25}
    if training.get("precision") == "fp16":
        training |= {"loss_scale": 2.0 ** r.choice([10, 24, 30]), "loss_scale_growth_interval": 2}
    validates = r.random() < 0.85
    if not validates:
        for name in ("evaluate_every", "evaluate_every_steps", "early_stop"):
            training.pop(name, None)
    kind = r.choice([name for name in MODELS if name not in ("buffers", "photos")])
    if "norm" in kind or kind == "images":
        training |= {"sync_batch_norm": True} if r.random() < 0.15 else {}
    data = {"target": f"{PARTS}:SomeDigits", "split": "train", "count": r.choice([77, 96, 130])}
    tables = {
        "model": {"target": f"{PARTS}:network", "kind": kind},
        "data": {"workers": r.choice([0, 0, 1, 2])},
        "data.train": {**data, "noise": r.choice([0.0, 0.1])},
        "loss": r.choice(LOSSES),
        "optimizer": r.choice(OPTIMIZERS),
        "schedule": r.choice(SCHEDULES),
        "training": training,
        "checkpoint": {
            "every_steps": r.randint(1, 3),
            "keep": 50,
            "background": r.random() < 0.5,
        },
        "log": {"every": r.choice([1, 2, 3, 10]), "progress": False, "tensorboard": False},
    }
    if validates:
        tables["data.validation"] = {**data, "split": "validation", "count": r.choice([8, 33, 50])}
        metrics = {"two": "in_best_two", "entropy": "entropy", "recall": "Recall"}
        chosen = [name for name in metrics if r.random() < 0.3]
        tables |= {f"metrics.{name}": {"target": f"{PARTS}:{metrics[name]}"} for name in chosen}
    if r.random() < 0.2:
        tables["parameters"] = {"decay": "matrices"}
    if r.random() < 0.2:
        tables["weights"] = {"freeze": ["1.*", "0.*"], "freeze_statistics": r.random() < 0.5}
    _draw_more(random.Random(f"more {seed}"), tables)
    rare = random.Random(f"rare {seed}")
    _draw_rare(rare, tables)
    _make_it_fit(tables)
    text = "\n".join(
        ("[[{}]]\n" if isinstance(table, list) else "[{}]\n").format(name)
        + "".join(
            f"{key} = {_toml(value)}\n" for key, value in (table[0] if isinstance(table, list) else table).items()
        )
        for name, table in tables.items()
    )
    fitting = [name for name, (processes, *_) in LAYOUTS.items() if processes <= k]
    chosen = [(name, r.choice(["", "resumes", "stops"])) for name in r.sample(fitting, 2)]
    if "tensor" in tables:
        chosen = [(name, how) for name, (_, how) in zip(rare.sample(sorted(SHARDED), 2), chosen)]
    elif rare.random() < 0.25:
        chosen[1] = (rare.choice(sorted(LOOSE)), chosen[1][1])
    return text, [(name, "killed" if rare.random() < 0.25 else how) for name, how in chosen]


def _draw_more(r, tables):
    """Adds settings that fewer jobs have, each with its own table."""
    training, data, k = tables["training"], tables["data"], tables["training"]["micro_batches"]
    training |= {name: r.choice(values) for name, values in MORE.items() if r.random() < 0.15}
    if r.random() < 0.15:
        tables["model"] = {"target": f"{PARTS}:network", "kind": "buffers"}
        training["running_buffers"] = ["1.mean", "1.seen"]
    if r.random() < 0.3:
        tables["loss"] = r.choice(MORE_LOSSES)
    sets = [name for name in ("data.train", "data.validation") if name in tables]
    if tables["loss"]["target"].endswith("BCEWithLogitsLoss"):
        for name in sets:
            tables[name]["target_transform"] = [
                {"target": f"{PARTS}:Vector", "classes": 10},
                {"target": f"{PARTS}:Scaled", "factor": 0.9},
            ]
        for name in [name for name in tables if name.startswith("metrics.")]:
            del tables[name]
    elif r.random() < 0.3:
        inner, micro = tables["data.train"], training["global_batch"] // k
        tables["data.train"] = r.choice(
            [
                {"target": "lockstep.data:Weighted", "dataset": inner, "samples": r.choice([60, 101])},
                {"target": "lockstep.data:Mixed", "dataset": inner, "classes": 10, "cutmix": 0.5},
                {
                    "target": "lockstep.data:Bucketed",
                    "dataset": inner,
                    "group": micro,
                    "lengths": {"object": f"{PARTS}:brightness"},
                },
                {"target": "lockstep.data:Stream", "dataset": {**inner, "target": f"{PARTS}:Streamed"}},
            ]
        )
        if tables["data.train"]["target"].endswith("Weighted"):
            tables["data.train"]["weights"] = {"target": f"{PARTS}:rising", "count": inner["count"]}
        if tables["data.train"]["target"].endswith("Mixed") and "label_smoothing" not in tables["loss"]:
            tables["loss"] = {"target": "torch.nn:CrossEntropyLoss"}
    elif r.random() < 0.3:
        tables["data.collate"] = {"target": f"{PARTS}:stacked", "factor": 0.5}
    elif r.random() < 0.3:
        tables["data.train"] |= {"count": 130, "broken": r.randrange(130)}
        data["on_bad_sample"] = "skip"
    if r.random() < 0.3:
        data["prefetch"] = r.randint(1, 4)
    if r.random() < 0.3:
        tables.setdefault("parameters", {})["layer_decay"] = r.choice([0.5, 0.9])
    if r.random() < 0.3:
        groups = [{"names": ["1"], "lr": 0.003}, {"names": ["*bias"], "weight_decay": 0.1, "lr": 0.02}]
        tables.setdefault("parameters", {})["groups"] = r.sample(groups, r.randint(1, 2))
    if r.random() < 0.3:
        tables["checkpoint"]["every_epochs"] = r.choice([0, 2])
    tables["log"] |= {"csv": r.random() < 0.4, "tensorboard": r.random() < 0.4}
    if r.random() < 0.15:
        tables["run"] = {"threads": 2}
    if r.random() < 0.2:
        tables.setdefault("weights", {})["path"] = "start.safetensors"
    tables["[callbacks]"] = {"target": f"{PARTS}:StopAt"}


def _draw_rare(r, tables):
    """Adds what a job in five to ten has: shards, photos, other factors of the schedule and the loss scale."""
    training, schedule = tables["training"], tables["schedule"]
    if training.get("precision") == "fp16":
        training |= {
            "loss_scale_growth_factor": r.choice([1.5, 2.0, 4.0]),
            "loss_scale_backoff_factor": r.choice([0.25, 0.5, 0.7]),
            "loss_scale_growth_interval": r.choice([1, 2, 3]),
        }
    if r.random() < 0.3:
        tables["optimizer"] = r.choice(MORE_OPTIMIZERS)
    if schedule.get("kind") in ("linear", "cosine") and r.random() < 0.5:
        schedule = tables["schedule"] = {**schedule, "final_factor": 0.3, "warmup_epochs": 0.3}
        schedule.pop("warmup_steps", None)
    elif schedule.get("kind") == "step" and r.random() < 0.5:
        tables["schedule"] = {**schedule, "step_epochs": r.choice([0.3, 0.5]), "step_factor": 0.7}
    if r.random() < 0.3 and "data.validation" in tables:
        training["evaluation_batch"] = r.choice([1, 3, 13])
    if r.random() < 0.2 and "data.validation" in tables:
        training |= {"evaluate_every_steps": 1, "early_stop": r.choice([1, 2, 4])}
    if r.random() < 0.2:
        tables["checkpoint"]["keep"] = r.choice([1, 2])
    if r.random() < 0.03:
        training["compile"] = True
    if r.random() < 0.12:
        _draw_photos(r, tables)
    elif tables["model"]["kind"] in ("perceptron", "norms", "images") and r.random() < 0.15:
        training.pop("checkpoint_activations", None)
        tables["tensor"] = {"shards": r.choice([2, 4, 6] if tables["model"]["kind"] == "perceptron" else [2, 4])}
        if tables["model"]["kind"] == "perceptron" and r.random() < 0.5:
            tables["tensor"]["plan"] = ["1=column", "4=row"]


FROZEN = {
    "perceptron": "1.*",
    "norms": "[12].*",
    "images": "[01].*",
    "buffers": "0.*",
    "layers": "1.*",
    "photos": "[01].*",
}


def _make_it_fit(tables):
    """Takes out settings that would have the job refused, whatever else it is."""
    training, parameters, kind = tables["training"], tables.get("parameters", {}), tables["model"]["kind"]
    samples = tables["data.train"]
    samples = samples.get("samples") or samples.get("dataset", samples).get("count", 72)
    steps = samples // training["global_batch"]
    if not steps:
        training.pop("drop_last", None)
    steps = max(1, steps) * training["epochs"]
    if training.get("max_steps", 0) > steps:
        del training["max_steps"]
    if "warmup_steps" in tables["schedule"] and min(steps, training.get("max_steps", steps)) <= 3:
        tables["schedule"] = SCHEDULES[0]
    if "freeze" in tables.get("weights", {}):
        tables["weights"]["freeze"] = [FROZEN[kind]]
        parameters.pop("groups", None)
    elif kind == "buffers":
        parameters.pop("groups", None)
    if "OneCycleLR" in str(tables["schedule"]) and parameters.keys() & {"groups", "layer_decay"}:
        tables["schedule"] = SCHEDULES[1]
    if kind not in ("norms", "images", "photos"):
        training.pop("sync_batch_norm", None)
    if "sync_batch_norm" in training:
        training.pop("checkpoint_activations", None)


def _draw_photos(r, tables):
    photos = {"target": "lockstep.data:ImageFolder", "root": "photos", "seed": 3}
    for split in ("train", "validation"):
        if f"data.{split}" in tables:
            tables[f"data.{split}"] = {**photos, "split": split}
            transform = {"target": "lockstep.data:" + ("RandomResizedCrop", "CenterCrop")[split == "validation"]}
            tables[f"data.{split}"]["transform"] = {**transform, "size": r.choice([16, 21])}
    tables.pop("data.collate", None)
    tables["data"].pop("on_bad_sample", None)
    tables["model"] = {"target": f"{PARTS}:network", "kind": "photos"}
    tables["loss"] = LOSSES[r.randrange(2)]
    tables["training"].pop("running_buffers", None)
    tables.get("weights", {}).pop("path", None)


def _toml(value):
    """A value as TOML has it: a table within a line."""
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    return "[" + ", ".join(map(_toml, value)) + "]" if isinstance(value, list) else json.dumps(value)


class Trained:
    """How a run of the job ended: its exit status, output, log, last lines, and the digests of its files."""

    def __init__(self, folder, name, processes, options, stop_at=None, kill=""):
        words = ["train", "job.toml", "--devices", f"cpu:{processes}", "--set", f"run.name={name}", *options]
        stop = {} if stop_at is None else {STOP: str(stop_at)}
        stop |= {KILL: kill} if kill else {}
        ended = subprocess.run(
            [sys.executable, "-m", "lockstep", *words],
            cwd=folder,
            env={**os.environ, "PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}", **stop},
            capture_output=True,
            text=True,
            timeout=300,
        )
        self.status, self.output = ended.returncode, ended.stdout + ended.stderr
        run = folder / "runs" / name
        path = run / "log.jsonl"
        lines = path.read_text().splitlines() if path.is_file() else []
        self.log = [_without_time(json.loads(line)) for line in lines]
        self.table = _table(run / "log.csv")
        self.gradients = _lines(run / "gradients.jsonl")
        self.files = {name: _digest(run / name) for name in FILES if (run / name).is_file()}
        self.last = re.findall(r"^((?:accuracy|loss|skipped|fingerprint) .*)$", self.output, re.MULTILINE)


def _without_time(record):
    return {name: value for name, value in record.items() if name not in OF_THE_CLOCK}


def _table(path):
    """The records of a CSV file; None where there is none."""
    if not path.is_file():
        return None
    with path.open(newline="") as file:
        rows = [{key: value for key, value in row.items() if value} for row in csv.DictReader(file)]
    kinds = {"kind": str, "step": int, "epoch": int}
    return [_without_time({key: kinds.get(key, float)(value) for key, value in row.items()}) for row in rows]


def _lines(path):
    return path.read_text().splitlines() if path.is_file() else []


def _digest(path):
    return hashlib.sha256(path.read_bytes()).hexdigest()


def difference(reference, trained, *, resumed):
    """What a run has otherwise than that of one device; empty for nothing."""
    if trained.last != reference.last:
        return f"the last lines: {trained.last} in place of {reference.last}"
    if resumed:  # it has the records since its checkpoint
        wrong = [record for record in trained.log if record not in reference.log]
        missing = [r for r in reference.log if r["step"] > trained.log[0]["step"] and r not in trained.log]
        return f"records {wrong} in place of {missing}" if wrong or missing else ""
    ours = [line for line in trained.gradients if line in reference.gradients]  # and those after a stop
    if ours != reference.gradients or len({json.loads(line)["step"] for line in trained.gradients}) != len(
        trained.gradients
    ):
        return f"gradients.jsonl: {trained.gradients} in place of {reference.gradients}"
    if trained.files != reference.files:
        return f"files: {sorted(set(trained.files.items()) ^ set(reference.files.items()))}"
    if trained.table is not None and trained.table != trained.log:
        return f"log.csv: {[pair for pair in zip(trained.table, trained.log) if pair[0] != pair[1]][:1]}"
    pairs = [(a, b) for a, b in zip(trained.log, reference.log) if a != b]
    same = len(trained.log) == len(reference.log) and not pairs
    return "" if same else f"{len(trained.log)} records in place of {len(reference.log)}: {pairs[:1]}"


def difference_of_form(reference, trained, *, asynchronous=False):
    """What the records of a run are otherwise than those of one device, apart from their numbers; empty for nothing."""
    end = min(ended.log[-1]["step"] for ended in (reference, trained))
    stops_early = any("epochs_done" in ended.log[-1] for ended in (reference, trained))  # as its numbers say

    def form(ended):
        names = [[name for name in sorted(record) if not name.startswith("staleness")] for record in ended.log]
        records = [(each["kind"], each["step"], each["epoch"], *held) for each, held in zip(ended.log, names)]
        records = [each for each in records if each[1] < end or not stops_early]
        return [each for each in records if not asynchronous or each[0] == "epoch"]

    ours, theirs = form(trained), form(reference)
    pairs = [pair for pair in zip(ours, theirs) if pair[0] != pair[1]]
    return f"records {pairs[:1]} of {len(ours)} and {len(theirs)}" if ours != theirs else ""


def run_seed(seed, folder):
    """Trains a seed's job in all its layouts; gives (layout, what, said) for each."""
    text, layouts = draw(seed)
    (folder / "job.toml").write_text(text)
    if "ImageFolder" in text:
        write_photos(folder / "photos")
    if "start.safetensors" in text:
        write_weights(tomllib.loads(text)["model"]["kind"], folder / "start.safetensors")
    reference = Trained(folder, "single", 1, ["--strategy", "single"])
    if reference.status:  # non-finite: the job is wrong in itself, as where the last step has only ignored targets
        what = {REFUSED: "refused", NON_FINITE: "wrong"}.get(reference.status, "failed")
        return [("single", what, reference.output)]
    whole, ends = reference, []
    for name, resumes in layouts:
        processes, *options = {**LAYOUTS, **SHARDED, **LOOSE}[name]
        if name in LOOSE:
            for recorded, value in (("audit", "false"), ("record_micro_batches", "false"), ("gradients_every", "0")):
                options += ["--set", f"training.{recorded}={value}"]
        r, start, place, kill = random.Random(f"{seed} {name}"), None, name.replace(" ", "-"), ""
        reference, first = whole, "single"
        if name in LOOSE:
            reference, first = Trained(folder, f"{place}-first", processes, options), f"{place}-first"
            if reference.status:
                what = "refused" if reference.status == REFUSED else "failed"
                ends.append((name, what, reference.output))
                continue
            if said := difference_of_form(whole, reference, asynchronous=name.startswith("asynchronous")):
                ends.append((name, "differs", said))
                continue
        checkpoints = sorted((folder / "runs" / first).glob("step-*"))[:-1]
        for setting, values in FREELY.items():
            options += ["--set", f"{setting}={r.choice(values)}"] if r.random() < 0.3 else []
        options += ["--set", "data.cache=cache"] if "ImageFolder" in text and r.random() < 0.6 else []
        if resumes == "resumes" and checkpoints:
            start = r.choice(checkpoints)
            options += ["--resume", str(start)]
        elif resumes == "stops" and reference.log:
            stop = r.randint(1, reference.log[-1]["step"])
            stopped = Trained(folder, place, processes, options, stop_at=stop)
            if stopped.status not in (0, REFUSED, PREEMPTED):
                ends.append((name, "failed", f"stopped at {stop}: {stopped.output}"))
                continue
            if stopped.status == PREEMPTED:
                options += ["--resume", "auto"]
                resumes = f"stopped at {stop}"
            else:
                place += "-whole"
        elif resumes == "killed" and reference.log:
            kill = f"{r.randint(1, reference.log[-1]['step'])}:{r.randrange(processes)}:{folder / place}.killed"
            resumes = f"killed at {kill}"
            if r.random() < 0.4 and processes > 2 and "hybrid" not in options and name not in LOOSE:
                options += ["--restart-world", "remaining"]
        trained = Trained(folder, place, processes, options, kill=kill)
        if trained.status:
            said = f"({resumes}) {trained.output}"
            ends.append((name, "refused" if trained.status == REFUSED else "failed", said))
            continue
        if name in NOT_REPEATED:
            said = difference_of_form(reference, trained, asynchronous=name.startswith("asynchronous"))
            said = said if start is None else ""
        else:
            said = difference(reference, trained, resumed=start is not None)
        ends.append((name, "differs" if said else "equal", f"{said} (from {start and start.name}, {resumes})"))
    return ends


def main(arguments=None):
    """Trains a range of jobs and prints what came out."""
    parser = argparse.ArgumentParser(prog="python -m tests.sameness.jobs")
    parser.add_argument("--seeds", default="0:20", metavar="A:B", help="jobs A to B - 1")
    parser.add_argument("--show", action="store_true", help="print the jobs and run none")
    given = parser.parse_args(arguments)
    counts = Counter()
    for seed in range(*map(int, given.seeds.split(":"))):
        if given.show:
            print(*draw(seed), sep="\n# ")
            continue
        with tempfile.TemporaryDirectory(prefix="lockstep-jobs-") as folder:
            for name, what, said in run_seed(seed, Path(folder)):
                counts[what] += 1
                if what in ("differs", "failed"):
                    print(f"seed {seed} on {name}: {what}: {said}", flush=True)
    print(*(f"{count} {what}" for what, count in sorted(counts.items())), sep=", ")
    return 1 if counts["differs"] or counts["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
