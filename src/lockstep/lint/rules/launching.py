"""Rules on devices, on how processes start, connect and end, and on settings computed from the number of processes."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.ranks import GLOBAL, LOCAL, lower_name, numbers_processes, proved_rank, rank_kind
from lockstep.lint.rules.gradients import gradient_reductions
from lockstep.lint.script import (
    FUNCTIONS,
    Script,
    argument,
    arguments,
    bindings,
    constant,
    last_name,
    method,
    receiver,
)
from lockstep.lint.wrappers import DDP, is_managed, starts_group, wraps

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_HOSTS = ("nodes", "num_nodes", "nnodes", "n_nodes", "nnode", "node_count", "num_hosts", "hosts")
_FALLBACK = re.compile("MASTER_|environ|RANK|SLURM|debug|is None|WORLD")
_ADDRESS = re.compile(r"tcp://[^{}]*:([1-9]\d*)$")
# fmt: off
_STARTERS = (
    "is_available", "init", "set_device", "current_device", "get_device_name", "get_device_properties",
)
# fmt: on


@rule("LS010", "CUDA_VISIBLE_DEVICES is compared with == where it was meant to be assigned.")
def visible_devices_compared(script: Script) -> Iterator[Hit]:
    """A comparison that stands alone as a statement has no effect."""
    for node in script.find(ast.Expr):
        match node.value:
            case ast.Compare(left=ast.Subscript(slice=index) as left) if constant(index) == _VISIBLE:
                yield Hit(
                    node,
                    "this compares and does nothing: the devices are not restricted.",
                    f"{script.text(left)} = {script.text(node.value.comparators[0])}",
                )


@rule(
    "LS011",
    "CUDA_VISIBLE_DEVICES is set after CUDA has been started in the process, which reads it only once.",
)
def visible_devices_set_late(script: Script) -> Iterator[Hit]:
    """Looks at lines of one function and at the module's own lines; not where processes are spawned."""
    if script.mentions("spawn", "process", "popen", "subprocess"):
        return
    starts = [call for call in script.calls if _starts_cuda(script, call)]
    for node in _sets_variable(script, _VISIBLE):
        early = [call for call in starts if _runs_before(script, call, node)]
        if early:
            yield Hit(
                node,
                f"line {early[0].lineno} has started CUDA already ({script.text(early[0])}), so this is not "
                "read any more.",
                f"{script.text(node)}  # above line {early[0].lineno}, best before torch is imported",
            )


@rule("LS012", "The global rank is used as the number of a device: wrong on the second host.")
def global_rank_as_device(script: Script) -> Iterator[Hit]:
    """Only where the value comes from get_rank() or RANK; what a spawned function is given is a local rank."""
    for node in _device_numbers(script):
        if proved_rank(script, node) == GLOBAL:
            yield Hit(
                node,
                f"{script.text(node)} counts over all hosts, devices are counted on each: rank 8 on the second "
                "host of 8 has no device 8.",
                'local_rank = int(os.environ["LOCAL_RANK"])  # and use it here',
            )


@rule("LS013", "The local rank is given where the global one belongs: on two hosts two processes have the same.")
def local_rank_as_global(script: Script) -> Iterator[Hit]:
    """In DistributedSampler and init_process_group."""
    for call in script.torch_calls("DistributedSampler", "init_process_group"):
        rank = argument(call, "rank", 2 if script.name(call).endswith("Sampler") else None)
        if rank is not None and proved_rank(script, rank) == LOCAL:
            yield Hit(
                rank,
                f"{script.text(rank)} is the local rank: on two hosts two processes have the same number.",
                'rank=int(os.environ["RANK"])  # or leave it out',
            )


@rule("LS014", "All ranks of a host compute on the first GPU: no rank chooses its own.")
def every_rank_on_one_device(script: Script) -> Iterator[Hit]:
    """Needs DDP and the process group in the file, and nowhere a device chosen by a rank."""
    wrapped = wraps(script, DDP)
    chosen = script.mentions("set_device", "cuda_visible_devices", "local_rank", "xpu", "set_default_device")
    if not wrapped or not starts_group(script) or chosen or is_managed(script):
        return
    for wrap in wrapped:
        devices = argument(wrap.call, "device_ids", 1)
        literal = devices is not None and script.text(devices) in ("[0]", "['cuda:0']")
        if literal or (devices is None and _on_first_device(script, wrap.source)):
            yield Hit(
                wrap.call,
                "every rank of a host takes the first GPU: no line gives a rank a device of its own.",
                'torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))  # before the model is moved',
            )


