"""Rules on collectives: every rank must come past each of them, with its own tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import lru_cache

from lockstep.lint.finding import Hit, rule
from lockstep.lint.ranks import FIRST, OTHERS, rank_test
from lockstep.lint.reach import conditions
from lockstep.lint.script import Script, argument, constant, receiver
from lockstep.lint.wrappers import FSDP, starts_group, wraps

COLLECTIVES = (
    "barrier",
    "monitored_barrier",
    "all_reduce",
    "reduce",
    "broadcast",
    "broadcast_object_list",
    "all_gather",
    "all_gather_object",
    "all_gather_into_tensor",
    "gather",
    "gather_object",
    "scatter",
    "scatter_object_list",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "all_to_all",
    "all_to_all_single",
)
_ACCELERATE = ("wait_for_everyone", "gather_for_metrics", "gather")


@lru_cache(maxsize=4)
def collectives(script: Script) -> tuple[ast.Call, ...]:
    """The calls that all ranks of the world must make: torch's over the whole world, and Accelerate's."""
    found = []
    for call in script.calls:
        first, _, last = script.name(call).rpartition(".")
        torchs = first == "torch.distributed" and last in COLLECTIVES and argument(call, "group") is None
        if torchs or (last in _ACCELERATE and first.rpartition(".")[2] == "accelerator"):
            found.append(call)
    return tuple(found)


@rule(
    "LS020",
    "collective-under-rank-condition",
    "A collective stands under a condition on the rank: the other ranks never come, and the run hangs.",
)
def collective_under_rank_condition(script: Script) -> Iterator[Hit]:
    """Not where the other ranks make the same call, in the other branch or under the opposite condition."""
    for call in collectives(script):
        for statement, kind, inside in conditions(script, call):
            if _matched(script, call, statement, kind, inside):
                continue
            yield Hit(
                call,
                f"only some ranks pass the condition in line {statement.lineno}; the others never make this "
                "call, and the run hangs.",
                f"{script.text(call)}  # outside of the condition, on every rank",
            )
            break


@rule(
    "LS024",
    "one-tensor-many-times",
    "The list that a gather writes to holds one tensor several times: every entry ends as the last rank's.",
)
def one_tensor_many_times(script: Script) -> Iterator[Hit]:
    """``[torch.zeros_like(x)] * n`` makes n names of one tensor."""
    for call in script.torch_calls("all_gather", "gather", "all_to_all"):
        position = 1 if script.name(call).endswith(".gather") else 0
        keyword = {"all_gather": "tensor_list", "gather": "gather_list"}.get(
            script.name(call).rpartition(".")[2], "output_tensor_list"
        )
        given = argument(call, keyword, position)
        for value in [] if given is None else [given, *script.values(given)]:
            if _repeated_tensor(script, value) and not _filled(script, script.text(given or call)):
                yield Hit(
                    value or call,
                    "this list holds one tensor several times, so every rank's result overwrites the one before.",
                    _fresh(script, value),
                )


@rule(
    "LS025",
    "async-handle-dropped",
    "An asynchronous collective is started and its handle dropped: nothing waits until the result is there.",
)
def async_handle_dropped(script: Script) -> Iterator[Hit]:
    """``async_op=True``, isend or irecv as a statement of its own."""
    for call in script.torch_calls(*COLLECTIVES, "isend", "irecv"):
        name = script.name(call)
        late = constant(argument(call, "async_op")) is True or name.endswith((".isend", ".irecv"))
        if name.startswith("torch.distributed.") and late and isinstance(script.parent(call), ast.Expr):
            yield Hit(
                call,
                "the handle is dropped, so the tensor is read before the other ranks' values are in it.",
                f"handle = {script.text(call)}; handle.wait()",
            )


@rule(
    "LS026",
    "cpu-tensor-on-nccl",
    "A tensor made on the CPU is given to a collective of the nccl backend, which refuses it.",
)
def cpu_tensor_on_nccl(script: Script) -> Iterator[Hit]:
    """Needs a literal backend in the file, and a tensor that is made in one line and never moved."""
    backends = {constant(argument(call, "backend", 0)) for call in starts_group(script)}
    if backends != {"nccl"} or script.mentions("set_default", "gloo"):
        return
    for call in script.torch_calls("all_reduce", "reduce", "broadcast"):
        tensor = argument(call, "tensor", 0)
        if not isinstance(tensor, ast.Name) or not script.name(call).startswith("torch.distributed."):
            continue
        values = script.values(tensor)
        if values and all(_made_on_cpu(script, value) for value in values) and not _moved(script, tensor.id):
            yield Hit(
                call,
                f"{tensor.id} is a CPU tensor and the backend is nccl: 'no backend type associated with device "
                "type cpu'.",
                f"{script.text(values[0]) if values[0] else tensor.id}.cuda()",
            )


@rule(
    "LS027",
    "sharded-state-on-one-rank",
    "The state of an FSDP model is asked for on one rank only; gathering it is a collective, and the run hangs.",
)
def sharded_state_on_one_rank(script: Script) -> Iterator[Hit]:
    """state_dict() of a name that FSDP has wrapped, under a condition on the rank."""
    targets = {wrap.target for wrap in wraps(script, FSDP)} - {""}
    for call in script.method_calls("state_dict"):
        if script.text(receiver(call)) in targets and any(True for _ in conditions(script, call)):
            yield Hit(
                call,
                "gathering the shards is a collective: the ranks outside of the condition never join it.",
                f"state = {script.text(call)}  # on every rank; only torch.save(state, ...) under the condition",
            )


@rule(
    "LS028",
    "collective-after-rank-return",
    "Some ranks return before a collective that stands further down in the function: the others wait forever.",
)
def collective_after_rank_return(script: Script) -> Iterator[Hit]:
    """Not where the ranks that return have made the same call before."""
    for node in script.nodes:
        if not isinstance(node, ast.If) or node.orelse or not isinstance(node.body[-1], ast.Return):
            continue
        parts = node.test.values if isinstance(node.test, ast.BoolOp) else [node.test]
        if any(rank_test(script, part) not in (FIRST, OTHERS) for part in parts):
            continue
        if isinstance(node.body[-1].value, ast.Call) and len(node.body) == 1:
            continue
        made = {script.name(call) for call in collectives(script) if script.holds(node, call)}
        for call in collectives(script):
            if script.follows(call, node) and not script.holds(node, call) and script.name(call) not in made:
                yield Hit(
                    call,
                    f"some ranks have returned in line {node.body[-1].lineno} and never make this call: the "
                    "others wait for them.",
                    f"{script.text(call)}  # above line {node.lineno}",
                )
                break


def _matched(script: Script, call: ast.Call, statement: ast.If | ast.IfExp, kind: str, inside: bool) -> bool:
    """Whether the ranks that do not pass here make the same call elsewhere in the function."""
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


def _repeated_tensor(script: Script, value: ast.expr | None) -> bool:
    if not isinstance(value, ast.BinOp) or not isinstance(value.op, ast.Mult):
        return False
    held = value.left if isinstance(value.left, ast.List) else value.right
    made = isinstance(held, ast.List) and len(held.elts) == 1 and isinstance(held.elts[0], ast.Call)
    return made and isinstance(held, ast.List) and script.name(held.elts[0]).startswith("torch.")


def _filled(script: Script, name: str) -> bool:
    """Whether entries of the list are set one by one."""
    stores = [n for n in script.nodes if isinstance(n, ast.Subscript) and isinstance(n.ctx, ast.Store)]
    return any(script.text(store.value) == name for store in stores)


def _fresh(script: Script, value: ast.expr | None) -> str:
    if not isinstance(value, ast.BinOp):
        return ""
    left = isinstance(value.left, ast.List)
    held, times = (value.left, value.right) if left else (value.right, value.left)
    return f"[{script.text(held)[1:-1]} for _ in range({script.text(times)})]"


def _made_on_cpu(script: Script, value: ast.expr | None) -> bool:
    if not isinstance(value, ast.Call) or argument(value, "device") is not None:
        return False
    return script.name(value) in (
        "torch.tensor",
        "torch.zeros",
        "torch.ones",
        "torch.empty",
        "torch.FloatTensor",
    )


def _moved(script: Script, name: str) -> bool:
    moves = script.method_calls("cuda", "to")
    return any(isinstance(receiver(call), ast.Name) and script.text(receiver(call)) == name for call in moves)
