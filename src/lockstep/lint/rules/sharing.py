"""Rules on how the samples are shared out between ranks and workers."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.names import last_name
from lockstep.lint.ranks import mentions_rank
from lockstep.lint.reach import on_one_rank
from lockstep.lint.rules.sampling import assigned_name, for_evaluation, samplers
from lockstep.lint.script import Script, argument, arguments, constant, is_open, parameters
from lockstep.lint.wrappers import DDP, is_distributed, is_managed, reduces, starts_group, wraps

_SPLITTERS = ("sampler", "split_dataset_by_node", "shard", "num_replicas", "webdataset", "scatter")


@rule(
    "LS003",
    "every-rank-reads-everything",
    "A DDP script shuffles its training data without any sampler: every rank reads all samples.",
)
def every_rank_reads_everything(script: Script) -> Iterator[Hit]:
    """An epoch is then as many times too long as there are ranks."""
    if (
        not (starts_group(script) and wraps(script, DDP))
        or is_managed(script)
        or script.mentions(*_SPLITTERS)
    ):
        return
    for call in script.torch_calls("DataLoader"):
        data = argument(call, "dataset", 0)
        if data is None or not is_open(call) or constant(argument(call, "shuffle", 2)) is not True:
            continue
        if not mentions_rank(script, data) and not _for_one_process(script, call):
            yield Hit(
                call,
                "no sampler splits these samples: each of N ranks reads all of them, so that one epoch is N.",
                f"DataLoader({script.text(data)}, sampler=DistributedSampler({script.text(data)}), ...)",
            )


@rule(
    "LS004",
    "padded-samples-counted",
    "A DistributedSampler repeats validation samples to make the shares equal, and they are counted twice.",
)
def padded_samples_counted(script: Script) -> Iterator[Hit]:
    """Fires where the data are called validation or test data and nothing in the file trims the surplus;
    not for COCO metrics, which count an image once however often it comes.
    """
    if is_managed(script) or script.mentions("total_size", "coco"):
        return
    for call in samplers(script):
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
    "metric-of-one-share",
    "Validation is shared out between the ranks and nothing brings the counts together: the metric is of one share.",
)
def metric_of_one_share(script: Script) -> Iterator[Hit]:
    """Where the shares are read in this file, and nothing in it reduces or gathers anything."""
    if not is_distributed(script) or reduces(script) or "torchmetrics" in script.imported_roots:
        return
    for call in samplers(script):
        if for_evaluation(script, call) and _is_read_here(script, assigned_name(script, call)):
            yield Hit(
                call,
                "each rank evaluates a share of these samples and no line sums over the ranks: what is reported "
                "holds for one share.",
                "torch.distributed.all_reduce(correct); torch.distributed.all_reduce(count)  # then correct / count",
            )


@rule(
    "LS008",
    "split-differs-between-ranks",
    "The split into training and validation data is drawn without a seed that the ranks share.",
)
def split_differs_between_ranks(script: Script) -> Iterator[Hit]:
    """Samples that one rank validates on are then trained on by another."""
    if not is_distributed(script):
        return
    for call in [*script.torch_calls("random_split"), *_sklearn_splits(script)]:
        keyword = "random_state" if last_name(call.func) == "train_test_split" else "generator"
        if not is_open(call) or argument(call, keyword) is not None or on_one_rank(script, call):
            continue
        if script.mentions("seed") and not _seeded_by_rank(script):
            continue
        yield Hit(
            call,
            "every rank draws another split, so samples that one rank validates on are trained on by others.",
            f"{keyword}=" + ("0" if keyword == "random_state" else "torch.Generator().manual_seed(0)"),
        )


@rule(
    "LS009",
    "iterable-not-split",
    "An IterableDataset that does not ask for its worker is read by several: each sample comes several times.",
)
def iterable_not_split(script: Script) -> Iterator[Hit]:
    """Needs a DataLoader with workers over that very class, in the same file."""
    if script.mentions("get_worker_info", "worker_init_fn", "worker_id", "split_by_worker"):
        return
    for node in script.nodes:
        if not isinstance(node, ast.ClassDef) or not any(
            script.name(base).endswith("data.IterableDataset") for base in node.bases
        ):
            continue
        method = next((item for item in node.body if getattr(item, "name", "") == "__iter__"), None)
        if isinstance(method, ast.FunctionDef) and _read_by_workers(script, node.name):
            yield Hit(
                method,
                f"each worker of the DataLoader goes through all of {node.name}: every sample comes "
                "num_workers times.",
                "info = torch.utils.data.get_worker_info()  # and yield only the share of info.id",
            )


def _for_one_process(script: Script, call: ast.Call) -> bool:
    words = ("dist", "world_size", "ddp", "rank", "gpu", "multi", "parallel")
    tests = [script.text(a.test).lower() for a, _ in script.ancestors(call) if isinstance(a, ast.If)]
    return any(word in test for test in tests for word in words)


def _is_read_here(script: Script, sampler: str) -> bool:
    """Whether a loop of this file goes over the loader of a sampler, there or in a function it is given to."""
    makers = [
        call for call in script.torch_calls("DataLoader") if sampler in map(script.text, arguments(call))
    ]
    loaders = {assigned_name(script, call) for call in makers} - {""}
    defined = {function.name: function for function in script.functions}
    loops = [node.iter for node in script.nodes if isinstance(node, ast.For)]
    names = set(loaders)
    for call in script.calls:
        function = defined.get(last_name(call.func))
        if function is not None:
            names |= {
                name for item, name in zip(call.args, parameters(function)) if script.text(item) in loaders
            }
    read = {part.id for item in loops for part in ast.walk(item) if isinstance(part, ast.Name)}
    return bool(sampler) and bool(names & read)


def _sklearn_splits(script: Script) -> list[ast.Call]:
    return [call for call in script.calls if script.name(call) == "sklearn.model_selection.train_test_split"]


def _seeded_by_rank(script: Script) -> bool:
    """Whether the only seeds of the file are torch's, set to something that depends on the rank."""
    seeds = [call for call in script.calls if "seed" in last_name(call.func).lower() and call.args]
    return bool(seeds) and all(mentions_rank(script, call.args[0]) for call in seeds)


def _read_by_workers(script: Script, name: str) -> bool:
    for call in script.torch_calls("DataLoader"):
        data, workers = argument(call, "dataset", 0), argument(call, "num_workers", 5)
        if data is None or workers is None or constant(workers) == 0:
            continue
        if any(isinstance(part, ast.Call) and last_name(part.func) == name for part in script.sources(data)):
            return True
    return False