def _sets_variable(script: Script, variable: str) -> Iterator[ast.Assign]:
    """The assignments to ``os.environ[variable]``."""
    for node in script.find(ast.Assign):
        match node.targets[0]:
            case ast.Subscript(value=held, slice=key) if constant(key) == variable:
                if script.name(held) == "os.environ":
                    yield node


def _starts_cuda(script: Script, call: ast.Call) -> bool:
    name = script.name(call)
    if name.startswith("torch.cuda."):
        return name.rpartition(".")[2] in _STARTERS
    if call.args:
        return method(call) == "to" and str(constant(call.args[0])).startswith("cuda")
    return method(call) == "cuda" and not call.keywords


def _runs_before(script: Script, early: ast.Call, late: ast.Assign) -> bool:
    if any(script.around(early, ast.Lambda)):
        return False
    held = any(script.around(early, (*FUNCTIONS, ast.ClassDef, ast.If, ast.IfExp)))
    above = early.lineno < late.lineno and not script.exclusive(late, early)
    return script.follows(late, early) or (above and not held)


def _device_numbers(script: Script) -> Iterator[ast.expr]:
    """Every expression that is used as the number of a CUDA device."""
    for call in script.calls:
        name = script.name(call)
        chooses = name in ("torch.cuda.set_device", "torch.cuda.device")
        moves = method(call) in ("cuda", "to") and not name.startswith("torch.")
        if call.args and (chooses or moves):
            yield call.args[0]
        elif name == "torch.device":
            match call.args:
                case [ast.Constant(value="cuda"), number]:
                    yield number
                case [ast.JoinedStr(values=[ast.Constant("cuda:"), ast.FormattedValue(value=number)]), *_]:
                    yield number
        devices = argument(call, "device_ids")
        if isinstance(devices, ast.List) and len(devices.elts) == 1:
            yield devices.elts[0]


def _on_first_device(script: Script, source: str) -> bool:
    """Returns True where the model is moved to "cuda" or "cuda:0" and nothing else."""
    moves = [call for call in script.method_calls("cuda", "to") if source.startswith(script.owner(call))]
    for call in moves:
        values = [value for item in call.args[:1] for value in script.values(item) or [item]]
        texts = [script.text(value) if value is not None else "" for value in values]
        anywhere = not values and (method(call) != "cuda" or call.keywords)
        if anywhere or not all("'cuda'" in text or "'cuda:0'" in text for text in texts):
            return False
    return bool(moves)


@rule("LS015", "The port of the rendezvous is a number in the script: two runs on a host collide.")
def hard_coded_port(script: Script) -> Iterator[Hit]:
    """MASTER_PORT assigned without a look at what the launcher has set, or a literal init_method."""
    for node in _sets_variable(script, "MASTER_PORT"):
        port = node.value.args[0] if isinstance(node.value, ast.Call) and node.value.args else node.value
        asked = any(_FALLBACK.search(script.text(test)) for test in script.tests_around(node))
        if str(constant(port)).isdigit() and not asked and not any(script.around(node, ast.ExceptHandler)):
            yield Hit(
                node,
                "a second run on this host fails with 'address already in use', and a launcher's own "
                "choice is overwritten.",
                "delete the line and start with: lockstep run SCRIPT (or torchrun --standalone)",
            )
    for call in starts_group(script):
        address = argument(call, "init_method", 1)
        if address is not None and _ADDRESS.search(str(constant(address))):
            yield Hit(
                address,
                "a second run on this host fails with 'address already in use'.",
                'init_method="env://"  # the launcher chooses the port',
            )


@rule(
    "LS016",
    "The local rank is read only from --local_rank, which torchrun does not pass: every process takes the default.",
)
def local_rank_option_only(script: Script) -> Iterator[Hit]:
    """Needs the process group in the same file, where LOCAL_RANK could have been read."""
    if not starts_group(script) or is_managed(script):
        return
    assigned = [node for node in script.find(ast.Assign) if isinstance(node.value, ast.Call)]
    overwritten = any(".local_rank" in script.text(target) for node in assigned for target in node.targets)
    if overwritten or any("LOCAL_RANK" in word for word in script.words):
        return
    for call in script.method_calls("add_argument"):
        if any(constant(item) in ("--local_rank", "--local-rank") for item in call.args):
            yield Hit(
                call,
                "torchrun sets LOCAL_RANK and passes no such option, so every process gets the default.",
                'local_rank = int(os.environ["LOCAL_RANK"])',
            )


