"""Rules on loss scaling: GradScaler, and what must come between its calls."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.names import last_name
from lockstep.lint.script import Script, receiver

CLIPPERS = ("clip_grad_norm_", "clip_grad_value_", "clip_grad_norm")


def scaled_backwards(script: Script) -> list[tuple[ast.Call, str]]:
    """(call, scaler) of every ``scaler.scale(loss).backward()``."""
    found: list[tuple[ast.Call, str]] = []
    if "torch" not in script.imported_roots:
        return found
    for call in script.method_calls("backward"):
        scaled = receiver(call)
        if (
            isinstance(scaled, ast.Call)
            and isinstance(scaled.func, ast.Attribute)
            and scaled.func.attr == "scale"
        ):
            found.append((call, script.text(scaled.func.value)))
    return found


@rule(
    "LS030",
    "clip-without-unscale",
    "Gradients are clipped while GradScaler's factor is still in them: nearly every one is cut to nothing.",
)
def clip_without_unscale(script: Script) -> Iterator[Hit]:
    """Needs the scaled backward pass, the clipping and scaler.step in one function, and no unscale_ in it."""
    for clip in script.torch_calls(*CLIPPERS):
        for backward, scaler in scaled_backwards(script):
            if not script.follows(clip, backward) or _calls(script, clip, scaler, "unscale_"):
                continue
            steps = [
                call for call in _calls(script, clip, scaler, "step") if not script.exclusive(call, clip)
            ]
            if steps:
                optimizer = script.text(steps[0].args[0]) if steps[0].args else "optimizer"
                yield Hit(
                    clip,
                    f"the gradients are still multiplied by the scale of {scaler} (65536 at the start) when "
                    "they are clipped.",
                    f"{scaler}.unscale_({optimizer})  # above this line",
                )
                break


@rule(
    "LS037",
    "step-past-scaler",
    "The loss is scaled and the optimizer steps without GradScaler: the update is 65536 times too large.",
)
def step_past_scaler(script: Script) -> Iterator[Hit]:
    """Only where no scaler in the file ever steps or unscales."""
    backwards = scaled_backwards(script)
    scalers = {scaler for _, scaler in backwards}
    used = [
        call for call in script.method_calls("step", "unscale_") if script.text(receiver(call)) in scalers
    ]
    if used:
        return
    for call in script.method_calls("step"):
        if "optim" not in last_name(receiver(call)).lower():
            continue
        early = [item for item in backwards if script.follows(call, item[0])]
        if early and "scaler" in early[0][1].lower():
            yield Hit(
                call,
                f"the gradients still carry the scale of {early[0][1]}, and no overflow is noticed.",
                f"{early[0][1]}.step({script.text(receiver(call))}); {early[0][1]}.update()",
            )


@rule(
    "LS038",
    "scaler-without-update",
    "GradScaler steps and is never updated: its scale does not adapt and the second step raises.",
)
def scaler_without_update(script: Script) -> Iterator[Hit]:
    """Only where the file has the scaled backward pass and no update at all of that scaler."""
    for scaler in sorted({scaler for _, scaler in scaled_backwards(script)}):
        steps = [call for call in script.method_calls("step") if script.text(receiver(call)) == scaler]
        updates = [call for call in script.method_calls("update") if _is_scaler(script, call, scaler)]
        if steps and not updates:
            yield Hit(
                steps[0],
                f"{scaler} is never updated: RuntimeError 'step() has already been called since the last update()'.",
                f"{scaler}.update()  # below this line",
            )


def _is_scaler(script: Script, call: ast.Call, scaler: str) -> bool:
    """Whether a method is called on this scaler, or on one of another name (``self.scaler`` and ``scaler``)."""
    name = script.text(receiver(call))
    return name == scaler or "scaler" in name.lower()


def _calls(script: Script, near: ast.AST, scaler: str, method: str) -> list[ast.Call]:
    """The calls of a scaler's method in the function of a node."""
    calls = script.method_calls(method)
    return [c for c in calls if script.text(receiver(c)) == scaler and script.same_function(c, near)]
