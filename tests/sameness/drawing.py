"""Draws programs and layouts by seed, and writes a program's source from its parts."""

import dataclasses
import random
import textwrap

from tests.sameness.parts import (
    AVERAGES,
    BLOCKS,
    CALLS,
    DATA,
    ENDS,
    GROUPS,
    HEADS,
    HELPERS,
    INPUTS,
    LINES,
    LOSSES,
    OPTIMIZERS,
    OWN_OPTIMIZERS,
    SCHEDULERS,
    SHAPES,
    STEMS,
    TARGETS,
)
from tests.sameness.trials import Layout

SINGLE = Layout("single", 1, {"strategy": "single"})
_ODD = 0.35
"""The part of all choices that take something unusual."""


@dataclasses.dataclass(frozen=True)
class Program:
    """The parts of a program, by name."""

    seed: int
    kind: str
    width: int
    shape: str
    blocks: tuple
    data: str
    count: int
    loss: str
    optimizer: str
    group: str
    scheduler: str
    average: str
    lines: tuple
    end: str
    epochs: int
    recipe: tuple
    twin: bool = False
    """Two optimizers, one for the first half of the parameters and SGD for the second."""
    between: str = ""
    """The lines between two loops over epochs, the first of them of one epoch; empty: there is one loop."""
    saves: str = ""
    """Where it saves beside the end of an epoch: at its "start", or at its first "step"."""


