"""Rules on collectives, which every rank must call with its own tensors, and on ranks that leave or step alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

from lockstep.lint.finding import Hit, rule
from lockstep.lint.ranks import FIRST, conditions, rank_test
from lockstep.lint.script import Function, Loop, Script, argument, constant, last_name, method, receiver
from lockstep.lint.wrappers import (
    DDP,
    FSDP,
    is_distributed,
    is_managed,
    reduces,
    runs_of,
    starts_group,
    wraps,
)

# fmt: off
COLLECTIVES = (
    "barrier", "monitored_barrier", "all_reduce", "reduce", "broadcast", "broadcast_object_list",
    "all_gather", "all_gather_object", "all_gather_into_tensor", "gather", "gather_object", "scatter",
    "scatter_object_list", "reduce_scatter", "reduce_scatter_tensor", "all_to_all", "all_to_all_single",
    "all_gather_single", "gather_single", "gather_into_tensor", "reduce_scatter_single",
    "all_gather_coalesced", "all_reduce_coalesced",
)
# fmt: on
_DIST = "torch.distributed."
_LISTS = {
    "all_gather": ("tensor_list", 0),
    "gather": ("gather_list", 1),
    "all_to_all": ("output_tensor_list", 0),
}
_ACCELERATE = ("wait_for_everyone", "gather_for_metrics", "gather")
_OF_RUN = (
    *("backward", "evaluate", "fingerprint", "load_state_dict"),
    *("predict", "prepare", "save", "state_dict"),
)
_STEPPED = ("optim", "sched", "scaler")


@lru_cache(maxsize=4)
def collectives(script: Script) -> tuple[ast.Call, ...]:
    """The calls that all ranks of the world must make: torch's over the whole world, Accelerate's and Lockstep's."""
    runs, found = runs_of(script), []
    for call in script.calls:
        first, _, last = script.name(call).rpartition(".")
        torchs = first == "torch.distributed" and last in COLLECTIVES and argument(call, "group") is None
        of_run = bool(runs) and last in _OF_RUN and script.text(receiver(call)) in runs
        if torchs or of_run or (last in _ACCELERATE and first.rpartition(".")[2] == "accelerator"):
            found.append(call)
    return tuple(found)


@rule(
    "LS020",
    "A collective stands under a condition on the rank: the other ranks never come, and the run hangs.",
)
def collective_under_rank_condition(script: Script) -> Iterator[Hit]:
    """Not where the other ranks make the same call, in the other branch or under the opposite condition."""
    for call in collectives(script):
        alone = next((each for each in conditions(script, call) if not _matched(script, call, *each)), None)
        if alone is not None:
            yield Hit(
                call,
                f"only some ranks pass the condition in line {alone[0].lineno}; the others never make this call, "
                "and the run hangs, or refuses it.",
                f"{script.text(call)}  # outside of the condition, on every rank",
            )


@rule(
    "LS024",
    "The list that a gather writes to holds one tensor several times: every entry ends as the last rank's.",
)
def one_tensor_many_times(script: Script) -> Iterator[Hit]:
    """``[torch.zeros_like(x)] * n`` makes n names of one tensor."""
    stores = (node for node in script.find(ast.Subscript) if isinstance(node.ctx, ast.Store))
    filled = {script.text(store.value) for store in stores}
    for call in script.torch_calls(*_LISTS):
        given = argument(call, *_LISTS[script.name(call).rpartition(".")[2]])
        for value in [] if given is None or script.text(given) in filled else [given, *script.values(given)]:
            fresh = _fresh(script, value)
            if value is not None and fresh:
                yield Hit(
                    value,
                    "this list holds one tensor several times, so every rank's result overwrites the one before.",
                    fresh,
                )


@rule(
    "LS025",
    "An asynchronous collective is started and its handle dropped: nothing waits until the result is there.",
)
def async_handle_dropped(script: Script) -> Iterator[Hit]:
    """``async_op=True``, isend or irecv as a statement of its own."""
    for call in script.torch_calls(*COLLECTIVES, "isend", "irecv", within=_DIST):
        late = constant(argument(call, "async_op")) is True or method(call) in ("isend", "irecv")
        if late and isinstance(script.parent(call), ast.Expr):
            yield Hit(
                call,
                "the handle is dropped, so the tensor is read before the other ranks' values are in it.",
                f"handle = {script.text(call)}; handle.wait()",
            )


