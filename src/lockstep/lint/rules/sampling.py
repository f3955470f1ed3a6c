"""Rules on samplers: which samples a rank reads, in which order."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.names import last_name
from lockstep.lint.ranks import mentions_rank
from lockstep.lint.reach import on_one_rank
from lockstep.lint.script import Script, argument, arguments, constant
from lockstep.lint.wrappers import is_managed

_EVALUATION = re.compile(r"(?<![a-z])(val|valid|validation|test|eval|dev)(?![a-z])|(val|test)_?(set|data|ds)")


def samplers(script: Script) -> list[ast.Call]:
    """The calls that make torch's DistributedSampler."""
    return script.torch_calls("DistributedSampler")


def assigned_name(script: Script, call: ast.Call) -> str:
    """The name or attribute that a call's result is given to; empty where there is none."""
    for ancestor, child in script.ancestors(call):
        if isinstance(ancestor, ast.Assign) and child is ancestor.value and len(ancestor.targets) == 1:
            return script.text(ancestor.targets[0])
        if not isinstance(ancestor, ast.IfExp | ast.keyword):
            break
    return ""


def for_evaluation(script: Script, call: ast.Call) -> bool:
    """Whether a sampler is called one for validation, by its own name or by that of its data set."""
    data = argument(call, "dataset", 0)
    names = f"{assigned_name(script, call)} {script.text(data) if data is not None else ''}"
    return bool(_EVALUATION.search(names.lower().replace("_", " "))) and "train" not in names.lower()


@rule(
    "LS001",
    "sampler-without-set-epoch",
    "A DistributedSampler that shuffles is never told the epoch: every epoch has the same order.",
)
def sampler_without_set_epoch(script: Script) -> Iterator[Hit]:
    """Needs a loop over epochs in the same file."""
    loop = _epoch_loop(script)
    if loop is None or script.mentions("set_epoch") or is_managed(script):
        return
    for call in samplers(script):
        if constant(argument(call, "shuffle", 3)) is False or for_evaluation(script, call):
            continue
        if _handed_on(script, call):
            continue
        name = assigned_name(script, call) or "train_sampler"
        yield Hit(
            call,
            "this sampler is never told the epoch, so every epoch reads the samples in the same order.",
            f"{name}.set_epoch({script.text(loop.target)})  # first line of the loop in line {loop.lineno}",
        )


@rule(
    "LS002",
    "sampler-and-shuffle",
    "A DataLoader gets a sampler together with an argument that excludes it, such as shuffle=True.",
)
def sampler_and_shuffle(script: Script) -> Iterator[Hit]:
    """torch raises ValueError for these; here it is said before the data are read."""
    for call in script.torch_calls("DataLoader"):
        if constant(argument(call, "shuffle", 2)) is not True:
            continue
        for kind, position in (("sampler", 3), ("batch_sampler", 4)):
            given = argument(call, kind, position)
            if given is None or isinstance(given, ast.Constant):
                continue
            values = script.values(given)
            if values and all(isinstance(value, ast.Constant) and value.value is None for value in values):
                continue
            yield Hit(
                call,
                f"{kind} and shuffle=True exclude each other: DataLoader raises ValueError.",
                f"shuffle=False  # {script.text(given)} shuffles",
            )


@rule("LS005", "sampler-not-used", "A DistributedSampler is made and never given to a DataLoader.")
def sampler_not_used(script: Script) -> Iterator[Hit]:
    """A sampler whose name is only ever told the epoch splits nothing."""
    for call in samplers(script):
        name = assigned_name(script, call)
        if not name.isidentifier() or script.mentions("locals", "globals"):
            continue
        uses = [node for node in script.names[name] if isinstance(node.ctx, ast.Load)]
        read = [node for node in uses if not _tells_epoch(script, node)]
        if not read:
            yield Hit(
                call,
                f"{name} is never given to a DataLoader, so every rank reads all samples.",
                f"DataLoader(..., sampler={name})",
            )


@rule("LS006", "set-epoch-on-some-ranks", "set_epoch is called on one rank only: the ranks' orders differ.")
def set_epoch_on_some_ranks(script: Script) -> Iterator[Hit]:
    """With different orders, some samples of an epoch are read twice and others not at all."""
    for call in script.method_calls("set_epoch"):
        if on_one_rank(script, call):
            yield Hit(
                call,
                "only one rank passes here: its order differs from that of the others, so samples are "
                "read twice or not at all.",
                f"{script.text(call)}  # outside of the rank condition, on every rank",
            )


@rule("LS007", "sampler-seed-by-rank", "A DistributedSampler gets a seed that depends on the rank.")
def sampler_seed_by_rank(script: Script) -> Iterator[Hit]:
    """The ranks must permute alike, or their shares overlap."""
    for call in samplers(script):
        seed = argument(call, "seed", 4)
        if seed is not None and mentions_rank(script, seed):
            yield Hit(
                seed,
                f"the seed {script.text(seed)} differs between ranks: they permute differently and their "
                "shares overlap.",
                "seed=seed  # the same on every rank; the sampler splits by rank itself",
            )


def _epoch_loop(script: Script) -> ast.For | None:
    for node in script.nodes:
        if isinstance(node, ast.For) and isinstance(node.target, ast.Name):
            over = node.target.id in ("ep", "e") or "epoch" in node.target.id.lower()
            if over or "epoch" in script.text(node.iter).lower():
                return node
    return None


def _handed_on(script: Script, sampler: ast.Call) -> bool:
    """Whether a sampler, or its loader together with the epoch, is given to code that is not in this file."""
    name = assigned_name(script, sampler)
    makers = script.torch_calls("DataLoader")
    around = [call for call in makers if script.holds(call, sampler) or (name and _uses(script, call, name))]
    if not name and not around:
        return True
    loaders = {assigned_name(script, call) for call in around} - {""}
    defined = {function.name for function in script.functions}
    for call in script.calls:
        given = {script.text(item) for item in arguments(call)}
        if name in given and call not in around:
            return True
        unseen = last_name(call.func) not in defined and any("epoch" in text for text in given)
        if loaders & given and unseen:
            return True
    left = [node for node in script.nodes if isinstance(node, ast.Return)]
    return any(_uses(script, node, item) for node in left for item in {name, *loaders} - {""})


def _uses(script: Script, node: ast.AST, name: str) -> bool:
    return any(isinstance(p, ast.Name | ast.Attribute) and script.text(p) == name for p in ast.walk(node))


def _tells_epoch(script: Script, node: ast.Name) -> bool:
    parent = script.parent(node)
    return isinstance(parent, ast.Attribute) and parent.attr == "set_epoch"