@rule(
    "LS017",
    "Processes are spawned outside of if __name__ == '__main__': each child imports the file and spawns again.",
)
def spawn_without_main_guard(script: Script) -> Iterator[Hit]:
    """Only torch.multiprocessing's spawn on the module's own lines."""
    for call in script.torch_calls("spawn", "start_processes", within="torch.multiprocessing."):
        if not any(script.around(call, (*FUNCTIONS, ast.Lambda, ast.If))):
            yield Hit(
                call,
                "each child imports this file and runs this line again: RuntimeError in every child.",
                'if __name__ == "__main__":  # above this line',
            )


@rule(
    "LS018",
    "The process group is started and never destroyed: threads and sockets are left to the end of the process.",
)
def group_not_destroyed(script: Script) -> Iterator[Hit]:
    """Only in a file that is a program of its own, not in a module of helpers."""
    calls = starts_group(script)
    if not calls or script.mentions("destroy_process_group") or is_managed(script):
        return
    program = any(constant(node) == "__main__" for node in script.nodes)
    if program or isinstance(script.scope(calls[0]), ast.Module):
        yield Hit(
            calls[0],
            "this group is never destroyed: torch warns of leaked resources, and a rank that fails can leave "
            "the others waiting.",
            "torch.distributed.destroy_process_group()  # last line, in a finally",
        )


@rule(
    "LS019",
    "A rank is computed with the number of hosts in place of this host's number: every host has the same ranks.",
)
def rank_from_number_of_hosts(script: Script) -> Iterator[Hit]:
    """``nodes * gpus + local_rank``, by what the factors are called."""
    for node in script.find(ast.BinOp):
        match node:
            case (
                ast.BinOp(left=ast.BinOp(left=one, op=ast.Mult(), right=other), op=ast.Add(), right=local)
                | ast.BinOp(left=local, op=ast.Add(), right=ast.BinOp(left=one, op=ast.Mult(), right=other))
            ) if numbers_processes(script, local):
                hosts = next((each for each in (one, other) if lower_name(each) in _HOSTS), None)
                each_has = other if hosts is one else one
                if hosts is not None:
                    yield Hit(
                        node,
                        f"{script.text(hosts)} is how many hosts there are: each host gives its processes the same "
                        "ranks.",
                        f"node_rank * {script.text(each_has)} + {script.text(local)}",
                    )


@rule(
    "LS029",
    "A rank is as large as the world, or larger: ranks count from 0, and the start fails or waits forever.",
)
def rank_beyond_world(script: Script) -> Iterator[Hit]:
    """In init_process_group and DistributedSampler, where both numbers are in the file."""
    for call, world, rank in _worlds(script):
        size, number = _literal(script, world), _literal(script, rank)
        if size is not None and number is not None and number >= size > 0:
            yield Hit(
                call,
                f"rank {number} of {size} does not exist: the ranks are 0 to {size - 1}.",
                f"rank={size - 1}  # of the last process",
            )


@rule("LS066", "The number of processes is set to something that depends on the rank: no two ranks agree on it.")
def world_size_by_rank(script: Script) -> Iterator[Hit]:
    """WORLD_SIZE, and world_size or num_replicas of torch's functions."""
    sizes = [node.value for node in _sets_variable(script, "WORLD_SIZE")]
    for size in [*sizes, *(world for _, world, _ in _worlds(script) if world is not None)]:
        if any(rank_kind(script, part) for part in script.sources(size, depth=1)):
            yield Hit(
                size,
                f"{script.text(size)} is another number on each rank, so each process waits for another world.",
                'int(os.environ["WORLD_SIZE"])  # the launcher sets it; or hosts * processes of each, on every rank',
            )


