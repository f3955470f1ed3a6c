"""The calls by which a script trains: optimizers, backward passes, model wrappers, process group, libraries."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass

from lockstep.lint.ranks import loops_around, places_of
from lockstep.lint.script import (
    FUNCTIONS,
    Loop,
    Script,
    argument,
    bindings,
    constant,
    last_name,
    method,
    names_in,
    parameters,
    range_of,
    receiver,
)

DDP, DP, FSDP = "DistributedDataParallel", "DataParallel", "FullyShardedDataParallel"
_AVERAGES = (*("AveragedModel", "ModelEmaV2", "ModelEmaV3", "ExponentialMovingAverage", "EMAModel", "ema_pytorch.EMA"),)
"""Moving averages of the weights, which are prepared with the model."""
_BATCH = re.compile(r"batch|size|bs$|^\d+$", re.IGNORECASE)
PROCESSES = re.compile(r"world|n_?gpu|num_(gpu|proc|dev)|nproc|replicas", re.IGNORECASE)
"""Names of the number of processes."""
DRAWN = re.compile(r"^[\w.]*(mem|buf|replay|experience)\w*\.sample\w*\(", re.IGNORECASE)
"""Calls that draw samples of a replay buffer."""
_RATES = re.compile(r"(\b|_)lr(\b|_)|learning_rate")
_ROOTS = ("torch", "apex")
# fmt: off
_MANAGED = (
    "accelerate", "colossalai", "composer", "deepspeed", "fairscale", "horovod", "ignite", "lightning",
    "lightning_fabric", "lockstep", "pytorch_lightning", "ray",
)
# fmt: on


@dataclass(frozen=True)
class Wrap:
    """One call that wraps a model."""

    kind: str
    call: ast.Call
    source: str
    """The wrapped expression, as text: ``model``."""
    target: str
    """The name that the wrapped model is assigned to; empty where there is none."""
    certain: bool
    """True outside of every ``if`` and ``try`` of its function."""


def wraps(script: Script, *kinds: str) -> list[Wrap]:
    """The wraps of these kinds, in the order of the lines."""
    found = []
    for call in script.calls:
        first, _, rest = script.name(call).partition(".")
        kind = rest.rpartition(".")[2]
        module = argument(call, "module", 0)
        if first in _ROOTS and kind in kinds and module is not None:
            branches = script.around(call, (ast.If, ast.IfExp, ast.Try), within_function=True)
            certain = all(isinstance(each, ast.If) and "__name__" in names_in(each.test) for each in branches)
            found.append(Wrap(kind, call, script.text(module), target_of(script, call), certain))
    return found


def starts_group(script: Script) -> list[ast.Call]:
    """The calls that start torch's process group."""
    return script.torch_calls("init_process_group")


def leaves_files(script: Script) -> bool:
    """Returns True where the file starts the ranks only by torch, or by Lockstep, which leaves files to scripts."""
    return bool(runs_of(script)) or (bool(starts_group(script)) and not is_managed(script))


def runs_of(script: Script) -> list[str]:
    """The names of the runs of Lockstep that the file begins; ``run`` where it does not say."""
    begun = script.calls_of("lockstep.init")
    named = {node.value: script.text(node.targets[0]) for node in script.find(ast.Assign)}
    named |= {
        each.context_expr: script.text(each.optional_vars) for each in script.find(ast.withitem) if each.optional_vars
    }
    return [named.get(call, "run") for call in begun]


def is_managed(script: Script) -> bool:
    """Returns True where a library that takes over these duties is imported: Accelerate, DeepSpeed, Lightning, ..."""
    return not script.imported_roots.isdisjoint(_MANAGED)


def is_distributed(script: Script) -> bool:
    """Returns True where the file itself shows that it runs on several ranks, by torch only."""
    shown = starts_group(script) or wraps(script, DDP, FSDP) or script.torch_calls("DistributedSampler")
    return bool(shown) and not is_managed(script)


def reduces(script: Script) -> bool:
    """Returns True where anything in the file could combine the values of several ranks."""
    parts = ("reduce", "gather", "synchron", "sync_", "average_across", "broadcast", "dist_mean")
    others = ("broadcast_buffers", "reducelronplateau", "sync_b", "syncb")
    words = (word.lower() for word in script.words)
    return any(part in word for word in words for part in parts if not any(other in word for other in others))


