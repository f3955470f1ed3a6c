"""Rules on devices: which process computes on which one."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.ranks import GLOBAL, LOCAL, proved_rank
from lockstep.lint.script import Script, argument, constant, receiver
from lockstep.lint.wrappers import DDP, is_managed, starts_group, wraps

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_STARTERS = (
    "is_available",
    "init",
    "set_device",
    "current_device",
    "get_device_name",
    "get_device_properties",
)


@rule(
    "LS010",
    "visible-devices-compared",
    "CUDA_VISIBLE_DEVICES is compared with == where it was meant to be assigned.",
)
def visible_devices_compared(script: Script) -> Iterator[Hit]:
    """A comparison that stands alone as a statement has no effect."""
    for node in script.nodes:
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Compare):
            left = node.value.left
            if isinstance(left, ast.Subscript) and constant(left.slice) == _VISIBLE:
                yield Hit(
                    node,
                    "this compares and does nothing: the devices are not restricted.",
                    f"{script.text(left)} = {script.text(node.value.comparators[0])}",
                )


@rule(
    "LS011",
    "visible-devices-set-late",
    "CUDA_VISIBLE_DEVICES is set after CUDA has been started in the process, which reads it only once.",
)
def visible_devices_set_late(script: Script) -> Iterator[Hit]:
    """Looks at lines of one function and at the module's own lines; not where processes are spawned."""
    if script.mentions("spawn", "process", "popen", "subprocess"):
        return
    starts = [call for call in script.calls if _starts_cuda(script, call)]
    for node in script.nodes:
        if not isinstance(node, ast.Assign) or not _is_visible_devices(script, node.targets[0]):
            continue
        early = [call for call in starts if _runs_before(script, call, node)]
        if early:
            yield Hit(
                node,
                f"line {early[0].lineno} has started CUDA already ({script.text(early[0])}), so this is not "
                "read any more.",
                f"{script.text(node)}  # above line {early[0].lineno}, best before torch is imported",
            )


@rule(
    "LS012",
    "global-rank-as-device",
    "The global rank is used as the number of a device: wrong on the second host.",
)
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


@rule(
    "LS013",
    "local-rank-as-global",
    "The local rank is given where the global one belongs: on two hosts two processes have the same.",
)
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


@rule(
    "LS014",
    "every-rank-on-one-device",
    "All ranks of a host compute on the first GPU: no rank chooses its own.",
)
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


def _is_visible_devices(script: Script, target: ast.expr) -> bool:
    return (
        isinstance(target, ast.Subscript)
        and constant(target.slice) == _VISIBLE
        and script.name(target.value) == "os.environ"
    )


def _starts_cuda(script: Script, call: ast.Call) -> bool:
    name = script.name(call)
    if name.startswith("torch.cuda."):
        return name.rpartition(".")[2] in _STARTERS
    method = call.func.attr if isinstance(call.func, ast.Attribute) else ""
    if method == "cuda" and not call.args:
        return not call.keywords
    return method == "to" and bool(call.args) and str(constant(call.args[0])).startswith("cuda")


def _runs_before(script: Script, early: ast.Call, late: ast.Assign) -> bool:
    if any(isinstance(ancestor, ast.Lambda) for ancestor, _ in script.ancestors(early)):
        return False
    if script.follows(late, early):
        return True
    in_class = any(isinstance(ancestor, ast.ClassDef) for ancestor, _ in script.ancestors(early))
    at_module = isinstance(script.scope(early), ast.Module) and not in_class
    return (
        at_module
        and early.lineno < late.lineno
        and not script.exclusive(late, early)
        and not _guarded(early, script)
    )


def _guarded(node: ast.AST, script: Script) -> bool:
    return any(isinstance(ancestor, ast.If | ast.IfExp) for ancestor, _ in script.ancestors(node))


def _device_numbers(script: Script) -> Iterator[ast.expr]:
    """Every expression that is used as the number of a CUDA device."""
    for call in script.calls:
        name, method = script.name(call), call.func.attr if isinstance(call.func, ast.Attribute) else ""
        chooses = name in ("torch.cuda.set_device", "torch.cuda.device")
        moves = method in ("cuda", "to") and not name.startswith("torch.")
        if call.args and (chooses or moves):
            yield call.args[0]
        elif name == "torch.device":
            yield from _numbers_of(call)
        devices = argument(call, "device_ids")
        if isinstance(devices, ast.List) and len(devices.elts) == 1:
            yield devices.elts[0]


def _numbers_of(call: ast.Call) -> Iterator[ast.expr]:
    if len(call.args) == 2 and constant(call.args[0]) == "cuda":
        yield call.args[1]
    if call.args and isinstance(call.args[0], ast.JoinedStr):
        parts = call.args[0].values
        if len(parts) == 2 and constant(parts[0]) == "cuda:" and isinstance(parts[1], ast.FormattedValue):
            yield parts[1].value


def _on_first_device(script: Script, source: str) -> bool:
    """Whether the model is moved to "cuda" or "cuda:0" and nothing else."""
    moves = [
        call for call in script.method_calls("cuda", "to") if source.startswith(script.text(receiver(call)))
    ]
    return bool(moves) and all(_means_first(script, call) for call in moves)


def _means_first(script: Script, call: ast.Call) -> bool:
    if not call.args:
        return isinstance(call.func, ast.Attribute) and call.func.attr == "cuda" and not call.keywords
    values = script.values(call.args[0]) or [call.args[0]]
    texts = [script.text(value) if value is not None else "" for value in values]
    return all("'cuda'" in text or "'cuda:0'" in text for text in texts)
