"""Rules on the model: normalisation, wrapping, and in which order things are made."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.module_names import MODULE_NAMES
from lockstep.lint.names import last_name
from lockstep.lint.ranks import mentions_rank
from lockstep.lint.script import Script, argument, receiver
from lockstep.lint.wrappers import DDP, DP, FSDP, Wrap, is_managed, wraps

_WITH_BATCH_NORM = re.compile(
    r"torchvision\.models\.(resnet|resnext|wide_resnet|densenet|mobilenet|efficientnet|mnasnet|shufflenet|regnet"
    r"|googlenet|inception|vgg\d+_bn)"
)


@rule(
    "LS040",
    "batchnorm-without-a-choice",
    "A model with BatchNorm is wrapped in DDP and nothing says how its statistics are meant: per rank, or of all.",
)
def batchnorm_without_a_choice(script: Script) -> Iterator[Hit]:
    """Needs the BatchNorm, or a torchvision model that has it, in the same file."""
    wrapped = wraps(script, DDP)
    if not wrapped or script.mentions("sync_b", "syncb", "broadcast_buffers", "convert_sync"):
        return
    layers = [
        c for c in script.torch_calls("BatchNorm1d", "BatchNorm2d", "BatchNorm3d") if ".nn." in script.name(c)
    ]
    found = [*layers, *(c for c in script.calls if _WITH_BATCH_NORM.match(script.name(c)))]
    if found:
        yield Hit(
            wrapped[0].call,
            f"the model has BatchNorm (line {found[0].lineno}): each rank normalises with the statistics of its own "
            "samples, so results depend on the number of ranks.",
            f"{wrapped[0].source} = torch.nn.SyncBatchNorm.convert_sync_batchnorm({wrapped[0].source})  # above, or "
            "say that it is meant: # lockstep: ignore[LS040]",
        )


@rule(
    "LS041",
    "sync-batchnorm-after-wrapping",
    "BatchNorm is converted to SyncBatchNorm after the model has been wrapped in DDP.",
)
def sync_batchnorm_after_wrapping(script: Script) -> Iterator[Hit]:
    """torch asks for the other order: DDP has noted the modules and buffers that are replaced here."""
    for call in script.torch_calls("convert_sync_batchnorm"):
        model = script.text(call.args[0]) if call.args else ""
        for wrap in wraps(script, DDP):
            if (
                wrap.target
                and model in (wrap.target, f"{wrap.target}.module")
                and script.follows(call, wrap.call)
            ):
                yield Hit(
                    call,
                    f"DDP has wrapped {wrap.target} in line {wrap.call.lineno} and noted the buffers that this "
                    "replaces.",
                    f"{script.text(call).replace('.module', '')}  # above line {wrap.call.lineno}",
                )
                break


@rule(
    "LS042",
    "optimizer-before-sharding",
    "The optimizer is made before FSDP wraps the model: it holds the old parameters and trains nothing.",
)
def optimizer_before_sharding(script: Script) -> Iterator[Hit]:
    """The optimizer must get the parameters of the very name that is wrapped below it."""
    makers = [call for call in script.calls if script.name(call).startswith("torch.optim.") and call.args]
    for wrap in wraps(script, FSDP):
        for maker in makers:
            given = script.text(maker.args[0])
            if given != f"{wrap.source}.parameters()" or not script.follows(wrap.call, maker):
                continue
            again = any(
                script.follows(other, wrap.call) and f"{wrap.target}.parameters()" in script.text(other)
                for other in makers
            )
            if not again:
                yield Hit(
                    maker,
                    f"FSDP replaces these parameters in line {wrap.call.lineno}; the optimizer keeps the old ones.",
                    f"{script.text(maker)}  # below line {wrap.call.lineno}",
                )


@rule(
    "LS043",
    "ranks-start-apart",
    "The ranks start from different weights: they are seeded apart and nothing makes their weights equal.",
)
def ranks_start_apart(script: Script) -> Iterator[Hit]:
    """FSDP without sync_module_states, or gradients averaged by hand without a broadcast."""
    seeds = [call for call in script.torch_calls("manual_seed") if call.args]
    apart = [call for call in seeds if mentions_rank(script, call.args[0])]
    if (
        not apart
        or len(apart) < len(seeds)
        or is_managed(script)
        or script.mentions("load_state", "from_pretrained")
    ):
        return
    for wrap in wraps(script, FSDP):
        if argument(wrap.call, "sync_module_states") is None and not script.mentions(
            "sync_module_states", "meta"
        ):
            yield Hit(
                wrap.call,
                f"the seed of line {apart[0].lineno} differs between ranks, so each shards weights of its own.",
                "FSDP(..., sync_module_states=True)",
            )
    by_hand = [c for c in script.torch_calls("all_reduce") if c.args and ".grad" in script.text(c.args[0])]
    if by_hand and not wraps(script, DDP, FSDP) and not script.mentions("broadcast"):
        yield Hit(
            apart[0],
            "the seed differs between ranks and the weights are never broadcast, so the ranks train different models.",
            "torch.distributed.broadcast(parameter.data, src=0)  # for every parameter, before training",
        )


@rule(
    "LS044",
    "attribute-behind-wrapper",
    "An attribute of the model is asked of its wrapper, which does not have it: AttributeError.",
)
def attribute_behind_wrapper(script: Script) -> Iterator[Hit]:
    """Only where the name is wrapped for certain, in the same function, and never set again below."""
    for wrap in wraps(script, DDP, DP):
        if not wrap.certain or not wrap.target.isidentifier() or wrap.kind not in script.name(wrap.call):
            continue
        if not script.name(wrap.call).startswith("torch."):
            continue
        for name in script.names.get(wrap.target, []):
            node = script.parent(name)
            if isinstance(node, ast.Attribute) and _asks_wrapper(script, node, wrap):
                yield Hit(
                    node,
                    f"{wrap.target} is wrapped in {wrap.kind} in line {wrap.call.lineno}, which has no "
                    f"{node.attr}: AttributeError.",
                    f"{wrap.target}.module.{node.attr}",
                )


@rule(
    "LS045",
    "eval-without-train",
    "The trained model is set to eval() and never back to train(): dropout and BatchNorm stay off.",
)
def eval_without_train(script: Script) -> Iterator[Hit]:
    """Where eval() comes again and again in the loop that trains, and the file has no train() at all."""
    if (
        script.method_calls("train")
        or is_managed(script)
        or script.mentions("set_grad_enabled", "set_training")
    ):
        return
    trained = {
        text
        for call in script.calls
        if script.name(call).startswith("torch.optim.")
        for text in _owners(script, call)
    }
    for call in script.method_calls("eval"):
        loops = [
            ancestor for ancestor, _ in script.ancestors(call) if isinstance(ancestor, ast.For | ast.While)
        ]
        backwards = script.method_calls("backward")
        trains = any(
            ancestor is loop for loop in loops for b in backwards for ancestor, _ in script.ancestors(b)
        )
        model = script.text(receiver(call))
        if model in trained and trains:
            yield Hit(
                call,
                f"{model} is never set back to train(), so training goes on without dropout and with frozen BatchNorm.",
                f"{model}.train()  # after the evaluation",
            )


def _asks_wrapper(script: Script, node: ast.Attribute, wrap: Wrap) -> bool:
    """Whether an attribute of the wrapped name is read below the wrap, and is neither torch's nor set there."""
    if not isinstance(node.ctx, ast.Load) or node.attr in MODULE_NAMES or node.attr.startswith("_"):
        return False
    if not script.follows(node, wrap.call) or _asked_first(script, node):
        return False
    for name in script.names[wrap.target]:
        parent = script.parent(name)
        same = isinstance(parent, ast.Attribute) and parent.attr == node.attr
        set_here = not isinstance(name.ctx, ast.Load)
        set_there = same and isinstance(parent, ast.Attribute) and not isinstance(parent.ctx, ast.Load)
        below = name.lineno > wrap.call.lineno and script.same_function(name, node)
        if below and (set_here or set_there):
            return False
    return True


def _asked_first(script: Script, node: ast.Attribute) -> bool:
    """Whether a condition or a ``try`` around the node could know better."""
    for ancestor, child in script.ancestors(node):
        if isinstance(ancestor, ast.Try) and child in ancestor.body:
            return True
        if isinstance(ancestor, ast.If | ast.IfExp) and child is not ancestor.test:
            words = script.text(ancestor.test)
            if any(
                word in words for word in ("isinstance", "hasattr", "distributed", "parallel", "gpu", "ddp")
            ):
                return True
    return False


def _owners(script: Script, call: ast.Call) -> Iterator[str]:
    """The models whose parameters an optimizer is given."""
    for part in call.args[:1]:
        for node in script.sources(part, depth=1):
            if isinstance(node, ast.Call) and last_name(node.func) == "parameters":
                yield script.text(receiver(node))
