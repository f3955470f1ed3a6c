"""Rules on samples: the order in which ranks read them, and how they are split between ranks and workers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.ranks import lower_name, mentions_rank, on_one_rank
from lockstep.lint.rules.gradients import divisors
from lockstep.lint.rules.launching import COUNTS
from lockstep.lint.script import (
    LOOPS,
    Script,
    argument,
    arguments,
    constant,
    is_open,
    last_name,
    method,
    names_in,
    parameters,
    receiver,
)
from lockstep.lint.wrappers import (
    DDP,
    is_distributed,
    is_managed,
    optimizers_of,
    owners_of,
    reduces,
    root_of,
    starts_group,
    target_of,
    wraps,
)

_EVALUATION = re.compile(r"(?<![a-z])(val|valid|validation|test|eval|dev)(?![a-z])|(val|test)_?(set|data|ds)")
_COUNTED = ("ConfusionMatrix", "MultiLabelConfusionMatrix", "VariableAccumulation")
"""Metrics of ignite that give counts or sums."""
_QUOTIENTS = ("iou", "dicecoefficient", "jaccardindex")
"""Metrics that ignite computes of a matrix, however often it has counted each sample."""
_EVENTS = ("on_output", "on_micro_batch_begin", "on_micro_batch_end", "on_samples")
_JOINING = ("sum", "cat", "concat", "concatenate", "stack", "vstack", "hstack")
_ADDING = ("append", "extend", "add", "update")
_APART = re.compile(r"time\(|perf_counter|monotonic|\.update\((\d+|len\(\w+\))\)$")
_SPLITTERS = ("sampler", "split_dataset_by_node", "shard", "num_replicas", "webdataset", "scatter")


_LOOPS: tuple[type[ast.For | ast.comprehension], ...] = (ast.For, ast.comprehension)


def for_evaluation(script: Script, call: ast.Call) -> bool:
    """Returns True where a sampler is called one for validation, by its own name or by that of its data set."""
    data = argument(call, "dataset", 0)
    names = f"{target_of(script, call)} {script.text(data) if data is not None else ''}"
    return bool(_EVALUATION.search(names.lower().replace("_", " "))) and "train" not in names.lower()


@rule("LS001", "A DistributedSampler that shuffles is never told the epoch: every epoch has the same order.")
def sampler_without_set_epoch(script: Script) -> Iterator[Hit]:
    """Needs a loop over epochs in the same file."""
    loop = _epoch_loop(script)
    if loop is None or script.mentions("set_epoch") or is_managed(script):
        return
    for call in script.torch_calls("DistributedSampler"):
        in_order = constant(argument(call, "shuffle", 3)) is False or for_evaluation(script, call)
        if not in_order and not _handed_on(script, call):
            name = target_of(script, call) or "train_sampler"
            yield Hit(
                call,
                "this sampler is never told the epoch, so every epoch reads the samples in the same order.",
                f"{name}.set_epoch({script.text(loop.target)})  # first line of the loop in line {loop.lineno}",
            )


@rule("LS002", "A DataLoader gets a sampler together with an argument that excludes it, such as shuffle=True.")
def sampler_and_shuffle(script: Script) -> Iterator[Hit]:
    """torch raises ValueError for these; here it is said before the data are read."""
    for call in script.torch_calls("DataLoader"):
        shuffles = constant(argument(call, "shuffle", 2)) is True
        for kind, position in (("sampler", 3), ("batch_sampler", 4)) if shuffles else ():
            given = argument(call, kind, position)
            values = script.values(given) if given is not None else []
            absent = values and all(isinstance(each, ast.Constant) and each.value is None for each in values)
            if given is not None and not isinstance(given, ast.Constant) and not absent:
                yield Hit(
                    call,
                    f"{kind} and shuffle=True exclude each other: DataLoader raises ValueError.",
                    f"shuffle=False  # {script.text(given)} shuffles",
                )


@rule("LS005", "A DistributedSampler is made and never given to a DataLoader.")
def sampler_not_used(script: Script) -> Iterator[Hit]:
    """A sampler whose name is only ever told the epoch splits nothing."""
    for call in script.torch_calls("DistributedSampler") if not script.mentions("locals", "globals") else ():
        name = target_of(script, call)
        uses = [script.parent(node) for node in script.names.get(name, []) if isinstance(node.ctx, ast.Load)]
        if name.isidentifier() and all(isinstance(u, ast.Attribute) and u.attr == "set_epoch" for u in uses):
            yield Hit(
                call,
                f"{name} is never given to a DataLoader, so every rank reads all samples.",
                f"DataLoader(..., sampler={name})",
            )


@rule("LS006", "set_epoch is called on one rank only: the ranks' orders differ.")
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


@rule("LS007", "A DistributedSampler gets a seed that depends on the rank.")
def sampler_seed_by_rank(script: Script) -> Iterator[Hit]:
    """The ranks must permute alike, or their shares overlap."""
    for call in script.torch_calls("DistributedSampler"):
        seed = argument(call, "seed", 4)
        if seed is not None and mentions_rank(script, seed):
            yield Hit(
                seed,
                f"the seed {script.text(seed)} differs between ranks: they permute differently and their "
                "shares overlap.",
                "seed=seed  # the same on every rank; the sampler splits by rank itself",
            )


def _epoch_loop(script: Script) -> ast.For | None:
    for node in script.find(ast.For):
        name = node.target.id if isinstance(node.target, ast.Name) else ""
        over = name in ("ep", "e") or "epoch" in name.lower() or "epoch" in script.text(node.iter).lower()
        if name and over:
            return node
    return None


def _handed_on(script: Script, sampler: ast.Call) -> bool:
    """Returns True where a sampler, or its loader with the epoch, is passed to code that is not in this file."""
    name = target_of(script, sampler)
    makers = script.torch_calls("DataLoader")
    around = [call for call in makers if script.holds(call, sampler) or (name and _uses(script, call, name))]
    if not name and not around:
        return True
    loaders = {target_of(script, call) for call in around} - {""}
    defined = {function.name for function in script.functions}
    for call in script.calls:
        given = {script.text(item) for item in arguments(call)}
        if name in given and call not in around:
            return True
        unseen = last_name(call.func) not in defined and any("epoch" in text for text in given)
        if loaders & given and unseen:
            return True
    given = {name, *loaders} - {""}
    return any(_uses(script, node, item) for node in script.find(ast.Return) for item in given)


def _uses(script: Script, node: ast.AST, name: str) -> bool:
    return any(isinstance(p, ast.Name | ast.Attribute) and script.text(p) == name for p in ast.walk(node))


@rule("LS003", "A DDP script shuffles its training data without any sampler: every rank reads all samples.")
def every_rank_reads_everything(script: Script) -> Iterator[Hit]:
    """An epoch is then as many times too long as there are ranks."""
    several = starts_group(script) and wraps(script, DDP)
    if not several or is_managed(script) or script.mentions(*_SPLITTERS):
        return
    for call in script.torch_calls("DataLoader"):
        data = argument(call, "dataset", 0)
        if data is None or not is_open(call) or constant(argument(call, "shuffle", 2)) is not True:
            continue
        tests = [script.text(statement.test).lower() for statement in script.around(call, ast.If)]
        asked = any(re.search("dist|world_size|ddp|rank|gpu|multi|parallel", test) for test in tests)
        if not asked and not mentions_rank(script, data):
            yield Hit(
                call,
                "no sampler splits these samples: each of N ranks reads all of them, so that one epoch is N.",
                f"DataLoader({script.text(data)}, sampler=DistributedSampler({script.text(data)}), ...)",
            )


@rule(
    "LS004",
    "A DistributedSampler repeats validation samples to make the shares equal, and they are counted twice.",
)
def padded_samples_counted(script: Script) -> Iterator[Hit]:
    """Fires where the data are called validation or test data and nothing in the file trims the surplus; to divide by
    the sampler's ``total_size`` trims nothing. Not for COCO metrics, which count an image once however often it comes.
    """
    if is_managed(script) or script.mentions("coco") or _trims(script):
        return
    for call in script.torch_calls("DistributedSampler"):
        drops = argument(call, "drop_last", 5)
        if for_evaluation(script, call) and (drops is None or constant(drops) is False):
            data = argument(call, "dataset", 0)
            yield Hit(
                call,
                "where the samples do not divide by the ranks this sampler repeats some, and the metric "
                "counts them twice.",
                f"Subset({script.text(data) if data else 'data'}, range(rank, len(data), world_size)), "
                "and sum the counts of all ranks",
            )


@rule(
    "LS059",
    "Validation is shared out between the ranks and nothing brings the counts together: the metric is of one share.",
)
def metric_of_one_share(script: Script) -> Iterator[Hit]:
    """Only where the shares are read in this file, of a DistributedSampler, by `range(rank, n, world_size)`,
    `data[rank::world_size]`, `i % world_size`, `batch.micro_batches`, or
    events of a callback for each micro-batch, and nothing in it reduces or gathers."""
    if is_distributed(script) or "lockstep" in script.imported_roots:
        yield from of_one_share(script)


def of_one_share(script: Script) -> Iterator[Hit]:
    """The validation samples of a file of which each process reads a share, whether it shows that there are several."""
    if reduces(script) or "torchmetrics" in script.imported_roots:
        return
    samplers = [(call, target_of(script, call)) for call in script.torch_calls("DistributedSampler")]
    shared: list[ast.expr] = [
        call
        for call, name in samplers
        if for_evaluation(script, call) and _is_read_here(script, name or script.text(call))
    ]
    fix = "torch.distributed.all_reduce(correct); torch.distributed.all_reduce(count)  # then correct / count"
    if "lockstep" in script.imported_roots:
        fix = "run.evaluate(data, metric)  # of all samples; in training also= of run.backward, and len(batch)"
    for place in [*shared, *_shares_by_rank(script)]:
        yield Hit(
            place,
            "each rank evaluates, or counts, a share of these samples and no line sums over the ranks: what is "
            "reported holds for one share.",
            fix,
        )


@rule(
    "LS070",
    "A metric of torchmetrics or ignite that every process gives the same samples is summed over them.",
)
def metric_of_all_combined(script: Script) -> Iterator[Hit]:
    """Of a loop on Lockstep. Of torchmetrics where one function updates and computes it, and not with
    `sync_on_compute=False`; of ignite those that give counts, where no quotient is made of them."""
    has_sampler = script.mentions("distributedsampler", "split_dataset_by_node", "num_replicas")
    if "lockstep" not in script.imported_roots or has_sampler or any(_shares_by_rank(script)):
        return
    for call in script.calls:
        name = script.name(call).removeprefix("ignite.metrics.")
        if name in _COUNTED and script.name(call) != name and not script.mentions(*_QUOTIENTS):
            yield Hit(
                call,
                f"{name} of ignite is summed over the processes, and here an engine gives each of them the same "
                "samples: a count or a sum comes out multiplied by their number.",
                "run.evaluate(data, metric), or run.predict(data, everywhere=True)",
            )
    for compute in script.method_calls("compute"):
        name = script.owner(compute)
        metrics = [
            value
            for value in script.values(receiver(compute))
            if isinstance(value, ast.Call) and script.name(value).startswith("torchmetrics.")
        ]
        updates = [
            call
            for call in script.calls
            if script.text(call.func) in (name, f"{name}.update", f"{name}.forward")
            and script.same_function(call, compute)
            and not any(script.around(call, ast.Lambda, within_function=True))
            and not _trains_by_micro_batches(script, call)
        ]
        if updates and metrics and not any("sync_on_compute" in script.text(made) for made in metrics):
            yield Hit(
                compute,
                f"in {script.text(compute)} the processes add up what each of them holds, and here each has seen the "
                "same samples: a count or a sum comes out multiplied by their number.",
                "make the metric with sync_on_compute=False, or give it to run.evaluate",
            )


def _trains_by_micro_batches(script: Script, node: ast.AST) -> bool:
    """Returns True in a loop of the Accelerate adapter, which each process runs for micro-batches of its own."""
    loop = next(script.around(node, (ast.For, ast.While), within_function=True), None)
    passes = [call for call in script.method_calls("backward") if len(arguments(call)) == 1]
    return loop is not None and any(script.holds(loop, each) for each in passes)


@rule("LS008", "The split into training and validation data is drawn without a seed that the ranks share.")
def split_differs_between_ranks(script: Script) -> Iterator[Hit]:
    """Samples that one rank validates on are then trained on by another."""
    if not is_distributed(script):
        return
    seeds = [call for call in script.calls if "seed" in last_name(call.func).lower() and call.args]
    by_rank = bool(seeds) and all(mentions_rank(script, call.args[0]) for call in seeds)
    if script.mentions("seed") and not by_rank:
        return
    sklearns = script.calls_of("sklearn.model_selection.train_test_split")
    for call in [*script.torch_calls("random_split"), *sklearns]:
        keyword, shared = "generator", "torch.Generator().manual_seed(0)"
        if call in sklearns:
            keyword, shared = "random_state", "0"
        if is_open(call) and argument(call, keyword) is None and not on_one_rank(script, call):
            yield Hit(
                call,
                "every rank draws another split, so samples that one rank validates on are trained on by others.",
                f"{keyword}={shared}",
            )


@rule(
    "LS009",
    "An IterableDataset that does not ask for its worker is read by several: each sample comes several times.",
)
def iterable_not_split(script: Script) -> Iterator[Hit]:
    """Needs a DataLoader with workers over that very class, in the same file."""
    if script.mentions("get_worker_info", "worker_init_fn", "worker_id", "split_by_worker"):
        return
    for node in script.find(ast.ClassDef):
        iterable = any(script.name(base).endswith("data.IterableDataset") for base in node.bases)
        method = next((item for item in node.body if getattr(item, "name", "") == "__iter__"), None)
        if iterable and isinstance(method, ast.FunctionDef) and _read_by_workers(script, node.name):
            yield Hit(
                method,
                f"each worker of the DataLoader goes through all of {node.name}: every sample comes num_workers times.",
                "info = torch.utils.data.get_worker_info()  # and yield only the share of info.id",
            )


def _trims(script: Script) -> bool:
    """Returns True where ``x[:len(data)]`` cuts, or a sampler's ``total_size`` does more than to divide."""
    dividing = set(divisors(script))
    for size in (node for node in script.find(ast.Attribute) if node.attr == "total_size"):
        uses: list[ast.expr] = [size]
        parent = script.parent(size)
        if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
            uses = [name for name in script.names[parent.targets[0].id] if isinstance(name.ctx, ast.Load)]
        if not dividing.issuperset(uses):
            return True
    split = [argument(call, "dataset", 0) for call in script.torch_calls("DistributedSampler")]
    lengths = {f"len({script.text(data)})" for data in split if data is not None}
    ends = [node.upper for node in script.find(ast.Slice) if node.upper is not None]
    return any(script.text(end) in lengths for end in ends)


