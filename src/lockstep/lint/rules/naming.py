"""Rules on names: options of the command line, keywords of torch's functions, names that are modules or undefined.

Options: LS061, LS062. Keywords: LS063. Names: LS064, LS065.
"""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator
from difflib import get_close_matches

from lockstep.lint.finding import Hit, rule
from lockstep.lint.script import FUNCTIONS, Script, argument, constant, is_open, last_name, parameters

KEYWORDS = {
    "init_process_group": """backend init_method timeout world_size rank store group_name pg_options device_id
        enable_reconfigure""",
    "DistributedSampler": "dataset num_replicas rank shuffle seed drop_last",
    "DistributedDataParallel": """module device_ids output_device dim broadcast_buffers init_sync process_group
        bucket_cap_mb find_unused_parameters check_reduction gradient_as_bucket_view static_graph
        delay_all_reduce_named_params param_to_hook_all_reduce mixed_precision device_mesh
        skip_all_reduce_unused_params forward_sync_buffers batched_grad_copy bucket_cap_mb_list
        lazy_bucket_allocation""",
    "DataParallel": "module device_ids output_device dim",
    "DataLoader": """dataset batch_size shuffle sampler batch_sampler num_workers collate_fn pin_memory drop_last
        timeout worker_init_fn multiprocessing_context generator prefetch_factor persistent_workers
        pin_memory_device in_order""",
}
"""The keywords of torch's functions (torch 2.8 to 2.15); a test compares them with the installed torch."""
MODULES = frozenset(
    """
    torch torch.nn torch.nn.functional torch.nn.init torch.nn.parallel torch.nn.parallel.distributed torch.nn.utils
    torch.optim torch.optim.lr_scheduler torch.distributed torch.distributed.fsdp torch.multiprocessing torch.cuda
    torch.cuda.amp torch.amp torch.utils torch.utils.data torch.utils.data.distributed torch.utils.tensorboard
    torch.backends torch.backends.cudnn
    """.split()  # noqa: SIM905  a list of literals would be a line of its own for each
)
_IMPORTS = {
    "torch": "import torch",
    "os": "import os",
    "dist": "import torch.distributed as dist",
    "mp": "import torch.multiprocessing as mp",
    "nn": "from torch import nn",
    "optim": "from torch import optim",
    "F": "from torch.nn import functional as F",
    "DDP": "from torch.nn.parallel import DistributedDataParallel as DDP",
    "DistributedDataParallel": "from torch.nn.parallel import DistributedDataParallel",
    "DistributedSampler": "from torch.utils.data.distributed import DistributedSampler",
    "DataLoader": "from torch.utils.data import DataLoader",
    "GradScaler": "from torch.amp import GradScaler",
    "autocast": "from torch.amp import autocast",
    "SummaryWriter": "from torch.utils.tensorboard import SummaryWriter",
}
_SETS_ANYTHING = ("setattr", "__dict__", "set_defaults", "namespace", "parents", "vars")
_SHORT = 6
"""Names of fewer letters resemble too many others: ``gpu`` and ``gpus`` are both right."""


@rule("LS061", "An option has type=bool: bool('False') is True, so that it cannot be switched off.")
def bool_option(script: Script) -> Iterator[Hit]:
    """``add_argument(..., type=bool)``."""
    for call in script.method_calls("add_argument"):
        kind = argument(call, "type")
        if kind is not None and script.name(kind) == "bool":
            yield Hit(
                call,
                "bool of any text that is not empty is True: '--option False' switches it on.",
                "action=argparse.BooleanOptionalAction  # in place of type=bool: --option and --no-option",
            )


@rule("LS062", "An option is read by a name that is not the declared one: AttributeError.")
def misspelt_option(script: Script) -> Iterator[Hit]:
    """Only where this file declares all options, one with nearly this name, and nothing else sets any."""
    declared = _declared(script)
    if declared is None or script.mentions(*_SETS_ANYTHING):
        return
    holders = _parsed(script)
    attributes = [node for node in script.find(ast.Attribute) if last_name(node.value) in holders]
    known = declared | {node.attr for node in attributes if isinstance(node.ctx, ast.Store)}
    for node in attributes:
        close = get_close_matches(node.attr, declared, n=1, cutoff=0.85)
        if node.attr not in known and close and len(node.attr) >= _SHORT:
            wrong = f"no option is called {node.attr}: AttributeError. The declared one is {close[0]}."
            yield Hit(node, wrong, f"{script.text(node.value)}.{close[0]}")


