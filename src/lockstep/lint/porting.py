"""The lines of a script that change when it trains with Lockstep: ``lockstep port train.py``.

``changes`` asks each finder below for the lines of one kind and what to write there; the rows are those of
docs/moving.md. Finders go by the names of calls, so that what they say is advice, not a proof.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from operator import itemgetter

from lockstep.errors import ConfigError
from lockstep.lint.ranks import FIRST, callers_of, loops_around, on_one_rank, places_of, rank_test
from lockstep.lint.script import (
    FUNCTIONS,
    Loop,
    Script,
    argument,
    bar_of,
    bindings,
    constant,
    last_name,
    method,
    names_in,
    parse,
    range_of,
    read_by,
    read_text,
    renamed,
)
from lockstep.lint.wrappers import (
    DDP,
    DP,
    DRAWN,
    FSDP,
    backwards,
    batch_size,
    batches_around,
    carried_in,
    counts_of,
    drawn_by,
    epochs_around,
    has_own_batches,
    inputs_of,
    is_above,
    is_below_step,
    is_changed,
    is_scaler,
    kept_as,
    loss_of,
    may_be_model,
    optimizers_of,
    owners_of,
    passes_of_step,
    rates_by_processes,
    root_of,
    runs_of,
    set_in,
    source_of,
    takes_part,
    takes_places,
    takes_samples,
    target_of,
    wraps,
)
from lockstep.text import grouped


@dataclass(frozen=True)
class Change:
    """Advice on one line, or on several alike."""

    section: str
    lines: tuple[int, ...]
    """Counted from 1."""
    source: str
    """The code of the first of them."""
    advice: str


_Node = ast.expr | ast.stmt
_Found = tuple[_Node, str]

_ADAPTERS = {
    "accelerate": "from lockstep.integrations.accelerate import Accelerator; Accelerator(global_batch=...)",
    "lightning": "from lockstep.integrations.lightning import LightningTrainer; LightningTrainer(global_batch=...)",
    "transformers": "from lockstep.integrations.transformers import TransformersTrainer; "
    "TransformersTrainer(lockstep.init(global_batch=...), model=..., args=...)",
}
"""The imports and calls that replace the trainer of a library."""
_ADAPTERS["pytorch_lightning"] = _ADAPTERS["lightning"]
_TRAINERS = ("Accelerator", "Trainer", "LightningModule")
_DATA = re.compile(r"load|data|set|dl|batch|iter|val|test", re.IGNORECASE)
"""Names of what an evaluation reads."""
_SIZE = re.compile(r"len\((\w+)\)|(\w+)\.size\(0\)|(\w+)\.shape\[0\]|(\w+)\.num_graphs")
_MOVED = re.compile(r"\.(to|cuda)\(((device=)?[\w.]*device(\(\))?|gpu)?(, )?(non_blocking=True)?\)")
_READ = re.compile(r"[\w.]+(\[('\w+'|\d+|[a-z][^:,]*:[^:,]*)\])?|(torch\.from_numpy|Variable|[\w.]*[Tt]ensor)\(\w+\)")
"""Texts of what a loop reads: ``y``, ``batch["y"]``, ``y[i : i + 32]``, ``torch.tensor(y)``."""
_AVERAGE = re.compile(r"ema|swa|average|^self$", re.IGNORECASE)  # whose ``module`` is not that of a wrapper
_MOVE = re.compile(r"^\w+(\.(to|cuda)\([^()]*(\([^()]*\))?[^()]*\))?$|\bfor\b")
"""Texts of what moves a batch to a device or takes it apart, and does not change it."""

_SETTING = "leave out: bits depend on it; lockstep.init has the options threads=, precision= and deterministic="
_VALUES_OF_ALL = (
    "leave out, and a division by the number of processes: run.backward and run.evaluate return means of all; a loss "
    "that compares samples has those of all processes with run.backward(..., whole_batch=True)"
)
_FOR_LOGS = "for logs only: run.world.world_size, run.world.rank, run.is_main; the recipe must not depend on them"
_SAMPLER = (
    "leave out the sampler, with its set_epoch, and give the DataLoader shuffle=True. Its batch size was that of one "
    "process; global_batch is that of all N"
)
_BEST = "the best weights of this run: run.load_state_dict(torch.load(...) if run.is_main else {}), on all ranks"
_SUM = "; if it is a sum over samples, return the pair (sum, number of samples); moving.md tells the learning rate"
_RESUME = (
    'a checkpoint to resume from: lockstep.init(directory="runs/a", resume="auto"). Data stay, and pretrained weights, '
    "above run.prepare"
)
_LAUNCHER = ("MASTER_ADDR", "MASTER_PORT", "RANK", "LOCAL_RANK", "WORLD_SIZE")
_WITH_FORWARD = "loss_fn, forward=forward), where forward(data) returns the output and loss_fn(output, data) the loss"
_DATA_OF_THE_LOOP = (
    "; make a data set of what the loop takes its batches from, such as TensorDataset(x, y), without a permutation; "
    "where that is all of it, (batch,) = run.batches(data), with global_batch its size or the next multiple of 8"
)
_OWN_LOADER = "; of a class of your own, give a data set of the samples that it cuts its batches from (moving.md, Data)"
_CARRIED = "if a state goes from batch to batch here: moving.md, A hidden state from batch to batch"
_NEXT = ", without iter() and next(); if the loop makes another number of steps than one pass: moving.md, cycle(loader)"
_REPLAY = "stays; each update has (batch,) = run.batches(TensorDataset(...), shuffle=False), of the samples drawn"
_STAYS = "stays if the loop in it takes other samples in each pass (replay buffer): each run.batches is the next epoch"
_NOT_IN_LOOP = (
    ', which the loop does not have any more: loss, more = run.backward(..., also={"accuracy": accuracy}), the mean of '
    "accuracy(output, target) over the step"
)
_PHASES = "take the phases apart: the steps of training, then run.evaluate(loader, metrics) instead of the others"
_ABOVE = "make it above the loop, give it to run.prepare with the others, and choose in each epoch which one steps"
_ENTERED_AGAIN = "under if not run.position.done:, since a resumed run may go on within an epoch, and comes here again"
_CLIPS_SOME = "stays: run.clip_gradients clips by the norm of all gradients, and this by that of some"
_ACCUMULATES = (
    "if this accumulates gradients: a step in each pass, without the condition or the inner loop, and with "
    "lockstep.init(global_batch=all samples of a step, micro_batches=...); the loss is not divided, and len(loader) is "
    "run.steps_per_epoch(loader)"
)
_MOVES = (
    "leave out the move to a device: run.prepare moves the model, run.backward the micro-batches. run.device is for "
    "tensors of your own"
)
_SEVERAL = (
    "several backward passes: where no step is between them, add their losses in one function; else each is a "
    "run.backward of its own, with forward= for each model of a GAN (moving.md, Setup)"
)
_GROUP = "leave out: lockstep.init opens the process group and chooses the device"
_SHARDED = 'leave out: lockstep.init(strategy="fsdp"), with the options of docs/strategies/fsdp.md'
_CHECKPOINT = 'leave out: run.save(), and lockstep.init(directory="runs/a", resume="auto")'
_STAGES = (
    "trains by a schedule of torch.distributed.pipelining. In place of it and the stages write lockstep.init("
    "strategy='pipeline'), give run.prepare the whole model, and let all ranks call run.backward(batch, loss_fn)."
)
_RATE = "leave out the number of processes: the learning rate belongs to the global batch, which they share"
_TORCH_CALLS = {
    "Setup": {
        "torch.manual_seed": "stays above the model, without a rank; seed= of lockstep.init is for order and dropout",
        "torch.set_num_threads": _SETTING,
        "torch.set_float32_matmul_precision": _SETTING,
        "torch.use_deterministic_algorithms": _SETTING,
        "torch.compile": "stays, or lockstep.init(compile=True), which compiles each block",
        "torch.*.autocast": 'leave out: lockstep.init(precision="bf16") or "fp16"',
        "torch.*.GradScaler": 'leave out: lockstep.init(precision="fp16") scales the loss',
        "torch.*.convert_sync_batchnorm": "leave out: lockstep.init(sync_batch_norm=True)",
        "torch.optim.SparseAdam": "refused, since gradients are added up as dense ones: torch.optim.Adam",
        "torch.*.ZeroRedundancyOptimizer": 'the optimizer that it is made of; lockstep.init(strategy="fsdp") shards it',
    },
    "Data": {"torch.*.DistributedSampler": _SAMPLER},
    "Processes": {
        **dict.fromkeys(("torch.*.init_process_group", "torch.*.destroy_process_group", "torch.*.set_device"), _GROUP),
        "torch.*.spawn": "call the function itself: lockstep run --devices N, or torchrun, starts the processes",
        **dict.fromkeys(("torch.distributed.barrier", "torch.*.Join"), "leave out"),
        **dict.fromkeys(("torch.*.fully_shard", "torch.*.init_device_mesh"), _SHARDED),
        "torch.*.state_dict_type": "leave out: run.state_dict(), on all ranks",
        **{f"torch.distributed.checkpoint.{name}": _CHECKPOINT for name in ("save", "load", "async_save")},
        **{f"torch.distributed.{name}": _VALUES_OF_ALL for name in ("all_reduce", "reduce", "all_gather")},
        "torch.distributed.all_gather_object": _VALUES_OF_ALL,
        **dict.fromkeys(("torch.distributed.get_world_size", "torch.distributed.get_rank"), _FOR_LOGS),
    },
}
"""Advice on calls of torch, by section and name; ``*`` stands for the modules between."""
_WRITES = {
    "print": "run.print(...), which prints on the main process only",
    "torch.save": "run.save() to resume; for weights: state = run.state_dict(), then torch.save under if run.is_main:",
    **dict.fromkeys(("wandb.init", "wandb.log", "mlflow.log_metric", "numpy.save"), "under if run.is_main:"),
}
"""Advice on what each process would write, unless the script lets one of them do so already."""
_WRITERS = ("SummaryWriter", "add_scalar", "add_scalars", "add_image", "save_image", "savefig", "savez", "dump")
"""Further calls that write, by their last names."""


def changes_in(path: str) -> list[Change]:
    """The changes of a file, by section and line. Raises ``ConfigError`` as ``changes`` does, and for other files."""
    return changes(read_text(path), path)


def changes(text: str, path: str = "script.py") -> list[Change]:
    """The changes of a text, by section and line; ``path`` is its name in errors.

    Raises:
        ConfigError: the text is not Python, uses Lockstep already, or has neither a training loop nor a trainer of a
            library with an adapter.
    """
    script, lines = parse(text, path), text.split("\n")
    if runs_of(script):
        raise ConfigError(
            f"{path} calls lockstep.init already. Check it: lockstep lint {path!r}; lockstep verify --script {path!r}."
        )
    sections = {"Setup": [_adapters]} if any(_adapters(script)) else _SECTIONS
    if sections is _SECTIONS and not backwards(script):
        if "torch.distributed.pipelining" in text:
            raise ConfigError(f"{path} {_STAGES}")
        loops = script.method_calls("fit", "fine_tune", "fit_one_cycle", "learn")
        where = f", or in a library, as that of line {loops[0].lineno} may be" if loops else ""
        raise ConfigError(
            f"{path} calls no loss.backward(): its training loop must be in another file{where}. Give that file"
            f"{'; in place of a library, write a loop around its model and loss' if loops else ''}. Where a library "
            "calls it, as SVI.step of Pyro does, write the loss as a function, for run.backward(batch, loss)."
        )
    made: list[Change] = []
    for section, finders in sections.items():
        places = grouped((advice, node.lineno) for finder in finders for node, advice in finder(script))
        found = [(tuple(sorted(set(at))), advice) for advice, at in places.items()]
        made += [
            Change(section, at, lines[at[0] - 1].strip(), advice) for at, advice in sorted(found, key=itemgetter(0))
        ]
    return made


def _adapters(script: Script) -> Iterator[_Found]:
    """Trainers of libraries that have an adapter."""
    used: list[tuple[ast.expr | ast.stmt, ast.expr]] = [(call, call.func) for call in script.calls]
    used += [(each, base) for each in script.find(ast.ClassDef) for base in each.bases]
    for node, what in used:
        package, _, rest = script.name(what).partition(".")
        if package in _ADAPTERS and rest.rpartition(".")[2] in _TRAINERS:
            yield node, f"{_ADAPTERS[package]}. The rest mostly stays: moving.md has a section on it"


def _preparation(script: Script) -> Iterator[_Found]:
    """The import, and below the last optimizer or scheduler the beginning of the run."""
    imports = [node for node in script.find(ast.Import, ast.ImportFrom) if "__future__" not in script.text(node)]
    first = min(imports, key=lambda node: node.lineno, default=script.tree.body[-1])
    split = " and random_split" if "random_split" in script.calls_by_name else ""
    seed = "" if script.torch_calls("manual_seed") else f"; and torch.manual_seed(0) above the model{split}"
    yield first, f"add: import lockstep{seed}"
    made = optimizers_of(script)
    loops = {loop for call in backwards(script) for loop in loops_around(script, call)}
    inside = [call for call in made if loops & set(loops_around(script, call))]
    outside = [call for call in made if call not in inside]
    tensors = [call for call in script.calls if constant(argument(call, "requires_grad")) is True]
    by_hand = [] if made or script.method_calls("step") else [call for call in tensors if target_of(script, call)]
    last = max(outside or made or by_hand, key=lambda call: call.lineno, default=first)
    owners = (root_of(owner) for call in made for owner in owners_of(script, call))
    models = [kept_as(script, name, last) for name in dict.fromkeys(owners)]
    run = "self.run" if script.class_of(last) else "run"
    steps = [f"{run} = lockstep.init(global_batch={batch_size(script, last)})"]
    prepared = models[0] if len(models) == 1 else "models" if models else "model"
    if len(models) > 1:
        entries = (f"{name.rpartition('.')[2]!r}: {name}" for name in models)
        steps.append(f"models = nn.ModuleDict({{{', '.join(entries)}}})")
    inner = {target_of(script, call) for call in made if script.name(call).startswith("torch.optim.")}
    stepped = [script.owner(each) for each in script.method_calls("step", "step_update")]
    outer = [  # ScheduledOptim(optimizer, ...), a class of one's own
        call
        for call in made
        if not script.name(call).startswith("torch.")
        if "optim" in last_name(call.func).lower() or target_of(script, call) not in stepped
        if call.args and (script.text(call.args[0]) in inner or "optim" in script.text(call.args[0]).lower())
    ]
    names = [target_of(script, call) for call in made if call not in outer] or ["optimizer"]
    given = ", ".join(dict.fromkeys([prepared, *names]))
    steps.append(f"{given} = {run}.prepare({given})")
    returns = [node for node in script.find(ast.Return) if script.same_function(node, last)]
    if any(set(names) & names_in(node) for node in returns):
        steps.append("return run as well")
    if trained := ", ".join(dict.fromkeys(target_of(script, call) for call in by_hand)):
        steps[1:] = [f"[{trained}] = {run}.prepare(torch.nn.ParameterList([{trained}]))"]
    place = "below" if made or by_hand else "where the optimizer is made"
    if (loop := epochs_around(script, last)) is not None and not {each.partition(".")[0] for each in models} & set_in(
        loop
    ):
        place = f"above the loop of line {loop.lineno}, with what this line makes"
    yield last, f"{place}: {'; '.join(steps)}"
    of_prepared = "below run.prepare, of the optimizer that it returns: this object steps what it is given"
    yield from ((call, of_prepared) for call in outer)
    yield from ((call, _ABOVE) for call in inside if outside)
    if not made or isinstance(script.scope(last), FUNCTIONS):
        yield from _without_run(script, last)


def _without_run(script: Script, first: ast.AST) -> Iterator[_Found]:
    """The functions and classes that use the run, which begins in a function at ``first``, and do not have it."""
    finders = (_loops, _passes, _steps, _evaluations, _outputs, _ranks)
    scopes = [script.scope(node) for find in finders for node, advice in find(script) if "run." in advice]
    begin = script.scope(first)
    for scope in scopes:  # which grows
        if (owner := script.class_of(scope)) is not None and isinstance(scope, FUNCTIONS):
            given = "" if owner is script.class_of(first) else ", which its __init__ takes"
            yield owner, f"in the methods of this class, run is self.run{given}"
        elif isinstance(scope, FUNCTIONS) and begin not in (scope, *script.around(scope, FUNCTIONS)):
            for node in (scope, *callers_of(script, scope)):
                yield node, "give run to this function"
                scopes += [each for each in [script.scope(node)] if each not in scopes]


def _devices(script: Script) -> Iterator[_Found]:
    for call in script.method_calls("to", "cuda"):
        given = " ".join(map(script.text, [*call.args, *(each.value for each in call.keywords)])).lower()
        is_move = method(call) == "cuda" or any(word in given for word in ("device", "cuda", "gpu", "rank"))
        if is_move and not script.name(call).startswith("torch."):
            yield call, _MOVES
    for call in script.calls_of("torch.device"):
        if constant(argument(call, "device", 0)) != "meta":
            yield call, "leave out, or run.device, below lockstep.init"
    for node in script.find(ast.Assign):
        if any("backends.cu" in script.name(target) for target in node.targets):
            yield node, _SETTING


def _loaders(script: Script) -> Iterator[_Found]:
    for call in script.calls_by_name.get("DataLoader", []):
        sampled = [script.name(each) for each in script.sources(argument(call, "sampler"))]
        if argument(call, "batch_sampler") is not None:
            yield call, "a batch sampler of your own is refused: order the samples yourself (moving.md, Data)"
        elif any(each.endswith(".DistributedSampler") for each in sampled):
            yield call, _SAMPLER
        elif argument(call, "sampler") is None:
            yield call, "stays; the batch size of a step, for all devices together, is that of lockstep.init"
    if script.torch_calls("DistributedSampler"):
        yield from ((call, _SAMPLER) for call in script.method_calls("set_epoch"))
    for call in script.calls:
        if constant(argument(call, "download")) is True:
            yield call, "leave out, and download once, before the run: its processes would do it at the same time"


def _loops(script: Script) -> Iterator[_Found]:
    """The loops over batches and epochs around each backward pass."""
    for call in backwards(script):
        around, over_batches = loops_around(script, call), batches_around(script, call)
        yield from ((node, _CARRIED) for node in carried_in(script, over_batches or next(iter(around), None)))
        if passes_of_step(script, call) is not None:
            yield around.pop(0), _ACCUMULATES
        if over_batches is not None:
            yield over_batches, _over_batches(script, over_batches)
            tested = set().union(*map(names_in, script.tests_around(call)))  # if phase == "train":
            for loop in around[around.index(over_batches) + 1 :]:
                if not isinstance(loop, ast.For) or range_of(script, loop) or not tested & names_in(loop.target):
                    yield loop, _over_epochs(script, loop, around)
                    break
                yield loop, _PHASES
        elif around:
            epochs = [loop for loop in around[1:] if isinstance(loop, ast.For)][:1]
            drawn = drawn_by(script, around[0], call)
            is_replay = takes_samples(script, around[0], call)
            is_data = not is_replay and bool(drawn or takes_places(script, around[0]))
            yield from ((loop, _over_epochs(script, loop, around) if is_data else _STAYS) for loop in epochs)
            begin = "" if epochs else "for epoch in run.epochs(N): "
            over = f"{begin}for batch in run.batches({drawn or 'data'}){_NEXT if drawn else _DATA_OF_THE_LOOP}"
            yield around[0], _REPLAY if is_replay else over
        elif samples := [each for each in script.calls if DRAWN.search(script.text(each))]:
            yield from ((each, _REPLAY) for each in samples if script.follows(call, each))


def _over_batches(script: Script, loop: ast.For) -> str:
    read, begin, target = [script.text(each) for each in read_by(script, loop.iter)], "", "batch"
    given = read[0] if len(read) == 1 else f"({', '.join(read)})"
    over, iterated = f"run.batches({given})", script.text(loop.iter)
    for name in ast.walk(loop.iter):
        if (bar := bar_of(script, name)) is not None:  # bar = tqdm(loader)
            begin = f"{script.text(name)} = {script.text(bar).replace(given, over, 1)}, and "
    if begin or (len(read) == 1 and isinstance(loop.iter, ast.Call)):
        over = iterated if begin else iterated.replace(given, over, 1)
    if isinstance(loop.target, ast.Tuple) and "enum" in begin + over:
        target = f"{script.text(loop.target.elts[0]).replace('batch', 'i')}, batch"
    more = "; the largest of them is read once in an epoch, where zip() ends with the smallest" if read[1:] else ""
    more += _OWN_LOADER if any(has_own_batches(script, each) for each in read_by(script, loop.iter)) else ""
    return f"{begin}for {target} in {over}:  # a step of all processes together, of len(batch) samples{more}"


def _over_epochs(script: Script, loop: Loop, around: list[Loop]) -> str:
    made = optimizers_of(script)
    for outer in around[around.index(loop) + 1 :][:1]:
        if made and not any(outer in loops_around(script, call) for call in made):
            return (
                "stays, since each run.batches is the next epoch. run.epochs counts those of the whole run: it would "
                f"do nothing when the loop in line {outer.lineno} comes here again"
            )
    counted = range_of(script, loop)
    if counted is None or not counted.args:
        return "for epoch in run.epochs(N):"
    target = loop.target if isinstance(loop, ast.For) else None
    name = script.text(target) if isinstance(target, ast.Name | ast.Attribute) else "epoch"
    start, end = (None, counted.args[0]) if len(counted.args) == 1 else counted.args[:2]
    first, last = constant(start), constant(end)
    if start is not None and first is None and isinstance(end, ast.BinOp) and constant(end.right) == 1:
        first = 0 if 0 in map(constant, script.values(start)) else 1  # range(start_epoch, epochs + 1)
    if not (isinstance(first, int) and first):
        return f"for {name} in run.epochs({script.text(end)}):  # from where a resumed run stands"
    if isinstance(end, ast.BinOp) and isinstance(end.op, ast.Add) and constant(end.right) == first:
        number = script.text(end.left)
    else:
        number = str(last - first) if isinstance(last, int) else f"{script.text(end)} - {first}"
    return f"for {name} in run.epochs({number}):  # which counts from 0, not from {first}"


def _passes(script: Script) -> Iterator[_Found]:
    """The backward passes, each of which becomes one call with the forward pass and the loss."""
    calls = backwards(script)
    for call in calls:
        if is_scaler(script, call):
            step = f"{script.text(call.args[1])}.step()"
            yield call, f"below: {step}, with run.clip_gradients above it where it clips"
        name = scaled.id if isinstance(scaled := loss_of(script, call), ast.Name) else "loss"
        yield call, _backward(script, call, name, None if is_changed(script, call) else source_of(script, call))
    if any(script.follows(late, early) for late in calls for early in calls):
        yield calls[0], _SEVERAL


def _backward(script: Script, call: ast.Call, name: str, loss: ast.expr | None) -> str:
    """The call that makes a backward pass, by the name of its loss and the expression that it comes from."""
    loop = batches_around(script, call)
    is_here = loop is not None and script.same_function(loop, call)
    inputs = inputs_of(script, loop, loss) if loop is not None and is_here else {}
    rest = "leave out the model's call and the loss"
    rest += "" if loop is None or is_here else "; give batch to this function"
    is_pair = isinstance(loss, ast.Call) and len(loss.args) == 2 and not loss.keywords and bool(script.name(loss))
    given = _WITH_FORWARD
    if inputs and loop is not None and loss is not None:
        given = _by_inputs(script, loop, inputs, loss)
    elif isinstance(loss, ast.Attribute) and loss.attr == "loss":
        given = "lambda output, data: output.loss)"
    elif is_pair and isinstance(loss, ast.Call) and _takes_output(script, loss, call):
        given = f"{script.text(loss.func)})"
    if isinstance(loss, ast.Attribute) and loss.attr == "loss":
        given += ", once means.md has told whether it is a mean over samples"
    made = [loss, *(script.values(loss.func) if isinstance(loss, ast.Call) else ())]  # criterion = MSELoss(...)
    rest += _SUM if any(each and script.text(each).endswith((".sum()", "reduction='sum')")) for each in made) else ""
    return f"{name} = run.backward(batch, {given}; {rest}"


def _takes_output(script: Script, loss: ast.Call, call: ast.Call) -> bool:
    """Returns True for the loss of what a model makes of one input, and of a target that the loop takes as it is."""
    output, target = loss.args
    place = next(iter(loops_around(script, call)), script.scope(call))
    here = [each for each in script.values(target) or [target] if each and script.holds(place, each)]
    match script.values(output) if isinstance(output, ast.Name) else [output]:
        case [ast.Call(ast.Name() | ast.Attribute(ast.Name("self")) | ast.Attribute(attr="forward"), [_], [])]:
            return all(_READ.fullmatch(_MOVED.sub("", script.text(each))) for each in here)
    return False


def _numbers(script: Script) -> Iterator[_Found]:
    """The lines that compute from the output of the model below a backward pass."""
    sizes = {part for node, _ in _sizes(script) for part in ast.walk(node)}
    own = {"self", *(script.text(loss_of(script, call)) for call in backwards(script))}
    for call in backwards(script):
        loop, loss = batches_around(script, call), source_of(script, call)
        if loop is None or not isinstance(loss, ast.Call | ast.BinOp) or not script.same_function(loop, call):
            continue
        nodes = [each for part in loop.body for each in ast.walk(part) if each not in sizes]
        made = [(names_in(each), node) for node in nodes if isinstance(node, ast.Assign) for each in node.targets]
        above = [pair for pair in made if script.follows(loss, pair[1]) and not script.holds(pair[1], loss)]
        divided = loss.left if isinstance(loss, ast.BinOp) and isinstance(loss.op, ast.Div) else loss
        names = names_in(divided) & set().union(*(each for each, _ in made)) - names_in(loop.target)
        names = names.union(*(each for each, node in above if names & names_in(node.value))) - own
        for node in nodes:
            if isinstance(node, ast.Name) and node.id in names and is_below_step(script, node, call):
                yield node, f"computed from {node.id}{_NOT_IN_LOOP}"


def _by_inputs(script: Script, loop: ast.For, inputs: dict[str, str], loss: ast.expr) -> str:
    """The loss and, if the model does not just take the first part of a pair, ``forward=``."""
    parts = set(inputs)
    sets = [each for part in loop.body for each in ast.walk(part) if isinstance(each, ast.Assign)]
    set_here = {name for node in sets for target in node.targets for name in names_in(target)} - parts
    used = [node for node in sets if names_in(node.targets[0]) & set_here & names_in(loss) and node.value is not loss]
    inner = [each for each in ast.walk(loss) if isinstance(each, ast.Call) and each is not loss]
    found = [node.value for node in used] or [each for each in inner if names_in(each) & parts][:1]
    into = [(target, value) for node in sets for target, value in bindings(node) if names_in(target) & parts]
    # x = x.view(-1, 784)
    is_changed = any(value and not _MOVE.search(script.text(value)) for _, value in into)
    is_clear = len(found) == 1 and not is_changed and not names_in(found[0]) & set_here
    if not is_clear or not any(may_be_model(script, each, parts) for each in ast.walk(found[0])):
        return _WITH_FORWARD
    target = used[0].targets[0] if used else found[0]
    elements = target.elts if isinstance(target, ast.Tuple) else []
    outputs = {script.text(each): f"output[{number}]" for number, each in enumerate(elements)}
    value = renamed(_MOVED.sub("", script.text(loss)), outputs or {script.text(target): "output"})
    forward = _MOVED.sub("", script.text(found[0]))
    first, *others = inputs
    if len(others) == 1 and forward.endswith(f"({first})") and renamed(value, {first: ""}) == value:
        value = renamed(value, {others[0]: "target"})
        function = value.removesuffix("(output, target)")
        return f"{function if function != value else f'lambda output, target: {value}'})"
    way = "" if forward.endswith(f"(**{first})") else f", forward=lambda data: {renamed(forward, inputs)}"
    return f"lambda output, data: {renamed(value, inputs)}{way})"


def _steps(script: Script) -> Iterator[_Found]:
    scalers = {target_of(script, call) for call in script.torch_calls("GradScaler")}
    for call in script.method_calls("step", "update", "unscale_"):
        if script.owner(call) in scalers:
            optimizer = script.text(call.args[0]) if call.args else "optimizer"
            yield call, f"{optimizer}.step()" if method(call) == "step" else "leave out, with the GradScaler"
    clips = [each for each in script.calls if last_name(each.func) == "clip_grad_norm_" and each.args]
    for call in clips:
        given = {script.text(each.args[0]) for each in clips if script.same_function(call, each)}
        norm = script.text(argument(call, "max_norm", 1) or call.args[-1])  # model.clip_grad_norm_(1.0)
        kind = constant(argument(call, "norm_type", 2) or ast.Constant(2))
        advice = f"run.clip_gradients({norm})" if kind == 2 else "stays: run.clip_gradients takes the 2-norm"
        yield call, _CLIPS_SOME if len(given) > 1 or takes_part(script, call) else advice
    for call in script.method_calls("step"):
        is_schedule = "sched" in script.owner(call).lower()
        over = [batches_around(script, each) for each in backwards(script)]
        if is_schedule and any(is_above(script, call, each) for each in over if each is not None):
            yield call, _ENTERED_AGAIN
        if not is_schedule and counts_of(script, call) and loops_around(script, call):
            yield call, _ACCUMULATES


def _sizes(script: Script) -> Iterator[_Found]:
    """Sizes of what a loop over batches has read: ``len(x)``, ``x.size(0)``, ``x.shape[0]``."""
    for call in backwards(script):
        loop = batches_around(script, call)
        parts = names_in(loop.target).union(inputs_of(script, loop, None)) if loop else set()
        for node in (each for part in (loop.body if loop else ()) for each in ast.walk(part)):
            size = _SIZE.fullmatch(script.text(node)) if isinstance(node, ast.expr) else None
            if isinstance(node, ast.expr) and size and parts & set(size.groups()):
                is_named = getattr(script.statement(node), "value", None) is node  # n = len(x)
                if is_named or (is_below_step(script, node, call) and not isinstance(script.parent(node), ast.Slice)):
                    yield node, "len(batch), where it counts samples: those of the step over all processes"


def _evaluations(script: Script) -> Iterator[_Found]:
    """Loops over data in which gradients are off, or the model is called after ``model.eval()``."""
    calls, loops = backwards(script), list[ast.For | ast.comprehension]()
    trained = {loop for call in calls for loop in loops_around(script, call)}
    for node in script.find(ast.With, *FUNCTIONS):
        contexts = [each.context_expr for each in node.items] if isinstance(node, ast.With) else node.decorator_list
        names = [last_name(each.func if isinstance(each, ast.Call) else each) for each in contexts]
        if not {"no_grad", "inference_mode"} & set(names):
            continue
        loops += [each for each in ast.walk(node) if isinstance(each, ast.For | ast.comprehension)]
        if isinstance(node, ast.With):  # for x, y in data: with torch.no_grad(): ...
            around = script.around(node, ast.For, within_function=True)
            loops += [each for each in around if not any(script.holds(each, call) for call in calls)]
    for call in script.method_calls("eval"):
        used = [each for each in script.calls if script.text(each.func) == script.owner(call)]
        below = [each for each in script.find(ast.For) if each not in trained and script.follows(each, call)]
        loops += [loop for loop in below if any(script.holds(loop, each) for each in used)]
    for loop in loops:
        (data, *_) = read_by(script, loop.iter) or [loop.iter]
        is_named = isinstance(data, ast.Name | ast.Attribute) and _DATA.search(last_name(data))
        made = [last_name(each.func) for each in script.sources(data, 1) if isinstance(each, ast.Call)]
        is_list = any(isinstance(each, ast.List | ast.Tuple) for each in script.values(data))  # of settings
        if "DataLoader" in made or (is_named and isinstance(loop, ast.For) and not is_list):
            mean = "the mean of metric(output, target) over all samples"
            place = loop if isinstance(loop, ast.For) else loop.iter
            yield place, f"instead of the loop: run.evaluate({script.text(data)}, metric), {mean}"


def _outputs(script: Script) -> Iterator[_Found]:
    begin = max(optimizers_of(script), key=lambda call: call.lineno, default=None)
    logs = [f"{target_of(script, call)}.log" for call in script.calls_of("wandb.init")]
    for call in script.calls:
        is_print, is_writer = script.name(call) == "print", last_name(call.func) in _WRITERS
        is_opened = script.name(call) == "open" and str(constant(argument(call, "mode", 1)))[:1] in "wax"
        is_writer |= is_opened or script.text(call.func) in logs
        advice = "under if run.is_main:" if is_writer else _WRITES.get(script.name(call))
        if advice is None or on_one_rank(script, call):
            continue
        if begin is not None and script.same_function(call, begin) and call.lineno < begin.lineno:
            advice = "" if is_print else f"below lockstep.init: {advice}"
        if is_print and (owner := script.class_of(call)) is not None:  # not in a data set or a model
            advice = advice if any(script.holds(owner, each) for each in backwards(script)) else ""
        if advice:
            yield call, advice


def _loads(script: Script) -> Iterator[_Found]:
    loops = [loop for call in backwards(script) for loop in loops_around(script, call)]
    for call in script.calls_of("torch.load"):
        trains = [place for loop in loops for place in places_of(script, loop)]
        is_below = any(script.follows(each, place) for each in places_of(script, call) for place in trains)
        yield call, _BEST if is_below else _RESUME


def _wrappers(script: Script) -> Iterator[_Found]:
    for wrap in wraps(script, DDP, DP, FSDP):
        strategy = '; lockstep.init(strategy="fsdp")' if wrap.kind == FSDP else ""
        advice = f"leave out, and .module: run.prepare places the model{strategy}"
        yield wrap.call, advice
        named = (node for node in script.find(ast.Attribute) if node.attr == "module")
        yield from ((node, advice) for node in named if not _AVERAGE.search(script.text(node.value)))
    for call in script.method_calls("no_sync", "register_comm_hook", "consolidate_state_dict", "join"):
        if method(call) != "join" or isinstance(script.parent(call), ast.withitem):  # not ", ".join(...)
            yield call, "leave out"


def _ranks(script: Script) -> Iterator[_Found]:
    """Tests of a rank, the variables that launchers set, and learning rates by the number of processes."""
    for test in (node.test for node in script.find(ast.If)):
        if rank_test(script, test) == FIRST:
            yield test, "if run.is_main: instead, but not around run.save and run.evaluate"
    for node in script.find(ast.Constant):
        if node.value in _LAUNCHER and "os." in script.text(script.statement(node) or node):
            yield node, _GROUP
    yield from ((node, _RATE) for node in rates_by_processes(script))


def _torch_calls(section: str) -> Callable[[Script], Iterator[_Found]]:
    """A finder of the calls of torch in a section of the table."""

    def find(script: Script) -> Iterator[_Found]:
        for name, advice in _TORCH_CALLS[section].items():
            within, _, last = name.rpartition(".")
            for call in script.torch_calls(last, within=f"{within.removesuffix('.*')}."):
                if within.endswith("*") or script.name(call) == name:
                    yield call, advice

    return find


_SECTIONS: dict[str, list[Callable[[Script], Iterator[_Found]]]] = {
    "Setup": [_preparation, _devices, _torch_calls("Setup")],
    "Data": [_loaders, _torch_calls("Data")],
    "The loop": [_loops, _passes, _numbers, _sizes, _steps],
    "Evaluation": [_evaluations],
    "Output and files": [_outputs, _loads],
    "Processes": [_wrappers, _ranks, _torch_calls("Processes")],
}
"""The finders of each section, in the order in which changes are told."""