@rule("LS026", "A tensor made on the CPU is given to a collective of the nccl backend, which refuses it.")
def cpu_tensor_on_nccl(script: Script) -> Iterator[Hit]:
    """Needs a literal backend in the file, and a tensor that is made in one line and never moved."""
    backends = {constant(argument(call, "backend", 0)) for call in starts_group(script)}
    if backends != {"nccl"} or script.mentions("set_default", "gloo"):
        return
    moved = {script.text(receiver(call)) for call in script.method_calls("cuda", "to")}
    for call in script.torch_calls("all_reduce", "reduce", "broadcast", within=_DIST):
        tensor = argument(call, "tensor", 0)
        values = script.values(tensor) if isinstance(tensor, ast.Name) else []
        made_here = bool(values) and all(_made_on_cpu(script, value) for value in values)
        if made_here and isinstance(tensor, ast.Name) and tensor.id not in moved:
            yield Hit(
                call,
                f"{tensor.id} is a CPU tensor and the backend is nccl: 'no backend type associated with device "
                "type cpu'.",
                f"{script.text(values[0]) if values[0] else tensor.id}.cuda()",
            )


@rule(
    "LS027",
    "The state of an FSDP model is asked for on one rank only; gathering it is a collective, and the run hangs.",
)
def sharded_state_on_one_rank(script: Script) -> Iterator[Hit]:
    """state_dict() of a name that FSDP has wrapped, under a condition on the rank."""
    targets = {wrap.target for wrap in wraps(script, FSDP)} - {""}
    for call in script.method_calls("state_dict"):
        if script.owner(call) in targets and any(True for _ in conditions(script, call)):
            yield Hit(
                call,
                "gathering the shards is a collective: the ranks outside of the condition never join it.",
                f"state = {script.text(call)}  # on every rank; only torch.save(state, ...) under the condition",
            )


@rule(
    "LS028",
    "Some ranks return before a collective that stands further down in the function: the others wait forever.",
)
def collective_after_rank_return(script: Script) -> Iterator[Hit]:
    """Not where the ranks that return have made the same call before."""
    for node in script.find(ast.If):
        last = node.body[-1]
        if node.orelse or not isinstance(last, ast.Return):
            continue
        parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        goes_on = isinstance(last.value, ast.Call) and len(node.body) == 1
        if goes_on or not all(rank_test(script, part) for part in parts):
            continue
        made = {script.name(call) for call in collectives(script) if script.holds(node, call)}
        for call in collectives(script):
            if script.follows(call, node) and not script.holds(node, call) and script.name(call) not in made:
                yield Hit(
                    call,
                    f"some ranks have returned in line {last.lineno} and never make this call: the others wait for "
                    "them.",
                    f"{script.text(call)}  # above line {node.lineno}",
                )
                break


def _matched(script: Script, call: ast.Call, statement: ast.If | ast.IfExp, kind: str, inside: bool) -> bool:
    """Returns True where the ranks that do not pass here make the same call elsewhere in the function."""
    name, meant = script.name(call), (kind == FIRST) == inside
    for other in collectives(script):
        if other is call or script.name(other) != name or not script.same_function(call, other):
            continue
        for around, its_kind, its_inside in conditions(script, other):
            if around is statement and its_inside != inside:
                return True
            if around is not statement and ((its_kind == FIRST) == its_inside) != meant:
                return True
    return False


def _fresh(script: Script, value: ast.expr | None) -> str:
    """For ``[torch.zeros(1)] * n``, the list with n tensors; empty for anything else."""
    match value:
        case (
            ast.BinOp(left=ast.List(elts=[ast.Call() as made]), op=ast.Mult(), right=times)
            | ast.BinOp(left=times, op=ast.Mult(), right=ast.List(elts=[ast.Call() as made]))
        ) if script.name(made).startswith("torch."):
            return f"[{script.text(made)} for _ in range({script.text(times)})]"
    return ""