@rule("LS063", "A function of torch is given a keyword that it does not have: TypeError.")
def unknown_keyword(script: Script) -> Iterator[Hit]:
    """init_process_group, DDP, DataParallel, DistributedSampler, DataLoader; num_classes of torchvision's models."""
    for call in script.calls:
        name = script.name(call)
        known = KEYWORDS.get(name.rpartition(".")[2], "").split() if name.startswith("torch.") else []
        for keyword in call.keywords:
            given = keyword.arg or ""
            close = get_close_matches(given, known, n=1)
            if name.startswith("torchvision.models.") and given != "num_classes":
                close = get_close_matches(given, ["num_classes"], cutoff=0.85)
            if given and given not in known and (known or close):
                meant = close[0] if close else known[0]
                yield Hit(
                    keyword.value,
                    f"{last_name(call.func)} has no keyword {given}: TypeError."
                    + (f" It is called {meant}." if close else ""),
                    f"{meant}={script.text(keyword.value)}" if close else f"delete {given}=...",
                )


@rule("LS064", "A module is called as if it were the function or class in it: TypeError.")
def module_called(script: Script) -> Iterator[Hit]:
    """Names that only ``import x`` binds, and torch's own modules."""
    imported = {
        alias.asname or alias.name: alias.name
        for node in script.find(ast.Import)
        for alias in node.names
        if alias.asname or "." not in alias.name
    }
    bound = _bound(script, modules=False)
    for call in script.calls:
        name = script.name(call)
        own = isinstance(call.func, ast.Name) and call.func.id in imported.keys() - bound
        if own or (name in MODULES and name.partition(".")[0] not in bound):
            meant = name.rpartition(".")[2]
            yield Hit(
                call,
                f"{name} is a module: TypeError, 'module' object is not callable.",
                f"from {name} import {meant}" if own else f"{name}.NAME(...)  # what is meant in the module",
            )


@rule("LS065", "A name of torch is used and never imported: NameError.")
def name_not_imported(script: Script) -> Iterator[Hit]:
    """Names such as GradScaler, DDP and dist, in a file in which nothing binds them."""
    bound = _bound(script)
    if "*" in bound or script.mentions("globals", "exec"):
        return
    for name in _IMPORTS.keys() & script.names.keys() - bound:
        first = min(script.names[name], key=lambda node: (node.lineno, node.col_offset))
        yield Hit(first, f"nothing in this file imports or defines {name}: NameError.", _IMPORTS[name])


def _declared(script: Script) -> set[str] | None:
    """The attributes that the options of this file have; None where there are none, or others cannot be seen."""
    calls = script.method_calls("add_argument")
    parsers = {script.owner(call) for call in calls}
    handed = {script.text(item) for call in script.calls for item in call.args}
    names = [[constant(item) for item in call.args] for call in calls]
    if not calls or parsers & handed or not all(each and is_open(call) for each, call in zip(names, calls)):
        return None
    found = set()
    for call, given in zip(calls, names):
        long = [str(name) for name in given if str(name).startswith("--")] or [str(given[0])]
        found.add(str(constant(argument(call, "dest")) or long[0].lstrip("-").replace("-", "_")))
    return None if "None" in found else found


def _parsed(script: Script) -> set[str]:
    """The names of what ``parse_args`` returns, also as a parameter of a function in this file."""
    found = set()
    for call in script.method_calls("parse_args"):
        parent = script.parent(call)
        if isinstance(parent, ast.Assign) and isinstance(parent.targets[0], ast.Name):
            found.add(parent.targets[0].id)
    for function in script.functions:
        for call in script.calls_by_name.get(function.name, []):
            given = zip(call.args, parameters(function))
            found |= {name for item, name in given if script.text(item) in found}
    return found


def _bound(script: Script, *, modules: bool = True) -> set[str]:
    """Every name that anything in the file binds; ``*`` for an import of everything. ``modules``: by ``import`` too."""
    names = itertools.chain.from_iterable(script.names.values())
    stores = {name.id for name in names if not isinstance(name.ctx, ast.Load)}
    stores |= {node.arg for node in script.find(ast.arg)}
    stores |= {node.name for node in script.find(*FUNCTIONS, ast.ClassDef)}
    imports = [*script.find(ast.ImportFrom), *(script.find(ast.Import) if modules else ())]
    stores |= {alias.asname or alias.name.partition(".")[0] for node in imports for alias in node.names}
    return stores | {handler.name or "" for handler in script.find(ast.ExceptHandler)}
