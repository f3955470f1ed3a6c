"""Rules on ranks that go separate ways: one leaves a loop, one steps alone."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.names import last_name
from lockstep.lint.reach import conditions
from lockstep.lint.rules.collectives import collectives
from lockstep.lint.script import Script, receiver
from lockstep.lint.wrappers import DDP, is_distributed, reduces, wraps

_STEPPED = ("optim", "sched", "scaler")


@rule(
    "LS021",
    "rank-leaves-loop",
    "One rank breaks out of a training loop by a decision of its own: the others wait in the next collective.",
)
def rank_leaves_loop(script: Script) -> Iterator[Hit]:
    """The loop must hold a backward pass or a collective."""
    if not is_distributed(script):
        return
    for node in script.nodes:
        if not isinstance(node, ast.Break | ast.Return):
            continue
        loop = _left_loop(script, node)
        if loop is None or not _synchronises(script, loop):
            continue
        inner = [item for item, _, _ in conditions(script, node) if script.holds(loop, item)]
        if inner and not _both_leave(inner[0], type(node)):
            yield Hit(
                node,
                f"only some ranks leave the loop of line {loop.lineno} here; the others wait for them in the "
                "next collective.",
                "torch.distributed.broadcast(stop, src=0)  # on every rank, then: if stop: break",
            )


@rule(
    "LS022",
    "step-on-some-ranks",
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
            if isinstance(statement, ast.If) and not _steps_in_both(script, statement, call):
                yield Hit(
                    call,
                    f"only some ranks pass the condition in line {statement.lineno}: what this steps differs "
                    "between ranks from here on.",
                    f"{script.text(call)}  # outside of the condition, on every rank",
                )
                break


@rule(
    "LS023",
    "plateau-on-local-metric",
    "ReduceLROnPlateau is stepped with each rank's own metric: the learning rates of the ranks part.",
)
def plateau_on_local_metric(script: Script) -> Iterator[Hit]:
    """Only where nothing in the file brings values of several ranks together."""
    if not wraps(script, DDP) or not is_distributed(script) or reduces(script):
        return
    made = {
        script.text(node.targets[0])
        for node in script.nodes
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and script.name(node.value) == "torch.optim.lr_scheduler.ReduceLROnPlateau"
    }
    for call in script.method_calls("step"):
        if script.text(receiver(call)) in made and (call.args or call.keywords):
            yield Hit(
                call,
                "every rank gives its own metric, so one lowers its learning rate and another does not.",
                "torch.distributed.all_reduce(metric, op=torch.distributed.ReduceOp.AVG)  # before this line",
            )


def _left_loop(script: Script, node: ast.Break | ast.Return) -> ast.For | ast.While | None:
    """The loop that the statement ends: the innermost for break, the outermost for return."""
    found: ast.For | ast.While | None = None
    for ancestor, child in script.ancestors(node):
        if isinstance(ancestor, ast.FunctionDef | ast.AsyncFunctionDef):
            break
        if isinstance(ancestor, ast.For | ast.While) and child not in ancestor.orelse:
            found = ancestor
            if isinstance(node, ast.Break):
                break
    return found


def _synchronises(script: Script, loop: ast.For | ast.While) -> bool:
    calls = [*script.method_calls("backward"), *collectives(script)]
    return any(script.holds(loop, call) for call in calls)


def _both_leave(statement: ast.If | ast.IfExp, kind: type[ast.stmt]) -> bool:
    if isinstance(statement, ast.IfExp):
        return False
    return all(
        any(isinstance(node, kind) for item in branch for node in ast.walk(item))
        for branch in (statement.body, statement.orelse)
    )


def _steps_in_both(script: Script, statement: ast.If, call: ast.Call) -> bool:
    text = script.text(call.func)
    return all(
        any(
            isinstance(node, ast.Call) and script.text(node.func) == text
            for item in branch
            for node in ast.walk(item)
        )
        for branch in (statement.body, statement.orelse)
    )