def optimizers_of(script: Script) -> list[ast.Call]:
    """The optimizers, schedulers and averages of weights that are given a name, also by functions of the script."""
    cleared = {script.owner(each) for each in script.method_calls("zero_grad")}
    cleared -= {root_of(script.owner(each)) for each in script.method_calls("parameters", "train", "eval")}
    stepped = {script.owner(each) for each in script.method_calls("step")}
    made: list[ast.Call] = []
    for call in script.calls:
        name, target, first = script.name(call), target_of(script, call), argument(call, "optimizer", 0)
        names = set(target.split(", "))
        is_made = bool(names & cleared) and names <= cleared | stepped  # optimizer, schedule = make(model)
        of_torch = name.startswith("torch.optim.")
        of_others = last_name(call.func)[:1].isupper() and bool(owners_of(script, call))
        is_schedule = target in stepped and any(target_of(script, each) == script.text(first) for each in made if first)
        if target and (of_torch or of_others or is_made or is_schedule or name.endswith(_AVERAGES)):
            made.append(call)
    return made


def backwards(script: Script) -> list[ast.Call]:
    """The calls of ``loss.backward()``, ``scaler.scale(loss).backward()`` and ``engine.backward(loss)``."""
    found = script.method_calls("backward")
    found = [call for call in found if len(call.args) <= 1 and script.owner(call) not in ("self", "super()")]
    return found + [call for call in script.calls if is_scaler(script, call)]


def is_scaler(script: Script, call: ast.Call) -> bool:
    """Returns True for ``loss_scaler(loss, optimizer, ...)``, as of timm: backward pass, clipping and step in one."""
    is_scaler = len(call.args) > 1 and "scaler" in last_name(call.func).lower()
    return is_scaler and "optim" in script.text(call.args[1]).lower()


def loss_of(script: Script, call: ast.Call) -> ast.expr:
    """The loss of a backward pass, out of the scaler or engine that is given it."""
    loss = receiver(call)
    is_engine = call.args and isinstance(loss, ast.Name) and "loss" not in loss.id.lower()
    if is_engine or is_scaler(script, call):
        return call.args[0]
    return loss.args[0] if isinstance(loss, ast.Call) and method(loss) == "scale" and loss.args else loss


def target_of(script: Script, call: ast.Call) -> str:
    """The name, or names with commas, that the value of a call is assigned to; empty where there is none."""
    match script.statement(call):
        case ast.Assign(targets=[ast.Tuple(elts=parts)], value=value) if value is call:
            return ", ".join(map(script.text, parts))
        case ast.Assign(targets=[target], value=ast.IfExp(body=one, orelse=other)) if call in (one, other):
            return script.text(target)
        case ast.Assign(targets=[target], value=value) if value is call:
            return script.text(target)
    return ""


def owners_of(script: Script, call: ast.Call) -> list[str]:
    """Whose parameters a call is given: ``net.head`` for ``Optimizer(net.head.parameters())``."""
    parts = script.sources(call.args[0]) if call.args else ()
    calls = [each for each in parts if isinstance(each, ast.Call) and method(each) == "parameters"]
    return [script.owner(each).removesuffix(".module") for each in calls]


def takes_part(script: Script, call: ast.Call) -> bool:
    """Returns True where a call is given some of the parameters that are trained: ``model.head.parameters()``."""
    trained = [owner for made in optimizers_of(script) for owner in owners_of(script, made)]
    given, calls = owners_of(script, call), backwards(script)
    inner = [loop for loop in script.around(call, ast.For) if not any(script.holds(loop, each) for each in calls)]
    left = [each for each in trained if not any(f"{each}.".startswith(f"{owner}.") for owner in given)]
    is_known = {*map(root_of, given)} <= {*map(root_of, trained)}
    return bool(given and left and is_known) or any(names_in(each.target) & names_in(call.args[0]) for each in inner)


def root_of(name: str) -> str:
    """The object that an attribute belongs to: ``net`` of ``net.head``, ``self.net`` of ``self.net.head``."""
    return ".".join(name.split(".")[: 2 if name.startswith("self.") else 1])


def may_be_model(script: Script, node: ast.AST, inputs: set[str]) -> bool:
    """False for functions of torch, classes such as ``Variable`` and methods of an input such as ``x.float()``."""
    name = script.name(node) if isinstance(node, ast.Call) else ""
    first, last = name.partition(".")[0], name.rpartition(".")[2]
    return (
        bool(name) and first not in {"torch", *inputs} and not (first == last and last[0].isupper() and len(last) > 1)
    )


