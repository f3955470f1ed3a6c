"""Parts of random programs one by one, and many at a time: the bits of ``single``, or a refusal on every rank."""

import dataclasses

import pytest
from tests.sameness.drawing import SINGLE, plain_program, text_of
from tests.sameness.parts import BLOCKS, DATA, LINES, LOSSES
from tests.sameness.programs import compare
from tests.sameness.trials import Layout, Worlds, run_trial

DDP = Layout("ddp 2", 2, {"strategy": "ddp"})
FSDP = Layout("fsdp 2", 2, {"strategy": "fsdp"})
SERVER = Layout("server 3/1", 3, {"strategy": "parameter_server", "parameter_server": {"servers": 1}})
SERVERS = Layout("server 3/2", 3, {"strategy": "parameter_server", "parameter_server": {"servers": 2}})
PIPELINE = Layout("pipeline 2", 2, {"strategy": "pipeline"})
SHARDED = Layout("fsdp x pipeline", 4, {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"})
LAYOUTS = (DDP, FSDP, SERVER, SERVERS, PIPELINE, SHARDED)

TWICE = "computed twice under the same keys, has other bits"
WRITES = "The forward pass writes into the parameter"
ABSENT = "is used outside of the forward pass of its module"
GRADIENT = "was asked for, and under strategy"
WHOLE_STATE = "no process holds the whole state of the optimizer"
EVERYWHERE = {
    "blocks": {
        **dict.fromkeys(
            ("mutable_default", "iterator", "context_variable", "clock", "entropy", "unseeded_generator"),
            TWICE,
        ),
        **dict.fromkeys(("own_numpy", "own_python"), "Random numbers were drawn from the attribute"),
        "sobol": TWICE,
        "swapped": WRITES,
        "scripted": "was compiled by torch.jit",
    },
    "lines": {"parametrized_after": "was replaced, added or taken out after run.prepare"},
    "loss": {"inner_backward": "must not call backward()", "huge": "The loss of step"},
    "data": {},
}
"""Refused in every layout, also on one device; the words of the sentence."""
SHARED = {
    "blocks": dict.fromkeys(("viewed_weight", "buffer_of_memory"), "share memory"),
    "lines": dict.fromkeys(
        (
            "step_pre_hook",
            "step_hook_after",
            "listed_norm",
            "foreach_scaled",
            "penalty_gradient",
            "gradient_cosine",
        ),
        GRADIENT,
    )
    | {"optimizer_copied": WHOLE_STATE},
    "loss": {},
    "data": {},
}
"""Refused where gradients and optimizers are shared out, under ``parameter_server`` too."""
CUT = {
    "blocks": {"state_hooks": "a hook adds or changes it"},
    "lines": {
        **dict.fromkeys(("new_gradient", "assigned_gradient"), GRADIENT),
        "outer_backward": "",
        **dict.fromkeys(
            ("centring_hook", "pickled_state", "saved_by_hand", "copied_model", "pruned_after", "moved"), ""
        ),
        **dict.fromkeys(("shared_memory", "compared", "sliced"), ABSENT),
    },
    "loss": dict.fromkeys(("named_penalty", "state_penalty"), ""),
    "data": {},
}
"""Refused where no process holds the model: fsdp, pipeline and both."""
TRANSFORMED = {"func_vjp": "calls torch.func"}
UNDER_FSDP = {
    "swapped": TWICE,
    **dict.fromkeys(("parametrized_after", "new_gradient", "penalty_gradient"), ABSENT),
}
"""Refused by another sentence than elsewhere."""
IN_STAGES = dict.fromkeys(("parametrized_after", "new_gradient", "penalty_gradient"), ABSENT)
"""The same for stages in several processes."""
CALLED = dict.fromkeys(("again", "self_taught"), "was called in the middle of run.backward")
"""Refused where the model is in several processes, of which each runs a part of a forward pass."""
MIXED = {"doubles": "stores values of one number type"}

NAMES = {
    "blocks": (
        *(
            "listed_weight",
            "partial_weight",
            "detached_weight",
            "captured_layer",
            "weak_owner",
            "deep_copied",
        ),
        *(
            "unpickled",
            "shared_buffer",
            "cached_mask",
            "cached_rotation",
            "fresh_generator",
            "seeded_numpy",
            "kept_state",
        ),
        *("forked", "threaded", "forward_mode", "func_jvp", "func_vjp", "functional_vhp", "jacobian"),
        *("ensemble", "inference", "inner_loop", "data_class", "delegating", "always_eval", "state_hooks"),
        *("hook_with_all", "backward_pre_hook", "old_weight_norm", "doubles", "integer_table", "many_dims"),
        *(
            "hyper",
            "transposed_weight",
            "exits_early",
            "attention_dropout",
            "drawn_in_place",
            "shuffled_order",
        ),
        *(
            "weight_by_pre_hook",
            "pooled_threads",
            "drawn_in_thread",
            "eval_and_back",
            "shallow_copy",
            "older_weights",
        ),
        *("beta_mixed", "normed_twice"),
        *("transposed_view", "raised", "compiled", "generator_of_layers", "set_attribute", "own_checkpoint"),
    ),
    "lines": (
        *("step_post_hook", "centring_hook", "stepped_with", "listed_parameters", "pickled_state", "moved"),
        *(
            "saved_by_hand",
            "copied_model",
            "gradient_zero",
            "gradient_finite",
            "new_gradient",
            "pruned_after",
        ),
        *("assigned_gradient", "reset_to_start", "thread_drawn", "reseeded_all", "kept_outputs", "compared"),
        *(
            "outer_backward",
            "default_dtype",
            "buffer_changed",
            "rates_by_size",
            "collected",
            "shared_memory",
            "sliced",
        ),
        *("swapped_rates", "steered", "rate_by_position", "gradient_cosine"),
    ),
    "loss": (
        *("output_gradient", "in_place_output", "again", "self_taught", "named_penalty", "state_penalty"),
        *("partial_loss", "loss_object", "drawn_targets", "mixed_rows", "clamped_gradient", "counted_rows"),
        "flipped_labels",
    ),
    "data": (
        *("fetched", "collated", "mixing_collate", "worker_number", "seeded_by_index", "cached"),
        *("shared_sample", "generated"),
    ),
}
"""Parts that one device trains."""
ALONE = ("forward_mode", "pruned_after")
"""Parts beside which others fail, on one device too."""


def program(field, *names):
    """A small program with some parts."""
    value = names if field == "lines" else names[0]
    if field == "blocks":
        value = ("linear", *names, "linear")
    recipe = (("global_batch", 8), ("micro_batches", 4), ("seed", 3))
    given = {"blocks": ("linear", "relu", "linear"), "width": 33, "recipe": recipe, "count": 20}
    return dataclasses.replace(plain_program(), **{**given, "optimizer": "momentum", field: value})


def refusal(field, name, layout):
    """The words of a refusal; None where the end is to be equal."""
    tables = [UNDER_FSDP] * (layout in (FSDP, SHARDED)) + [IN_STAGES] * (layout is PIPELINE)
    tables.append(EVERYWHERE[field])
    if layout not in (DDP, SINGLE):
        tables.append(SHARED[field])
    if layout in (FSDP, PIPELINE, SHARDED):
        tables.append(CUT[field])
    if layout in (PIPELINE, SHARDED):
        tables.append(CALLED)
    if layout is FSDP:
        tables.append(TRANSFORMED)
    if layout in (SERVER, SERVERS):
        tables.append(MIXED)
    return next((table[name] for table in tables if name in table), None)


def test_every_name_is_one_of_the_parts():
    known = {"blocks": BLOCKS, "lines": LINES, "loss": LOSSES, "data": DATA}
    for field, parts in known.items():
        assert {*NAMES[field], *EVERYWHERE[field], *SHARED[field], *CUT[field]} <= parts.keys()
    assert sum(len({*NAMES[field], *EVERYWHERE[field], *SHARED[field]}) for field in known) >= 100


def crowds(layout):
    """Programs of many parts that a layout trains."""
    for field in ("blocks", "lines"):
        names = [n for n in NAMES[field] if refusal(field, n, layout) is None and n not in ALONE]
        size = 13 if field == "blocks" else len(names)
        for start in range(0, len(names), size):
            yield program(field, *names[start : start + size])


@pytest.mark.parametrize(
    "layout",
    [pytest.param(each, marks=pytest.mark.slow) for each in (FSDP, DDP, SERVER)],
    ids=lambda layout: layout.name,
)
def test_many_parts_in_one_program_have_the_bits_of_one_device(layout):
    with Worlds() as worlds:
        for crowd in crowds(layout):
            text = text_of(crowd)
            reference = run_trial(text, [SINGLE], worlds=worlds)
            verdict = compare(reference, run_trial(text, [layout], worlds=worlds), layout)
            assert verdict.what == "equal", (reference.message, crowd, verdict.said, verdict.traceback)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: layout.name)
def test_each_part_has_the_bits_of_one_device_or_is_refused(layout):
    wrong = []
    with Worlds() as worlds:
        for field in NAMES:
            for name in {**dict.fromkeys(NAMES[field]), **EVERYWHERE[field], **SHARED[field]}:
                text, said = text_of(program(field, name)), refusal(field, name, layout)
                ended = run_trial(text, [layout], worlds=worlds)
                if said is None:
                    reference = run_trial(text, [SINGLE], worlds=worlds)
                    verdict = compare(reference, ended, layout)
                    if verdict.what != "equal":
                        wrong.append((name, verdict.what, verdict.said, reference.message))
                elif ended.how != "refused" or said not in ended.message:
                    wrong.append((name, ended.how, ended.message))
    assert not wrong, "\n".join(map(str, wrong))


LOST = (
    *("norm_tracked", "empty_tuples", "property_state", "globals_set", "globals_default", "context_state"),
    *("loss_module_with_class_value", "callback_with_class_value", "sent_to_generator", "matched_state", "bandit"),
    *("values_of_actions", "rate_by_layer"),
)
"""Lines of the loop with a state that no checkpoint holds."""
KEPT = (
    *("defaults_changed", "ema_in_optimizer", "rate_of_layers", "sam_in_state", "curriculum_by_epoch", "cached_rate"),
    "window_of_model",
)
"""Lines whose state is in checkpoints, or follows from the step."""


@pytest.mark.parametrize(
    "names",
    [(LOST + KEPT)[::3], pytest.param([n for n in LOST + KEPT if n not in (LOST + KEPT)[::3]], marks=pytest.mark.slow)],
    ids=["some", "the others"],
)
def test_a_resumed_run_goes_on_as_without_the_stop_or_says_what_it_has_lost(names):
    wrong = []
    with Worlds() as worlds:
        for name in names:
            text = text_of(dataclasses.replace(program("lines", name), epochs=2))
            reference = run_trial(text, [SINGLE], worlds=worlds)
            ended = run_trial(text, [dataclasses.replace(SINGLE, stop=1), SINGLE], worlds=worlds)
            verdict = compare(reference, ended, SINGLE)
            if verdict.what != ("equal" if name in KEPT else "warned"):
                wrong.append((name, verdict.what, verdict.said, reference.message))
    assert not wrong, "\n".join(map(str, wrong))