def _made_on_cpu(script: Script, value: ast.expr | None) -> bool:
    if not isinstance(value, ast.Call) or argument(value, "device") is not None:
        return False
    made = script.name(value).removeprefix("torch.")
    return made in ("tensor", "zeros", "ones", "empty", "FloatTensor") and made != script.name(value)


@rule(
    "LS021",
    "One rank breaks out of a training loop by a decision of its own: the others wait in the next collective.",
)
def rank_leaves_loop(script: Script) -> Iterator[Hit]:
    """The loop must hold a backward pass or a collective."""
    if not is_distributed(script):
        return
    meetings = [*script.method_calls("backward"), *collectives(script)]
    for node in script.find(ast.Break, ast.Return):
        loop = _left_loop(script, node)
        if loop is None or not any(script.holds(loop, call) for call in meetings):
            continue
        inner = [item for item, _, _ in conditions(script, node) if script.holds(loop, item)]
        kinds = [{type(each) for each in branch} for item in inner[:1] for branch in _branches(item)]
        if not all(type(node) in found for found in kinds):
            yield Hit(
                node,
                f"only some ranks leave the loop of line {loop.lineno} here; the others wait for them in the "
                "next collective.",
                "torch.distributed.broadcast(stop, src=0)  # on every rank, then: if stop: break",
            )


@rule(
    "LS022",
    "An optimizer, a schedule or a loss scaler is stepped on one rank only: parameters or learning rates part.",
)
def step_on_some_ranks(script: Script) -> Iterator[Hit]:
    """The condition on the rank must stand in the same function."""
    if not is_distributed(script):
        return
    for call in script.method_calls("step"):
        name = last_name(receiver(call)).lower()
        if not any(word in name for word in _STEPPED) or "server" in name:
            continue
        for statement, _, _ in conditions(script, call):
            calls = [[n for n in nodes if isinstance(n, ast.Call)] for nodes in _branches(statement)]
            same = [any(script.text(each.func) == script.text(call.func) for each in part) for part in calls]
            if isinstance(statement, ast.If) and not all(same):
                yield Hit(
                    call,
                    f"only some ranks pass the condition in line {statement.lineno}: what this steps differs "
                    "between ranks from here on.",
                    f"{script.text(call)}  # outside of the condition, on every rank",
                )
                break


@rule("LS023", "ReduceLROnPlateau is stepped with each rank's own metric: the learning rates of the ranks part.")
def plateau_on_local_metric(script: Script) -> Iterator[Hit]:
    """Only where nothing in the file brings values of several ranks together."""
    if not wraps(script, DDP) or is_managed(script) or reduces(script):
        return
    makers = script.calls_of("torch.optim.lr_scheduler.ReduceLROnPlateau")
    statements = [script.parent(call) for call in makers]
    made = {script.text(node.targets[0]) for node in statements if isinstance(node, ast.Assign)}
    for call in script.method_calls("step"):
        if script.owner(call) in made and (call.args or call.keywords):
            yield Hit(
                call,
                "every rank gives its own metric, so one lowers its learning rate and another does not.",
                "torch.distributed.all_reduce(metric, op=torch.distributed.ReduceOp.AVG)  # before this line",
            )


def _left_loop(script: Script, node: ast.stmt) -> Loop | None:
    """The loop that the statement ends: the innermost for break, the outermost for return."""
    found: Loop | None = None
    for ancestor, child in script.ancestors(node):
        if isinstance(ancestor, Function) or (found is not None and isinstance(node, ast.Break)):
            break
        if isinstance(ancestor, Loop) and child not in ancestor.orelse:
            found = ancestor
    return found


def _branches(statement: ast.If | ast.IfExp) -> list[list[ast.AST]]:
    """All nodes of the body, and all of the other branch."""
    blocks = (statement.body, statement.orelse) if isinstance(statement, ast.If) else ([],)
    return [[node for item in block for node in ast.walk(item)] for block in blocks]