_RECIPE = re.compile(
    "global_batch|micro_batches|seed|(initial_|base_|max_)?lr|learning_rate|eta_min|weight_decay|momentum|"
    "T_max|total_steps|steps_per_epoch|step_size|num_(warmup|training)_steps|warmup_steps|max_norm|label_smoothing"
)
COUNTS = re.compile(
    "(get_)?world_size|num_processes|nproc_per_node|num_gpus|n_?gpus|device_count|all_reduce|DistributedSampler",
    re.IGNORECASE,
)
"""Names of a number of processes or devices, and of what splits by them or sums over them."""
_COMPUTING = re.compile("int|float|round|abs|min|max|pow|sqrt|log|ceil|floor|get|getenv|range|list|islice|enumerate")
_MEANS = re.compile("AVG|MAX|MIN")
"""Operations of a reduction that leave equal numbers as they are."""
_SEEDS = ("manual_seed", "manual_seed_all", "seed", "default_rng", "RandomState")
_CUTS = ("Subset", "random_split")
_SETTERS = dict.fromkeys(("clip_gradients", "epochs", *_SEEDS), 0)
_SETTERS |= dict.fromkeys(("clip_grad_norm_", "clip_grad_value_", *_CUTS), 1)
"""Calls whose arguments are settings, and how many of the first ones are not."""
_EXPRESSIONS = (
    *(ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp),
    *(ast.Lambda, ast.Tuple, ast.List, ast.Return),
)


@rule(
    "LS068",
    "A setting that decides the result of a run of Lockstep is computed from the number of processes.",
)
def recipe_by_world_size(script: Script) -> Iterator[Hit]:
    """In files that import Lockstep: `global_batch`, `lr`, `T_max` and the like, epochs, clipping, gradients, seeds,
    layers of torch, conditions and loops around a step, cut data sets; also by `len()` of a loader that is split."""
    if "lockstep" in script.imported_roots or script.calls_of("lockstep.init"):
        yield from by_world_size(script)


def by_world_size(script: Script) -> Iterator[Hit]:
    """The settings of a file that are computed from the number of processes, whether it imports Lockstep or not."""
    for node, name, value in [*_settings(script), *_steps(script)]:
        if (counted := _counted(script, value)) is not None:
            yield Hit(
                node,
                f"{name}={script.text(counted)} is another value on each number of processes, so each ends otherwise.",
                f"{name}=...  # one value, for all processes together",
            )


def _settings(script: Script) -> Iterator[tuple[ast.expr, str, ast.expr]]:
    """(place, name, value) of all that decides what is trained, as far as names tell that."""
    yield from ((call, script.text(call.args[0]), call) for call in gradient_reductions(script))
    for call in script.calls:
        for each in call.keywords:
            if _RECIPE.fullmatch(each.arg or ""):
                yield call, each.arg or "", each.value
        name, owner = method(call) or last_name(call.func), script.text(receiver(call))
        if script.name(call).startswith("torch.optim."):
            word = "lr" if "lr_sch" not in script.name(call) else name
            yield from ((call, word, each) for each in call.args[1:])
        elif script.name(call).startswith("torch.nn.") and ".parallel." not in script.name(call):
            yield from ((call, name, each) for each in arguments(call))
        elif name in _SETTERS and not (name in _CUTS and _of_rank(script, call)):
            yield from ((call, name, each) for each in call.args[_SETTERS[name] :])
        elif name.endswith("_") and owner.endswith((".grad", ".data")):
            yield from ((call, owner, each) for each in call.args)
    for node in script.nodes:
        pairs = bindings(node) if isinstance(node, ast.Assign | ast.AugAssign) else ()
        for target, value in pairs:
            name = lower_name(target)
            if value and ((isinstance(target, ast.Subscript) and _RECIPE.fullmatch(name)) or name == "grad"):
                yield target, name, value
        if isinstance(node, ast.Dict):
            named = [(str(constant(key)), value) for key, value in zip(node.keys, node.values, strict=True)]
            yield from ((value, name, value) for name, value in named if _RECIPE.fullmatch(name))


def _steps(script: Script) -> Iterator[tuple[ast.expr, str, ast.expr]]:
    """(place, what depends on it, value) of the conditions and the loops that decide how often a step is made."""
    passes = script.method_calls("backward")
    stops: list[ast.AST] = [*script.find(ast.Break)]
    for node in [*script.method_calls("backward", "step"), *stops]:
        around = script.around(node, (ast.For, ast.While), within_function=True)
        loops = [each for each in around if any(script.holds(each, one) for one in passes)]
        tests = [test for test in script.tests_around(node) if any(script.holds(each, test) for each in loops)]
        tests += [getattr(each, "iter" if isinstance(each, ast.For) else "test") for each in loops]
        name = method(node) if isinstance(node, ast.Call) else "break"
        yield from ((each, name, each) for each in tests if not _of_rank(script, each))


