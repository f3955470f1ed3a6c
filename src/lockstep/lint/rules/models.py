"""Rules on the model (BatchNorm, wrapping, the order in which things are made) and on learning-rate schedules."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from lockstep.lint.finding import Hit, rule
from lockstep.lint.ranks import mentions_rank
from lockstep.lint.rules.gradients import gradient_reductions, optimizers
from lockstep.lint.script import Script, argument, arguments, constant, is_open
from lockstep.lint.wrappers import DDP, DP, FSDP, Wrap, is_managed, owners_of, target_of, wraps

_MODULE = """
T_destination add_module apply bfloat16 buffers call_super_init children compile cpu cuda double dump_patches eval
extra_repr float forward get_buffer get_extra_state get_parameter get_submodule half ipu load_state_dict modules mtia
named_buffers named_children named_modules named_parameters parameters register_backward_hook register_buffer
register_forward_hook register_forward_pre_hook register_full_backward_hook register_full_backward_pre_hook
register_load_state_dict_post_hook register_load_state_dict_pre_hook register_module register_parameter
register_state_dict_post_hook register_state_dict_pre_hook requires_grad_ set_extra_state set_submodule share_memory
state_dict to to_empty train training type xpu zero_grad
"""
_WRAPPERS = """
batched_grad_copy broadcast_bucket_size broadcast_buffers bucket_bytes_cap bucket_bytes_cap_default
bucket_bytes_cap_list buffer_hook device device_ids device_mesh device_type dim finalize_backward
find_unused_parameters forward_sync_buffers gather gradient_as_bucket_view is_multi_device_module join
join_device join_hook join_process_group logger mixed_precision module modules_buffers named_module_buffers
no_sync output_device parallel_apply parameters_to_ignore process_group reducer register_comm_hook replicate
require_backward_grad_sync require_forward_param_sync require_manual_backward_finalization scatter
should_finalize_after_backward skip_all_reduce_unused_params src_device_obj static_graph to_kwargs
use_side_stream_for_tensor_copies will_sync_module_buffers
"""
MODULE_NAMES = frozenset((_MODULE + _WRAPPERS).split())
"""The public attributes of DDP and DataParallel (torch 2.8 to 2.15); a test compares them with the installed torch."""
_ASKED_FIRST = re.compile("isinstance|hasattr|distributed|parallel|gpu|ddp")
_OVER_RANGE = re.compile(r"(list\()?range\(|\[(\w+) for \2 in range\(")
_LENGTHS = {"CosineAnnealingLR": ("T_max", 1), "OneCycleLR": ("total_steps", 2)}
_SCHEDULE = re.compile(r"torch\.optim\.lr_scheduler\.|transformers\.(\w+\.)*get_(\w+_)?schedule\w*$")
# fmt: off
_WORLD = (
    "world", "replica", "gpu", "rank", "process", "device_count", "nproc", "sampler", "loader", "global",
)
# fmt: on


@rule(
    "LS058",
    "The length of the learning-rate schedule counts the steps of one process, and several share them.",
)
def schedule_of_one_process(script: Script) -> Iterator[Hit]:
    """The length is len(data) by the batch size, the loader splits the same data by a DistributedSampler."""
    datasets = [argument(call, "dataset", 0) for call in script.torch_calls("DistributedSampler")]
    split = {script.text(data) for data in datasets if data is not None}
    for call in script.torch_calls(*_LENGTHS) if not is_managed(script) else ():
        keyword, position = _LENGTHS[script.name(call).rpartition(".")[2]]
        length = argument(call, keyword, position)
        parts = list(script.sources(length))
        texts = {script.text(part) for part in parts}
        counted = [data for data in split if f"len({data})" in texts]
        divided = any(isinstance(p, ast.BinOp) and isinstance(p.op, ast.FloorDiv | ast.Div) for p in parts)
        aware = any(word in text.lower() for text in texts for word in _WORLD)
        if length is not None and counted and divided and not aware:
            yield Hit(
                length,
                f"{script.text(length)} counts the steps of one process over all of {counted[0]}; each of N ranks "
                "takes an N-th of them, so the schedule stops at an N-th of its way.",
                f"{keyword}=len(loader) * epochs",
            )


@rule(
    "LS060",
    "Accelerate steps a prepared schedule once for every process, and its length counts the steps of one already.",
)
def schedule_divided_twice(script: Script) -> Iterator[Hit]:
    """The length is len() of a loader that was prepared above, and the schedule itself is prepared as well."""
    chosen = script.mentions("num_processes", "split_batches", "step_scheduler")
    if "accelerate" not in script.imported_roots or chosen:
        return
    prepares = [call for call in script.method_calls("prepare") if "accelerator" in script.text(call.func)]
    for maker in (call for call in script.calls if _SCHEDULE.match(script.name(call))):
        name = target_of(script, maker)
        parts = {script.text(part) for item in arguments(maker) for part in script.sources(item)}
        early = [
            script.text(item)
            for prepare in prepares
            if script.follows(maker, prepare)
            for item in arguments(prepare)
            if f"len({script.text(item)})" in parts
        ]
        late = [p for p in prepares if script.follows(p, maker) and name in map(script.text, arguments(p))]
        if early and late:
            yield Hit(
                maker,
                f"len({early[0]}) is that of one process after prepare(), and the prepared {name} is stepped "
                "num_processes times a step: it runs that much too fast.",
                f"len({early[0]}) * accelerator.num_processes  # as its length",
            )


_WITH_BATCH_NORM = re.compile(
    r"torchvision\.models\.(resnet|resnext|wide_resnet|densenet|mobilenet|efficientnet|mnasnet|shufflenet|regnet"
    r"|googlenet|inception|vgg\d+_bn)"
)


@rule(
    "LS040",
    "A model with BatchNorm is wrapped in DDP and nothing says how its statistics are meant: per rank, or of all.",
)
def batchnorm_without_a_choice(script: Script) -> Iterator[Hit]:
    """Needs the BatchNorm, or a torchvision model that has it, in the same file."""
    wrapped = wraps(script, DDP)
    if not wrapped or script.mentions("sync_b", "syncb", "broadcast_buffers", "convert_sync"):
        return
    norms = script.torch_calls("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")
    found = [call for call in norms if ".nn." in script.name(call)]
    found += [call for call in script.calls if _WITH_BATCH_NORM.match(script.name(call))]
    if found:
        yield Hit(
            wrapped[0].call,
            f"the model has BatchNorm (line {found[0].lineno}): each rank normalises with the statistics of its own "
            "samples, so results depend on the number of ranks.",
            f"{wrapped[0].source} = torch.nn.SyncBatchNorm.convert_sync_batchnorm({wrapped[0].source})  # above, or "
            "say that it is meant: # lockstep: ignore[LS040]",
        )


@rule("LS041", "BatchNorm is converted to SyncBatchNorm after the model has been wrapped in DDP.")
def sync_batchnorm_after_wrapping(script: Script) -> Iterator[Hit]:
    """torch asks for the other order: DDP has noted the modules and buffers that are replaced here."""
    for call in script.torch_calls("convert_sync_batchnorm"):
        model = script.text(call.args[0]) if call.args else ""
        for wrap in wraps(script, DDP):
            names = (wrap.target, f"{wrap.target}.module") if wrap.target else ()
            if model in names and script.follows(call, wrap.call):
                yield Hit(
                    call,
                    f"DDP has wrapped {wrap.target} in line {wrap.call.lineno} and noted the buffers that this "
                    "replaces.",
                    f"{script.text(call).replace('.module', '')}  # above line {wrap.call.lineno}",
                )
                break


@rule("LS046", "DDP is given several devices: it takes one for each process, or none, and raises ValueError.")
def several_devices_in_ddp(script: Script) -> Iterator[Hit]:
    """A list of two or more, or one over a range; DataParallel is what takes several."""
    for wrap in wraps(script, DDP):
        devices = argument(wrap.call, "device_ids", 1)
        values = script.values(devices) if isinstance(devices, ast.Name) else [devices]
        literal = all(isinstance(value, ast.List | ast.Tuple) and len(value.elts) > 1 for value in values)
        counted = all(value is not None and _OVER_RANGE.match(script.text(value)) for value in values)
        if devices is not None and values and (literal or counted):
            yield Hit(
                devices,
                "DDP has one process for each device: ValueError, device_ids can only hold one.",
                'device_ids=[int(os.environ["LOCAL_RANK"])]  # and start a process for each device',
            )


@rule(
    "LS042",
    "The optimizer is made before FSDP wraps the model: it holds the old parameters and trains nothing.",
)
def optimizer_before_sharding(script: Script) -> Iterator[Hit]:
    """The optimizer must get the parameters of the very name that is wrapped below it."""
    makers = [call for call in optimizers(script) if call.args]
    for wrap in wraps(script, FSDP):
        later = [script.text(maker) for maker in makers if script.follows(maker, wrap.call)]
        again = any(f"{wrap.target}.parameters()" in text for text in later)
        for maker in makers if not again else ():
            given = script.text(maker.args[0])
            if given == f"{wrap.source}.parameters()" and script.follows(wrap.call, maker):
                yield Hit(
                    maker,
                    f"FSDP replaces these parameters in line {wrap.call.lineno}; the optimizer keeps the old ones.",
                    f"{script.text(maker)}  # below line {wrap.call.lineno}",
                )


@rule(
    "LS043",
    "The ranks start from different weights: they are seeded apart and nothing makes their weights equal.",
)
def ranks_start_apart(script: Script) -> Iterator[Hit]:
    """FSDP without sync_module_states, or gradients averaged by hand without a broadcast."""
    seeds = [call for call in script.torch_calls("manual_seed") if call.args]
    apart = [call for call in seeds if mentions_rank(script, call.args[0])]
    loaded = script.mentions("load_state", "from_pretrained")
    if not apart or len(apart) < len(seeds) or is_managed(script) or loaded:
        return
    for wrap in [] if script.mentions("sync_module_states", "meta") else wraps(script, FSDP):
        if argument(wrap.call, "sync_module_states") is None:
            yield Hit(
                wrap.call,
                f"the seed of line {apart[0].lineno} differs between ranks, so each shards weights of its own.",
                "FSDP(..., sync_module_states=True)",
            )
    if gradient_reductions(script) and not wraps(script, DDP, FSDP) and not script.mentions("broadcast"):
        yield Hit(
            apart[0],
            "the seed differs between ranks and the weights are never broadcast, so the ranks train different models.",
            "torch.distributed.broadcast(parameter.data, src=0)  # for every parameter, before training",
        )


@rule("LS044", "An attribute of the model is asked of its wrapper, which does not have it: AttributeError.")
def attribute_behind_wrapper(script: Script) -> Iterator[Hit]:
    """Only where the name is wrapped for certain, in the same function, and never set again below."""
    for wrap in wraps(script, DDP, DP):
        of_torch = script.name(wrap.call).startswith("torch.")
        if not (of_torch and wrap.certain and wrap.target.isidentifier()):
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


@rule("LS045", "The trained model is set to eval() and never back to train(): dropout and BatchNorm stay off.")
def eval_without_train(script: Script) -> Iterator[Hit]:
    """Only where eval() comes again and again in the loop that trains, and the file has no train() at all."""
    switched = script.method_calls("train") or script.mentions("set_grad_enabled", "set_training")
    if switched or is_managed(script):
        return
    trained = {model for maker in optimizers(script) for model in owners_of(script, maker)}
    for call in script.method_calls("eval"):
        model = script.owner(call)
        if model in trained and script.in_loop_with(call, script.method_calls("backward")):
            yield Hit(
                call,
                f"{model} is never set back to train(), so training goes on without dropout and with frozen BatchNorm.",
                f"{model}.train()  # after the evaluation",
            )


def _asks_wrapper(script: Script, node: ast.Attribute, wrap: Wrap) -> bool:
    """Returns True where an attribute is read of the wrapped name, and is neither torch's nor set there."""
    if not isinstance(node.ctx, ast.Load) or node.attr in MODULE_NAMES or node.attr.startswith("_"):
        return False
    asked_first = any(_ASKED_FIRST.search(script.text(test)) for test in script.tests_around(node))
    if asked_first or script.is_tried(node) or not script.follows(node, wrap.call):
        return False  # a condition or a ``try`` around the node could know better
    for name in script.names[wrap.target]:
        parent = script.parent(name)
        asked = parent if isinstance(parent, ast.Attribute) and parent.attr == node.attr else name
        is_set = not isinstance(name.ctx, ast.Load) or not isinstance(asked.ctx, ast.Load)
        if is_set and name.lineno > wrap.call.lineno and script.same_function(name, node):
            return False
    return True


@rule("LS071", "The driver that torch.linalg.lstsq takes by default on a CPU gives another solution in each call.")
def least_squares_driver(script: Script) -> Iterator[Hit]:
    """`torch.linalg.lstsq` without `driver=`, or with 'gelsy'. On a GPU there is another one, and nothing to do."""
    for call in script.torch_calls("lstsq"):
        driver = argument(call, "driver")
        if constant(driver) == "gelsy" if driver is not None else is_open(call):
            yield Hit(
                call,
                "on a CPU, driver 'gelsy' reads memory that torch has not set (pytorch issue 187411): each call gives "
                "a solution with other last bits, or another one where columns depend on each other.",
                "driver='gels', or driver='gelsd' where columns may depend on each other",
            )