def counts_of(script: Script, step: ast.Call) -> list[ast.expr]:
    """Each n by which a step is made at every n-th backward pass: ``if (i + 1) % n == 0:``, ``if i % n: continue``."""
    calls = [each for each in backwards(script) if loops_around(script, each)[:1] == loops_around(script, step)[:1]]
    skips = [each for each in script.find(ast.If) if isinstance(each.body[-1], ast.Continue)]
    skips = [each for each in skips if script.follows(step, each) and any(script.follows(each, b) for b in calls)]
    is_alone = not any(script.exclusive(step, each) for each in script.method_calls("step"))
    both = [each for each in calls if is_alone and any(script.exclusive(each, other) for other in calls)]  # no_sync
    around = {test for each in calls if each not in both for test in script.tests_around(each)}
    tests = [test for test in (*script.tests_around(step), *(each.test for each in skips)) if test not in around]
    parts = [part for test in tests for part in ast.walk(test) if calls and isinstance(part, ast.BinOp)]
    return [part.right for part in parts if isinstance(part.op, ast.Mod)]


def passes_of_step(script: Script, call: ast.Call) -> ast.expr | None:
    """The n of the loop ``for _ in range(n):`` around a backward pass if the step comes after all n; else None."""
    around = loops_around(script, call)
    counted = range_of(script, around[0]) if around[1:] and batches_around(script, call) is None else None
    steps = [each for each in script.method_calls("step") if "sched" not in script.owner(each).lower()]
    below = [each for each in steps if loops_around(script, each)[:1] == around[1:2] and script.follows(each, call)]
    return counted.args[-1] if counted is not None and counted.args and below else None


def accumulates(script: Script, call: ast.Call) -> bool:
    """Returns True where the gradients of several backward passes may be added up to those of one step."""
    loop = loops_around(script, call)[:1]
    steps = [each for each in script.method_calls("step") if loops_around(script, each)[:1] == loop]
    return not steps or any(counts_of(script, each) for each in steps)


def is_changed(script: Script, call: ast.Call) -> bool:
    """Returns True for a loss that ``loss += penalty`` makes another than its source."""
    loss = script.text(loss_of(script, call))
    above = [each for each in script.find(ast.AugAssign) if script.text(each.target) == loss]
    above = [each for each in above if script.follows(call, each)]
    return any(not isinstance(each.op, ast.Div) or not accumulates(script, call) for each in above)


def source_of(script: Script, call: ast.Call) -> ast.expr | None:
    """The expression that a loss comes from: of ``f(output, y) / parts`` the first, where gradients are accumulated."""
    node: ast.expr | None = loss_of(script, call)
    loop = loops_around(script, call)[:1]
    for _ in range(4):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div):
            if not accumulates(script, call):
                return node
            node = node.left
        elif isinstance(node, ast.Name):
            values = script.values(node)
            values = [each for each in values if each and loop and script.holds(loop[0], each)] or values
            node = values[0] if len(values) == 1 else None
    return node


def batches_around(script: Script, call: ast.Call) -> ast.For | None:
    """The loop over batches that a backward pass is in: not one over numbers, a list, models or parts of a step."""
    trained = {script.owner(each) for each in script.method_calls("step", "zero_grad", "train", "eval")}
    loops = [each for each in loops_around(script, call) if isinstance(each, ast.For) and not range_of(script, each)]
    loops = [each for each in loops if not (isinstance(each.iter, ast.List) or trained & names_in(each.target))]
    steps = [each for each in script.method_calls("step") if "sched" not in script.owner(each).lower()]
    whole = [each for each in loops if any(script.holds(each, step) for step in steps)]
    return next(iter(whole or loops), None)


def epochs_around(script: Script, node: ast.AST) -> Loop | None:
    """The loop over epochs that a node is in: that around the loop over the batches of a backward pass."""
    for call in backwards(script):
        around, over_batches = loops_around(script, call), batches_around(script, call)
        for loop in around[around.index(over_batches) + 1 :][:1] if over_batches in around else ():
            if loop in loops_around(script, node):
                return loop
    return None


def set_in(loop: Loop) -> set[str]:
    """The names of the variables that the body of a loop sets."""
    return {name for part in loop.body for each in ast.walk(part) for to, _ in bindings(each) for name in names_in(to)}