def draw(seed, without=()):
    """The program of a seed; ``without`` names parts that are left out of it."""
    r = random.Random(f"program {seed}")

    def choose(table, kind="", odd=_ODD):
        wanted = r.random() < odd
        names = [n for n, part in table.items() if (not kind or kind in part.kinds)]
        fitting = [n for n in names if table[n].odd == wanted] or names
        return r.choice(fitting)

    kind = r.choice("vvvit")
    odd_program = r.random()
    rare = 0.0 if odd_program < 0.15 else 0.12 if odd_program < 0.7 else 0.35
    blocks = tuple(choose(BLOCKS, kind, rare) for _ in range(r.choice((2, 3, 3, 4, 4, 5, 6, 8))))
    lines = tuple(sorted({choose(LINES, odd=rare) for _ in range(r.choice((0, 1, 1, 2, 2, 3)))}))
    k = r.choice((1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 8, 12))
    rows = r.choice((1, 2, 2, 3, 4)) if k < 8 else r.choice((1, 2, 2, 3))
    recipe = {"global_batch": k * rows, "micro_batches": k, "seed": r.randrange(100)}
    recipe["precision"] = r.choice(("fp32",) * 6 + ("bf16", "bf16", "fp16"))
    if kind == "i" and r.random() < 0.15:
        recipe["channels_last"] = True
    if r.random() < 0.03:
        recipe["sync_batch_norm"] = True
    if r.random() < 0.2:
        recipe["fingerprint_every"] = 1
    epochs = r.choice((1, 1, 2))
    full = k * rows * r.choice((1, 2, 2, 3) if epochs == 1 else (1, 2))
    count = max(full + r.choice((0, 0, -1, 1, -rows, rows // 2, k)), 8)
    shape = r.choice((*("sequential", "named", "root_dict", "checkpointed") * 4, *SHAPES))
    program = Program(
        seed=seed,
        kind=kind,
        width=r.choice((3, 4, 5, 7, 8, 8, 12, 16, 33)),
        shape=shape,
        blocks=blocks,
        data=choose(DATA, kind, rare / 2),
        count=count,
        loss=choose(LOSSES, kind, rare),
        optimizer=choose(OPTIMIZERS, odd=0.25),
        group=choose(GROUPS, odd=0.05) if r.random() < 0.4 else "all",
        scheduler=r.choice(["no_scheduler"] * 2 + sorted(SCHEDULERS)),
        average=r.choice(["no_average"] * 16 + sorted(AVERAGES)),
        lines=lines,
        end=choose(ENDS, odd=rare / 2),
        epochs=epochs,
        recipe=tuple(sorted(recipe.items())),
        twin=r.random() < 0.08 or shape == "adversarial",
    )
    program = _in_phases(_in_shards(program))
    changes = {field: value for field, value in plain(program).items() if getattr(program, field) in without}
    kept = {field: tuple(n for n in getattr(program, field) if n not in without) for field in ("blocks", "lines")}
    if k == 1:  # in one process it is not computed twice, and nothing is promised of a program that has no result
        kept["blocks"] = tuple(name for name in kept["blocks"] if name != "clock")
    return dataclasses.replace(program, **changes, **kept)


def _in_shards(program):
    """The program with split layers, for some seeds; others as they are."""
    r = random.Random(f"shards {program.seed}")
    if r.random() > 0.08:
        return program
    block = "two_convs" if program.kind == "i" else "perceptron"
    recipe = (*program.recipe, ("tensor", {"shards": r.choice((2, 3, 4, 4, 6))}))
    return dataclasses.replace(program, width=r.choice((12, 24)), blocks=(*program.blocks[:2], block), recipe=recipe)


BETWEEN = {
    "nothing": "pass",
    "rate": "optimizer.param_groups[0]['lr'] = 0.03",
    "half": "optimizer.param_groups[0]['lr'] *= 0.5",
    "draw": "found['e0 drawn'] = float(torch.rand(()))",
    "freeze": "next(model.parameters()).requires_grad_(False)",
    "measure": "found['e0 between'] = run.evaluate(data, MEASURED)",
    "decay": "for p in model.parameters():\n    p.data.mul_(0.9)",
    "forget": "optimizer.state.clear()",
}


SAVE = "        if run.options.directory is not None:\n            run.save(wait=True)"


def _in_phases(program):
    """The program with two loops over epochs, or further saves, for some seeds; others as they are."""
    r = random.Random(f"phases {program.seed}")
    between = r.choice(sorted(BETWEEN)) if r.random() < 0.06 else ""
    saves = r.choice(("start", "step")) if r.random() < 0.06 else ""
    return dataclasses.replace(program, between=between, saves=saves)


def plain(program):
    """The parts of an ordinary program, by their place."""
    return {
        "shape": "sequential",
        "data": "tensors",
        "loss": "per_token" if program.kind == "t" else "mean",
        "optimizer": "sgd",
        "group": "all",
        "scheduler": "no_scheduler",
        "average": "no_average",
        "end": "none",
        "epochs": 1,
        "twin": program.shape == "adversarial",
        "between": "",
        "saves": "",
    }


def plain_program():
    """A perceptron under SGD, of two steps."""
    return Program(
        seed=0,
        kind="v",
        width=4,
        shape="sequential",
        blocks=("linear",),
        data="tensors",
        count=8,
        loss="mean",
        optimizer="sgd",
        group="all",
        scheduler="no_scheduler",
        average="no_average",
        lines=(),
        end="none",
        epochs=1,
        recipe=(("global_batch", 4), ("micro_batches", 2)),
    )


def layouts(program, count=3):
    """Some layouts of a program's seed, each a list of phases; one that is stopped comes before where it is resumed."""
    r = random.Random(f"layouts {program.seed}")
    recipe = dict(program.recipe)
    k, shards = recipe["micro_batches"], recipe.get("tensor", {}).get("shards", 0)
    chosen, names = [], set()
    for _ in range(200):  # shards leave few
        if len(chosen) == count:
            break
        layout = _sharded_layout(r, k, shards) if shards else _layout(r, k)
        if layout is None or layout.name in names:
            continue
        names.add(layout.name)
        chosen.append([layout])
    if r.random() < 0.6:
        chosen[-1] = [*_stopped(r, chosen), chosen[-1][0]]
    return chosen


def _stopped(r, chosen):
    """The phases before the last one: one, or two in a row, each on ``single`` or another layout of the program."""
    others = [SINGLE, *(phases[0] for phases in chosen if phases[0].exact)]
    stops = sorted(r.sample(range(6), 2)) if r.random() < 0.4 else [r.randrange(4)]
    return [dataclasses.replace(r.choice(others), stop=stop) for stop in stops]


_KINDS = ("ddp", "fsdp", "pipeline", "data_pipeline", "fsdp_pipeline", "server", "two_servers") * 3
_KINDS += ("dp", "dp", "layers", "layers", "tensor")


def _layout(r, k):
    """A layout that K micro-batches can fill; None where what was drawn does not fit."""
    kind = r.choice(_KINDS)
    ranks = r.choice((2, 2, 3, 3, 4))
    if kind in ("ddp", "fsdp"):
        return Layout(f"{kind} {ranks}", ranks, {"strategy": kind}) if ranks <= k else None
    if kind == "dp":
        return Layout(f"dp {ranks}", 1, {"strategy": "dp", "dp": {"replicas": ranks}}) if ranks <= k else None
    if kind == "layers":
        return Layout(f"layers {ranks}", 1, {"strategy": "layers", "layers": {"devices": ranks}})
    if kind == "pipeline":
        schedule = r.choice(("1f1b", "1f1b", "gpipe", "interleaved"))
        if k < ranks or (schedule == "interleaved" and k % ranks):
            return None
        options = {"strategy": "pipeline", "pipeline": {"schedule": schedule}}
        return Layout(f"pipeline {ranks} {schedule}", ranks, options)
    if kind in ("data_pipeline", "fsdp_pipeline"):
        axis = kind.partition("_")[0]
        options = {"strategy": "hybrid", "mesh": f"{axis}=2,pipeline=2"}
        return Layout(f"{axis} x pipeline", 4, options) if k >= 4 else None
    if kind == "tensor":
        return Layout(f"tensor {min(ranks, 3)}", min(ranks, 3), {"strategy": "tensor"}, exact=False)
    servers = 1 if kind == "server" else 2
    ranks = servers + r.choice((1, 2))
    options = {"strategy": "parameter_server", "parameter_server": {"servers": servers}}
    return Layout(f"server {ranks}/{servers}", ranks, options) if ranks - servers <= k else None


def _sharded_layout(r, k, shards):
    """A layout of a program whose layers are split into shards; None where what was drawn does not fit."""
    ranks = r.choice((2, 3, 4, 6))
    if r.random() < 0.3:
        fits, layout = ranks <= k, Layout(f"ddp {ranks}", ranks, {"strategy": "ddp"})
    elif r.random() < 0.3:
        fits = k > 1 and shards % 2 == 0
        layout = Layout("data x tensor", 4, {"strategy": "hybrid", "mesh": "data=2,tensor=2"})
    else:
        fits, layout = (
            shards % ranks == 0,
            Layout(f"tensor {ranks} of {shards}", ranks, {"strategy": "tensor"}),
        )
    return layout if fits else None


_HEADER = """
import contextvars
import copy
import functools
import io
import itertools
import os
import pickle
import random
import threading
import time
import weakref
from collections import OrderedDict
from dataclasses import dataclass

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune
from torch.optim import swa_utils
from torch.utils.checkpoint import checkpoint
from torch.utils.data import ConcatDataset, DataLoader, Dataset, Subset, TensorDataset

"""

_SECOND = {
    False: "            second.step()\n            second.zero_grad()",
    True: "            optimizer.zero_grad()\n            second.zero_grad()\n"
    '            found[f"{at} second loss"] = float(run.backward(batch, CALL)).hex()\n'
    "            second.step()\n            second.zero_grad()",
}

_OUT = {
    "auxiliary": "out, extra = output",
    "mapping": 'out = output["out"]',
    "record": "out = output.logits",
    "keywords": 'out, target = output["out"], target["labels"]',
}


def text_of(program):
    """The source of a program: ``RECIPE``, ``EPOCHS`` and ``train(run, epochs)``."""
    p, recipe = program, dict(program.recipe)
    blocks = [BLOCKS[name] for name in p.blocks]
    for name, value in (option for block in blocks for option in block.recipe):
        recipe[name] = tuple(sorted({*recipe.get(name, ()), value}))
    sources = {block.source: None for block in blocks if block.defined}
    needed = [part.source for name, part in HELPERS.items() if any(part.defined in text for text in sources)]
    shape = (
        SHAPES[p.shape]
        .source.replace("STEM", STEMS[p.kind])
        .replace("BLOCKS", ", ".join(block.made for block in blocks))
        .replace("HEAD", HEADS[p.kind])
        .strip()
    )
    classes, _, model = shape.rpartition("model = ")
    optimizer = OPTIMIZERS[p.optimizer].made.replace("PARAMETERS", GROUPS[p.group].made)
    own = [part.source for part in OWN_OPTIMIZERS.values() if f"{part.defined}(" in optimizer]
    prepare = _OUT.get(p.shape, "out = output")
    data = INPUTS[p.kind]
    reinput = "inputs[:2], extras[:2]" if p.shape == "two_inputs" else "inputs[:2]"
    loss = LOSSES[p.loss].made.replace("PREPARE", prepare).replace("REINPUT", reinput)
    if p.loss.startswith("module") and prepare != "out = output":
        loss += f"\n_inner = loss_fn\ndef loss_fn(output, target):\n    {prepare}\n    return _inner(out, target)"
    if prepare != "out = output" and "extra" in prepare and "return F.cross_entropy(out, target)" in loss:
        loss = loss.replace("return F.cross_entropy(out, target)", "return F.cross_entropy(out + 0.3 * extra, target)")
    accuracy = (
        "def accuracy(output, target):\n    "
        + prepare
        + "\n    return (out.argmax(-1) == target).float().flatten(1).mean(1)"
        if p.kind == "t"
        else "def accuracy(output, target):\n    " + prepare + "\n    return (out.argmax(-1) == target).float()"
    )
    top = [
        _HEADER.strip(),
        f"D, C, H, T, V, N = {p.width}, 3, 4, 3, 7, {p.count}\nEPOCHS = {p.epochs}\nRECIPE = {recipe!r}",
        f"draw = torch.Generator().manual_seed({p.seed})\ninputs = {data}\ntargets = {TARGETS[p.kind]}",
        *needed,
        *sources,
        classes,
        *own,
        _data(p),
        loss,
        "def loss_on_data(output, data):\n    return loss_fn(output, data[1])" if p.shape in CALLS else "",
        accuracy,
        *(LINES[name].top for name in p.lines),
        f"def keep(output):\n    {_OUT['mapping'] if p.shape == 'keywords' else prepare}\n    return out",
        "def hashed(tensor):\n"
        "    return hash(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())"
        if any("hashed(" in str(LINES[name]) for name in p.lines)
        else "",
    ]
    text = "\n\n".join(each.strip("\n") for each in top if each.strip())
    return text + "\n\n" + _train(p, model, optimizer).replace("REINPUT", reinput) + "\n"


def _data(p):
    """The data set, with the samples that the shape of the model wants."""
    made = DATA[p.data].source
    if "data =" not in made.splitlines()[0] and not made.startswith(("class", "def")):
        change, _, rest = made.partition("\ndata =")
        pairs = DATA["pairs"].source.replace(
            "        return x", textwrap.indent(change, " " * 8) + "\n        return x"
        )
        made = pairs + ("\ndata =" + rest if rest else "")
    if p.shape == "two_inputs":
        extra = "extras = torch.randn(N, 2, generator=draw)\n"
        if "class Pairs" in made:
            return extra + made.replace("return x, y", "return x, extras[index], y")
        made = made.replace("zip(inputs, targets)", "zip(inputs, extras, targets)")
        made = made.replace("[:], targets", "[:], extras, targets")
        for rows in ("", "[:5]", "[5:]"):
            made = made.replace(f"(inputs{rows}, targets{rows})", f"(inputs{rows}, extras{rows}, targets{rows})")
        return extra + made
    if p.shape == "keywords":
        return made + (
            "\n\nclass Named(Dataset):\n    def __init__(self, pairs):\n        self.pairs = pairs\n\n"
            "    def __len__(self):\n        return len(self.pairs)\n\n    def __getitem__(self, index):\n"
            "        x, y = self.pairs[index]\n        return {'pixels': x, 'labels': y}\n\n"
            "data = Named(data.dataset if isinstance(data, DataLoader) else data)"
        )
    return made


def _in_two(p, measured):
    """The lines before a loop over epochs that comes twice."""
    lines = BETWEEN[p.between].replace("MEASURED", measured)
    return ["for upto in (1, epochs + 1):", "    if upto > 1:", textwrap.indent(lines, " " * 8)]


def _train(p, model, optimizer):
    forward = CALLS[p.shape].partition(", ")[2] if p.shape in CALLS else ""
    measured = f"lambda output, pair: accuracy(output, pair[1]), {forward}" if forward else "accuracy"

    def at(place, indent):
        made = "\n".join(text for name in p.lines if (text := LINES[name].at(place)))
        made = made.replace("(batch, CALL)", f"(batch, {call})").replace("(batch, loss_fn)", f"(batch, {call})")
        made = made.replace("(data, accuracy)", f"(data, {measured})")
        made = made.replace("(data, keep)", f"(data, keep{', ' if forward else ''}{forward})")
        return textwrap.indent(made, " " * indent)

    call = CALLS.get(p.shape, "loss_fn")
    scheduler, average = SCHEDULERS[p.scheduler].made, AVERAGES[p.average].made
    given = ["model", "optimizer", *["second"] * p.twin]
    given += ["scheduler"] * bool(scheduler) + ["average"] * bool(average)
    halves = "half = len(list(model.parameters())) // 2 + 1\n" if p.twin else ""
    halves += f"optimizer = {optimizer}\n" if not p.twin else ""
    if p.twin:
        first = OPTIMIZERS[p.optimizer].made.replace("PARAMETERS", "list(model.parameters())[:half]")
        halves += f"optimizer = {first}\nsecond = torch.optim.SGD(list(model.parameters())[half:], lr=0.05)"
    last = "getattr(model, 'head', model[-1] if isinstance(model, nn.Sequential) else None)"
    hook = f"{last}.register_forward_hook(model_hook)"
    loop = [
        f"    for epoch in run.epochs({'upto' if p.between else 'epochs'}):",
        SAVE if p.saves == "start" else "",
        at("epoch", 8),
        f"        for batch in run.batches(data{', drop_last=True' if p.data == 'dropped' else ''}):",
        "            steps = run.position.step",
        '            at = f"e{epoch}s{steps}"',
        at("before", 12),
        f"            if not batch.plan.position:\n{textwrap.indent(SAVE, '        ')}" if p.saves == "step" else "",
        '            found[f"{at} loss"] = float(run.backward(batch, CALL)).hex()'.replace("CALL", call),
        at("backward", 12),
        "            optimizer.step()",
        _SECOND[p.shape == "adversarial"].replace("CALL", call) if p.twin else "",
        textwrap.indent(ENDS[p.end].made, " " * 12),
        "            scheduler.step()" if scheduler else "",
        "            average.update_parameters(model)" if average else "",
        "            steps += 1",
        at("after", 12),
        '        at = f"e{epoch} end"',
        at("end", 8),
        SAVE,
    ]
    rows = [
        "def train(run, epochs):",
        "    global data, trained, found",
        "    found = {}",
        "    torch.manual_seed(1)",
        textwrap.indent(f"model = {model.strip()}", "    "),
        at("model", 4),
        f"    {hook}" if p.loss == "hooked" else "",
        textwrap.indent(halves, "    "),
        f"    scheduler = {scheduler}" if scheduler else "",
        f"    average = {average}" if average else "",
        at("made", 4),
        "    rng = np.random.default_rng(5)" if "own_rng" in p.lines else "",
        f"    {', '.join(given)} = run.prepare({', '.join(given)})",
        "    trained = model",
        at("prepared", 4),
        textwrap.indent("\n".join(_in_two(p, measured) if p.between else ()), "    "),
        textwrap.indent("\n".join(row for row in loop if row.strip()), "    " * bool(p.between)),
        '    found["fingerprint"] = run.fingerprint()',
        '    found["evaluated"] = run.evaluate(data, accuracy)'.replace("accuracy", measured),
        '    found["average"] = [float(v.double().sum()) for v in average.state_dict().values()]' if average else "",
        "    return found",
    ]
    return "\n".join(row for row in rows if row.strip())
