"""Rules on devices (which rank computes on which) and on processes: how they start, connect and end."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.ranks import GLOBAL, LOCAL, proved_rank
from lockstep.lint.script import Script, argument, constant, method, receiver
from lockstep.lint.wrappers import DDP, is_managed, starts_group, wraps

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_FALLBACK = re.compile("MASTER_|environ|RANK|SLURM|debug|is None|WORLD")
_ADDRESS = re.compile(r"tcp://[^{}]*:([1-9]\d*)$")
_STARTERS = (
    "is_available",
    "init",
    "set_device",
    "current_device",
    "get_device_name",
    "get_device_properties",
)


@rule("LS010", "CUDA_VISIBLE_DEVICES is compared with == where it was meant to be assigned.")
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
    "CUDA_VISIBLE_DEVICES is set after CUDA has been started in the process, which reads it only once.",
)
def visible_devices_set_late(script: Script) -> Iterator[Hit]:
    """Looks at lines of one function and at the module's own lines; not where processes are spawned."""
    if script.mentions("spawn", "process", "popen", "subprocess"):
        return
    starts = [call for call in script.calls if _starts_cuda(script, call)]
    for node in script.nodes:
        if not isinstance(node, ast.Assign) or not _is_variable(script, node.targets[0], _VISIBLE):
            continue
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


@rule(
    "LS013", "The local rank is given where the global one belongs: on two hosts two processes have the same."
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


def _is_variable(script: Script, target: ast.expr, variable: str) -> bool:
    """Returns True for ``os.environ[variable]``."""
    named = isinstance(target, ast.Subscript) and constant(target.slice) == variable
    return named and isinstance(target, ast.Subscript) and script.name(target.value) == "os.environ"


def _starts_cuda(script: Script, call: ast.Call) -> bool:
    name = script.name(call)
    if name.startswith("torch.cuda."):
        return name.rpartition(".")[2] in _STARTERS
    if not call.args:
        return method(call) == "cuda" and not call.keywords
    return method(call) == "to" and str(constant(call.args[0])).startswith("cuda")


def _runs_before(script: Script, early: ast.Call, late: ast.Assign) -> bool:
    if any(script.around(early, ast.Lambda)):
        return False
    if script.follows(late, early):
        return True
    at_module = not any(script.around(early, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)))
    guarded = any(script.around(early, (ast.If, ast.IfExp)))
    return at_module and early.lineno < late.lineno and not guarded and not script.exclusive(late, early)


def _device_numbers(script: Script) -> Iterator[ast.expr]:
    """Every expression that is used as the number of a CUDA device."""
    for call in script.calls:
        name = script.name(call)
        chooses = name in ("torch.cuda.set_device", "torch.cuda.device")
        moves = method(call) in ("cuda", "to") and not name.startswith("torch.")
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
    """Returns True where the model is moved to "cuda" or "cuda:0" and nothing else."""
    calls = script.method_calls("cuda", "to")
    moves = [call for call in calls if source.startswith(script.text(receiver(call)))]
    return bool(moves) and all(_means_first(script, call) for call in moves)


def _means_first(script: Script, call: ast.Call) -> bool:
    if not call.args:
        return method(call) == "cuda" and not call.keywords
    values = script.values(call.args[0]) or [call.args[0]]
    texts = [script.text(value) if value is not None else "" for value in values]
    return all("'cuda'" in text or "'cuda:0'" in text for text in texts)


@rule("LS015", "The port of the rendezvous is a number in the script: two runs on a host collide.")
def hard_coded_port(script: Script) -> Iterator[Hit]:
    """MASTER_PORT assigned without a look at what the launcher has set, or a literal init_method."""
    for node in script.nodes:
        if not isinstance(node, ast.Assign) or not _is_variable(script, node.targets[0], "MASTER_PORT"):
            continue
        if str(_text(node.value)).isdigit() and not _is_fallback(script, node):
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
    assigned = [n for n in script.nodes if isinstance(n, ast.Assign) and isinstance(n.value, ast.Call)]
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
    for call in script.calls:
        if script.name(call) not in ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes"):
            continue
        if not any(script.around(call, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.If))):
            yield Hit(
                call,
                "each child imports this file and comes past this line again: RuntimeError in every child.",
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


def _text(value: ast.expr) -> object:
    """The literal, also within ``str(...)``."""
    if isinstance(value, ast.Call) and len(value.args) == 1:
        value = value.args[0]
    return constant(value)


def _is_fallback(script: Script, node: ast.Assign) -> bool:
    """Returns True where the line runs only where nothing else has set the port, or where there is one process."""
    for ancestor, child in script.ancestors(node):
        if isinstance(ancestor, ast.ExceptHandler):
            return True
        test = ancestor.test if isinstance(ancestor, ast.If) else child
        if test is not child and _FALLBACK.search(script.text(test)):
            return True
    return False