def inputs_of(script: Script, loop: ast.For, loss: ast.expr | None) -> dict[str, str]:
    """The parts of a batch where the loop or its body takes it apart, ``{"x": "data[0]"}``; else the batch that the
    loss reads, ``{"batch": "data"}``."""
    target = loop.target
    if "enumerate(" in script.text(loop.iter) and isinstance(target, ast.Tuple):
        target = target.elts[-1]
    for node in loop.body:
        match node:
            case ast.Assign(targets=[ast.Tuple() as parts], value=ast.Name() | ast.ListComp() as value):
                target = parts if isinstance(target, ast.Name) and target.id in names_in(value) else target
    if isinstance(target, ast.Name) and loss is not None and target.id in names_in(loss):
        return {target.id: "data"}
    elements = target.elts if isinstance(target, ast.Tuple) else []
    return {script.text(each): f"data[{number}]" for number, each in enumerate(elements)}


def is_below_step(script: Script, node: ast.expr, call: ast.Call) -> bool:
    """Returns True below the loss of a backward pass, and not above another: for what is no part of a step."""
    loss = source_of(script, call)
    begin = loss if loss is not None and script.same_function(loss, call) else call
    more = [each for each in backwards(script) if script.follows(each, call) and script.follows(each, node)]
    return script.follows(node, begin) and not script.holds(begin, node) and not more


def is_above(script: Script, call: ast.Call, loop: ast.For) -> bool:
    """Returns True above a loop over batches, in the same loop over epochs."""
    around = set(loops_around(script, call))
    places = [each for each in places_of(script, loop) if around & set(loops_around(script, each))]
    return loop not in around and any(script.follows(each, call) for each in places)


def takes_places(script: Script, loop: Loop) -> bool:
    """Returns True for a loop over the places of one data set: ``for i in range(0, n, 32): x[i : i + 32]``."""
    name = last_name(loop.target) if isinstance(loop, ast.For) else ""
    for node in (each for part in loop.body for each in ast.walk(part)):
        if isinstance(node, ast.Name) and node.id == name:
            call = script.parent(node)
            is_given = isinstance(call, ast.Call) and script.name(call) != "print"
            if is_given or any(script.around(node, ast.Subscript)):
                return True
    return not name


def takes_samples(script: Script, loop: Loop, call: ast.Call) -> bool:
    """Returns True if a loop around a backward pass trains on samples of a replay buffer."""
    return any(
        (script.holds(loop, each) and method(each).startswith("sample") and each.args)
        or (script.same_function(each, call) and DRAWN.search(script.text(each)))
        for each in script.calls
    )


def drawn_by(script: Script, loop: Loop, call: ast.Call) -> str:
    """The loaders from whose iterators a loop takes its batches, as ``next(batches)`` or ``batches.next()``."""
    found: list[str] = []
    for each in script.calls:
        drawn = each.args[0] if script.name(each) == "next" and each.args else None
        drawn = receiver(each) if method(each) in ("next", "__next__") and not each.args else drawn
        is_used = not isinstance(script.parent(each), ast.Expr)  # not: bar.next()
        is_here = is_used and (script.holds(loop, each) or script.same_function(each, call))
        if is_here and isinstance(drawn, ast.Name | ast.Attribute):
            given = next((value for value in script.values(drawn) if isinstance(value, ast.Call)), None)
            read = given.args[0] if given and len(given.args) == 1 else None  # iter(loader), cycle(loader)
            found.append(script.text(read) if isinstance(read, ast.Name | ast.Attribute) else "loader")
    found = list(dict.fromkeys(found))
    return f"({', '.join(found)})" if len(found) > 1 else "".join(found)


def kept_as(script: Script, name: str, node: ast.AST) -> str:
    """The attribute in which the class of a node keeps a variable, as ``self.model = model``; else the variable."""
    owner = script.class_of(node)
    kept = [pair for each in ast.walk(owner) for pair in bindings(each)] if owner is not None else []
    found = [script.text(target) for target, value in kept if isinstance(value, ast.Name) and value.id == name]
    return next((each for each in found if each.startswith("self.")), name)