def _is_read_here(script: Script, sampler: str) -> bool:
    """Returns True where a loop of this file reads the loader of a sampler, there or in a function that takes it."""
    makers = [c for c in script.torch_calls("DataLoader") if sampler in map(script.text, arguments(c))]
    loaders = {target_of(script, call) for call in makers} - {""}
    names = set(loaders)
    for function in script.functions:
        for call in script.calls_by_name.get(function.name, []):
            given = zip(call.args, parameters(function))
            names |= {name for item, name in given if script.text(item) in loaders}
    read = {name for loop in script.find(*_LOOPS) for name in names_in(loop.iter)}
    return bool(sampler) and bool(names & read)


def _shares_by_rank(script: Script) -> Iterator[ast.expr]:
    """The expressions by which a loop over validation samples, or a call of the model, takes those of its rank."""
    passes = script.method_calls("backward")
    for loop in script.find(*_LOOPS):
        scope = script.scope(loop)
        names = [part.id for part in script.sources(loop.iter) if isinstance(part, ast.Name)]
        words = " ".join(names).lower()
        is_named = _EVALUATION.search(words.replace("_", " ")) and "train" not in words
        is_inside = not isinstance(scope, ast.Module) and re.search("eval|valid", scope.name.lower())
        if (is_named or is_inside) and not any(script.holds(loop, each) for each in passes):
            yield from [each for each in [loop.iter, *_skipping(loop)] if _is_by_rank(script, each)][:1]
    models = {root_of(owner) for call in optimizers_of(script) for owner in owners_of(script, call)}
    models |= {script.text(call.args[0]) for call in script.method_calls("prepare") if call.args}
    own = {script.scope(each) for each in passes if not each.args}  # a loop that trains on such shares itself
    reads = [each for each in script.find(ast.Attribute) if each.attr == "micro_batches"]
    for read, parent in [(each, script.parent(each)) for each in reads]:
        if isinstance(parent, _LOOPS) or last_name(getattr(parent, "func", read)) in ("len", "enumerate", "zip"):
            body = script.statement(read) or read
            calls = {script.text(each.func) for each in ast.walk(body) if isinstance(each, ast.Call)}
            joins = any(
                last_name(each.func) in _JOINING for each in script.around(read, ast.Call, within_function=True)
            )
            if calls & models or (".backward" not in "".join(calls) and (joins or any(_added_to(script, body)))):
                yield read
    for function in (each for each in script.functions if each.name in _EVENTS):  # of a Callback
        yield from [*_added_to(script, function)][:1]
    for call in script.calls:  # accuracy(model(x[rank::world_size]), ...)
        if script.text(call.func) in models and script.scope(call) not in own:
            yield from [each for each in call.args if _is_by_rank(script, each)][:1]