@rule(
    "LS069",
    "A loss of Lockstep, which is that of all processes, is summed over them or divided by their number.",
)
def loss_of_all_combined(script: Script) -> Iterator[Hit]:
    """Of values that `run.backward` returns; not where one function does both, whose result is the loss again."""
    passes = set(script.method_calls("backward", "backward_by"))
    reductions = script.torch_calls("all_reduce", "reduce", within="torch.distributed.")
    sums = [call for call in reductions if call.args and not _MEANS.search(script.text(call))]
    summed = [(call, call.args[0]) for call in sums]
    divided = [(node, whole) for node, whole, by in _divisions(script) if _counted(script, by) is not None]
    combined = [
        [node for node, loss in pairs if not passes.isdisjoint(script.sources(loss))] for pairs in (summed, divided)
    ]
    for here, there in (combined, combined[::-1]):
        balanced = {script.scope(node) for node in there}
        for node in here:
            if script.scope(node) not in balanced:
                yield Hit(
                    node,
                    f"{script.text(node)} changes a loss of run.backward, which is that of all processes already.",
                    "delete this: the loss as it is returned is the same number on every process",
                )


def _divisions(script: Script) -> Iterator[tuple[ast.expr | ast.stmt, ast.expr, ast.expr]]:
    """(division, what is divided, what it is divided by)."""
    for node in script.nodes:
        match node:
            case (
                ast.BinOp(left=whole, op=ast.Div(), right=by)
                | ast.AugAssign(target=whole, op=ast.Div(), value=by)
                | ast.Call(func=ast.Attribute(value=whole, attr="div" | "div_"), args=[by])
            ):
                yield node, whole, by


def _of_rank(script: Script, node: ast.expr) -> bool:
    """True for what depends on the rank, or is made of the shares of a sampler; other rules tell of these."""
    return "sampler" in script.text(node) or any(rank_kind(script, part) for part in script.sources(node))


def _counted(script: Script, node: ast.AST, depth: int = 4) -> ast.AST | None:
    """The expression that computes a number from that of processes, in the file; of a loader only its length."""
    name = lower_name(node) if isinstance(node, ast.expr) else ""
    values = script.values(node) if depth and isinstance(node, ast.Name | ast.Attribute) else []
    if constant(node) == "WORLD_SIZE" or COUNTS.fullmatch(name):
        is_one = name == "num_processes" and script.mentions("accelerat")  # that of the adapter
        is_set = values and all(isinstance(each, ast.Constant) for each in values)
        return None if is_one or is_set else node
    if values:
        return next(filter(None, (_counted(script, each, depth - 1) for each in values if each)), None)
    parts: Iterable[ast.AST] = ast.iter_child_nodes(node) if isinstance(node, _EXPRESSIONS) else ()
    if isinstance(node, ast.Call):
        name = last_name(node.func)
        own = [each for each in script.functions if each.name == name] if depth else []
        returned = [each for function in own for each in ast.walk(function) if isinstance(each, ast.Return)]
        parts = [node.func, *returned, *(node.args if _COMPUTING.fullmatch(name) else ())]
        depth = max(depth - 1, 0)
        if name == "len" and any(_is_share(script, each) for one in node.args for each in script.values(one)):
            return node
    return node if any(_counted(script, each, depth) for each in parts) else None


def _is_share(script: Script, loader: ast.expr | None) -> bool:
    """True for a DataLoader whose length depends on the number of processes, by its sampler or its batch size."""
    if not isinstance(loader, ast.Call) or last_name(loader.func) != "DataLoader":
        return False
    size, parts = argument(loader, "batch_size", 1), script.sources(argument(loader, "sampler"))
    made = [one for one in parts if isinstance(one, ast.Call) and last_name(one.func) == "DistributedSampler"]
    is_split = any(constant(argument(each, "num_replicas", 1)) != 1 for each in made)
    return is_split != (size is not None and _counted(script, size) is not None)


def _worlds(script: Script) -> Iterator[tuple[ast.Call, ast.expr | None, ast.expr | None]]:
    """(call, number of processes, rank) of each call that takes them."""
    for call in script.torch_calls("init_process_group"):
        yield call, argument(call, "world_size", 3), argument(call, "rank", 4)
    for call in script.torch_calls("DistributedSampler"):
        yield call, argument(call, "num_replicas", 1), argument(call, "rank", 2)


def _literal(script: Script, node: ast.expr | None) -> int | None:
    """The number that a literal is, or that a name is set to once and for all."""
    values = script.values(node) if isinstance(node, ast.Name) else [node]
    number = constant(values[0]) if len(values) == 1 else None
    return number if isinstance(number, int) else None