def batch_size(script: Script, begin: ast.AST) -> str:
    """The batch size of a step: of the first DataLoader that shuffles, else of any, else a name; ``B`` if none."""
    here = script.scope(begin)
    loaders = script.calls_by_name.get("DataLoader", [])  # torch's, or of torch_geometric
    shuffling = [call for call in loaders if constant(argument(call, "shuffle")) is True]
    sizes = [argument(call, "batch_size", 1) for call in [*shuffling, *loaders]]
    for settings in script.find(ast.Dict):  # DataLoader(data, **settings)
        pairs = zip(settings.keys, settings.values, strict=True)
        sizes += [value for key, value in pairs if constant(key) == "batch_size"]
    steps = [range_of(script, loop) for call in backwards(script) for loop in loops_around(script, call)]
    cuts = [argument(each, "step", 2) for each in steps if each is not None]  # range(0, len(x), 32)
    sizes += [each for each in cuts if each is not None and _BATCH.search(script.text(each))]
    sizes += [argument(call, "batch_size") for call in script.calls]  # make_loader(batch_size=32)
    sizes += [each for each in script.find(ast.Name, ast.Attribute) if last_name(each) == "batch_size"]
    found = sorted(filter(None, sizes), key=lambda size: bool(re.search("test|val", script.text(size), re.IGNORECASE)))
    hidden = {each: parameters(scope) if isinstance(scope := script.scope(each), FUNCTIONS) else () for each in found}
    known = [n for n in found if script.scope(n) is here or (names_in(n) - {"self"}).isdisjoint(hidden[n])]
    found = known or found or [ast.Name("B")]
    shares = [each for size in (found[0], *script.values(found[0])) if size for each in ast.walk(size)]
    cuts_of = {script.text(each.right): each.left for each in shares if isinstance(each, ast.BinOp)}
    wholes = [whole for by, whole in cuts_of.items() if PROCESSES.search(by)]  # batch // world_size // accumulate
    size = script.text((wholes or found)[0])
    made = [each for each in script.method_calls("step") if "sched" not in script.owner(each).lower()]
    counts = [counts_of(script, each)[:1] for each in made if loops_around(script, each)]
    parts = [[n] for call in backwards(script) if (n := passes_of_step(script, call)) is not None]
    if (counts := counts if any(counts) else parts) and all(counts):  # gradients of several batches are added up
        batches = script.text(counts[0][0]) if not wholes or script.text(counts[0][0]) not in cuts_of else "1"
        if batches != "1":
            size = str(int(size) * int(batches)) if (size + batches).isdigit() else f"{size} * {batches}"
    if not wholes and script.torch_calls("DistributedSampler"):
        return f"{size} * N"
    fewer = next(k for k in (8, 4, 2, 7, 5, 3, 1) if int(size) % k == 0) if size.isdigit() else 8
    return size if fewer == 8 else f"{size}, micro_batches={fewer}"  # which has to divide the batch


def carried_in(script: Script, loop: Loop | None) -> Iterator[ast.Assign]:
    """The calls that take a state from one batch to the next, as ``output, hidden = model(x, hidden)``."""
    made = [node for part in (loop.body if loop else ()) for node in ast.walk(part) if isinstance(node, ast.Assign)]
    pairs = [(target, node.value) for node in made for each in node.targets for target in _each_of(each)]
    begun = {name for target, value in pairs for name in names_in(target) - names_in(value)}
    begun |= names_in(loop.target) if isinstance(loop, ast.For) else set()
    for node in made:
        if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Call):
            states = names_in(node.targets[0]) & {each.id for each in node.value.args if isinstance(each, ast.Name)}
            if states - begun:
                yield node


def _each_of(target: ast.expr) -> list[ast.expr]:
    return target.elts if isinstance(target, ast.Tuple) else [target]


def has_own_batches(script: Script, data: ast.expr) -> bool:
    """Returns True for an object of a class in the file that gives batches itself, by ``__iter__`` alone."""
    made = {last_name(each.func) for each in script.sources(data, 1) if isinstance(each, ast.Call)}
    for owner in script.find(ast.ClassDef):
        methods = {each.name for each in owner.body if isinstance(each, FUNCTIONS)}
        if owner.name in made and "__iter__" in methods and "__getitem__" not in methods:
            return not any(last_name(base) in ("DataLoader", "IterableDataset") for base in owner.bases)
    return False


def rates_by_processes(script: Script) -> Iterator[ast.expr | ast.stmt]:
    """Learning rates that are multiplied by the number of processes."""
    found: list[tuple[ast.expr | ast.stmt, ast.operator, list[ast.expr]]]
    found = [(node, node.op, [node.left, node.right]) for node in script.find(ast.BinOp)]
    found += [(node, node.op, [node.target, node.value]) for node in script.find(ast.AugAssign)]
    for node, how, sides in found:
        into, given = script.statement(sides[0]), script.parent(node)
        named = [*sides, *(into.targets if isinstance(into, ast.Assign) else ())]
        words = [*map(script.text, named), str(given.arg) if isinstance(given, ast.keyword) else ""]
        is_product = isinstance(how, ast.Mult) and any(PROCESSES.search(script.text(each)) for each in sides)
        if is_product and any(map(_RATES.search, words)):
            yield node