def _added_to(script: Script, body: ast.AST) -> Iterator[ast.expr]:
    """The targets that code adds to, as in ``hits += 1`` and ``seen.add(x)``; not those of a step, of times, bars."""
    step = next(script.around(body, LOOPS, within_function=True), body)
    for each in ast.walk(body):
        if isinstance(each, ast.AugAssign) or (isinstance(each, ast.Call) and method(each) in _ADDING):
            target = each.target if isinstance(each, ast.AugAssign) else receiver(each)
            names = [part for part in ast.walk(target) if isinstance(part, ast.Name)]
            made = script.values(min(names, key=lambda part: part.col_offset)) if names else []
            if not (_APART.search(ast.unparse(each)) or any(it is None or script.holds(step, it) for it in made)):
                yield target


def _skipping(loop: ast.For | ast.comprehension) -> list[ast.expr]:
    """The conditions under which a loop leaves out a sample, or takes it."""
    if isinstance(loop, ast.comprehension):
        return loop.ifs
    return [each.test for each in loop.body if isinstance(each, ast.If)]


def _is_by_rank(script: Script, node: ast.expr) -> bool:
    """True where the rank and the number of processes choose together: ``range(rank, n, world_size)`` and the like."""
    for part in script.sources(node):
        match part:
            case (
                ast.Call(func=ast.Name("range"), args=[first, _, every])
                | ast.Slice(lower=first, step=every)
                | ast.Compare(left=ast.BinOp(op=ast.Mod(), right=every), comparators=[first])
            ):
                counts = any(COUNTS.fullmatch(lower_name(each)) for each in script.sources(every))
                if counts and mentions_rank(script, first):
                    return True
    return False


def _read_by_workers(script: Script, name: str) -> bool:
    for call in script.torch_calls("DataLoader"):
        data, workers = argument(call, "dataset", 0), argument(call, "num_workers", 5)
        made = {last_name(part.func) for part in script.sources(data) if isinstance(part, ast.Call)}
        if workers is not None and constant(workers) != 0 and name in made:
            return True
    return False


_NUMBERED = re.compile(r"class|label|categor|vocab|word|token|char|speaker|species|tags|names")


@rule("LS067", "Classes or words are numbered in the order of a set, which is another one in every process.")
def order_of_a_set(script: Script) -> Iterator[Hit]:
    """`enumerate(set(...))`, and `list(set(...))` by the name that it gets; not where it is sorted."""
    sorted_later = {
        script.text(call.func.value)
        for call in script.calls_by_name.get("sort", [])
        if isinstance(call.func, ast.Attribute)
    }
    for call in script.calls:
        kind, name = script.name(call), target_of(script, call)
        if kind not in ("enumerate", "list", "tuple") or not call.args or not _is_set(script, call.args[0]):
            continue
        inside = [script.name(each) for each in script.around(call, ast.Call, within_function=True)]
        is_named = kind == "enumerate" or bool(_NUMBERED.search(name.lower()))
        if is_named and name not in sorted_later and not {"sorted", "len", "set"}.intersection(inside):
            yield Hit(
                call,
                "a set of anything but integers has another order in every process: the indices mean other classes in "
                "the next run, and on other ranks.",
                f"{kind}(sorted({script.text(call.args[0])}))",
            )


def _is_set(script: Script, value: ast.expr) -> bool:
    """Returns True for a set that is made here, or whatever a name is ever set to."""
    found = script.values(value) if isinstance(value, ast.Name | ast.Attribute) else [value]
    return bool(found) and all(
        isinstance(each, ast.SetComp) or (isinstance(each, ast.Call) and script.name(each) in ("set", "frozenset"))
        for each in found
    )
