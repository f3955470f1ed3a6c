"""The first difference of two traces and its cause."""

import pytest
from tests.verify.traces import changed, put, scaled, trace

from lockstep.verify import Cause, compare
from lockstep.verify.diagnosis import diagnose

CASES = {
    "other samples": (put("samples", "1", "other"), Cause.DATA_ORDER, "micro-batch 1"),
    "other inputs": (put("inputs", "0", "other"), Cause.AUGMENTATION, "micro-batch 0"),
    "another loss of a micro-batch": (put("losses", 1, (9.0).hex()), Cause.FORWARD, "loss of micro-batch 1"),
    "the last bits of a loss": (put("losses", 1, (2.0000001).hex()), Cause.ROUNDING, "loss of micro-batch 1"),
    "another mean": (lambda step: setattr(step, "loss", (1.0).hex()), Cause.LOSS_WEIGHTING, "loss"),
    "half of every gradient": (scaled(0.5), Cause.GRADIENT_SCALE, "'w'"),
    "one gradient": (scaled(0.7, ["c"]), Cause.LEFT_OUT, "'c'"),
    "the last bits of gradients": (scaled(1.0 + 1e-7), Cause.REDUCTION_ORDER, "'w'"),
    "a gradient that is missing": (lambda step: step.gradients.pop("d"), Cause.LEFT_OUT, "'d'"),
    "a buffer": (put("buffers", "mean", "other"), Cause.BUFFERS, "'mean'"),
    "optimizer state": (
        put("optimizer", "0|w|momentum_buffer", "other"),
        Cause.UPDATE,
        "optimizer state '0|w|mo",
    ),
    "a parameter": (put("parameters", "b", "other"), Cause.UPDATE, "'b'"),
    "a hyperparameter": (put("settings", "lr", "0.3"), Cause.OPTIMIZER, "lr"),
    "ranks apart": (lambda step: step.apart.append("w"), Cause.REPLICAS, "'w'"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_first_thing_that_differs_has_caused_the_rest(case):
    change, cause, tensor = CASES[case]
    found = diagnose(trace(), changed(change))
    assert (found.cause, found.step) == (cause, 1)
    assert found.tensor.startswith(tensor)


def test_a_gradient_that_is_rounding_beside_the_others_is_not_one_that_was_left_out():
    """A gradient of a bias before BatchNorm is zero but for rounding, and was reported as left out of the sum."""

    def with_bias(norm):
        return lambda step: (scaled(1.0 + 1e-7)(step), put("gradients", "c", (str(norm), norm))(step))

    reference = changed(with_bias(2e-9))
    assert diagnose(reference, changed(with_bias(3e-9))).cause is Cause.REDUCTION_ORDER
    assert diagnose(reference, changed(with_bias(3e-3))).cause is Cause.LEFT_OUT


def test_equal_traces_have_no_difference():
    assert diagnose(trace(), trace()) is None
    assert compare(trace(), trace(), 0.0).reached == "A"


@pytest.mark.parametrize("steps", [2, 4])
def test_a_run_of_another_number_of_steps_is_not_equal(steps):
    """A loop over ``epochs // world_size`` had equal bits "after each of 8 steps", of which it had made 4."""
    found = diagnose(trace(), trace(steps))
    assert (found.cause, found.step) == (Cause.LENGTH, min(steps, 3))
    assert found.detail == f"it has {steps} steps, and the reference 3"
    assert diagnose(trace().since(1), trace(steps).since(1)).detail == found.detail


def test_a_step_that_one_run_leaves_out_is_no_other_order_of_the_data():
    """It was called one, since the steps after it were compared with those before."""
    skipping = trace(4)
    del skipping.steps[1]
    found = diagnose(trace(4), skipping)
    assert (found.cause, found.step, found.detail) == (Cause.NOT_MADE, 1, "it goes on with step 2")
    assert diagnose(skipping, trace(4)).detail == "the reference goes on with step 2"
    assert compare(trace(4), skipping, 0.0).reached == "-"
    assert diagnose(skipping, skipping) is None


def test_parameters_that_began_differently_come_first():
    other = changed(put("samples", "0", "other"))
    other.start["b"] = "other"
    found = diagnose(trace(), other)
    assert (found.cause, found.step, found.tensor) == (Cause.START, -1, "'b'")
    assert any("above torch.manual_seed" in each for each in found.possible)
    resumed = other.since(1)
    resumed.start["b"] = "other"
    found = diagnose(trace().since(1), resumed)
    assert (found.cause, found.step, found.tensor) == (Cause.RESUMED, 1, "'b'")


def other_loss(step):
    step.losses[0] = (9.0).hex()


def test_random_numbers_are_possible_where_the_model_draws_and_not_elsewhere():
    for draws in (True, False):
        found = diagnose(trace(draws=draws), changed(other_loss))
        assert found.cause is Cause.FORWARD
        assert any("random numbers" in each for each in found.possible) is draws


def test_equal_outputs_blame_the_loss_and_kept_numbers_the_model():
    reference, other = trace(), changed(other_loss)
    for run in (reference, other):
        for step in run.steps:
            step.outputs, step.kept = {"0": "same"}, {"a": {"0": "2"}, "b": {"0": "tensor 1"}}
    assert diagnose(reference, other).cause is Cause.LOSS
    for step in other.steps:
        step.outputs = {"0": "other"}
    found = diagnose(reference, other)
    assert found.cause is Cause.OUTPUT and found.possible and "'a'" not in found.text
    other.steps[1].kept["b"] = {"1": "tensor 2"}
    found = diagnose(reference, other)
    assert found.cause is Cause.OUTPUT and "'b' is tensor 2 on rank 1" in found.detail
    other.steps[1].kept["a"] = {"0": "2", "1": "1"}
    found = diagnose(reference, other)
    assert found.cause is Cause.HIDDEN_STATE and "'a' is 1 on rank 1 after the step, 2 in" in found.detail
    assert not found.possible
    other.steps[1].evaluating = {"drop": [1]}
    assert diagnose(reference, other).cause is Cause.MODE


def test_the_last_bits_of_a_loss_are_rounding_only_where_nothing_else_explains_them():
    for level, cause in (("A", Cause.HIDDEN_STATE), ("B", Cause.ROUNDING)):
        other = changed(put("losses", 1, (2.0000001).hex()), level=level)
        other.steps[1].kept = {"a": {"0": "1"}}
        assert diagnose(trace(), other).cause is cause


def test_a_factor_of_the_number_of_ranks_has_its_own_name():
    assert diagnose(trace(), changed(put("settings", "lr", "0.2"))).cause is Cause.LEARNING_RATE
    resumed = changed(put("settings", "lr", "0.2")).since(1)
    assert diagnose(trace().since(1), resumed).cause is Cause.OPTIMIZER
    assert diagnose(trace(), changed(put("settings", "lr", "0.3"))).cause is Cause.OPTIMIZER
    assert diagnose(trace(), changed(scaled(2, ["c"]))).cause is Cause.REDUCED_TWICE
    assert diagnose(trace(), changed(scaled(3, ["c"]))).cause is Cause.LEFT_OUT


@pytest.mark.parametrize("change", [scaled(0.5), scaled(0.7, ["c"])], ids=["all", "one"])
def test_gradients_of_the_first_step_after_a_stop_are_not_put_down_to_their_sum(change):
    """A coefficient that only a backward pass reads, and a stop had lost, was called a fault of the reduction."""
    found = diagnose(trace().since(1), changed(change).since(1))
    assert found.cause is Cause.GRADIENTS
    assert "only the backward pass reads" in found.text


def test_an_operator_is_named_where_the_reference_does_not_repeat_itself():
    other = changed(put("losses", 0, (9.0).hex()))
    found = diagnose(trace(draws=True), other, repeats=False)
    assert found.cause is Cause.OPERATOR
    assert found.possible[0] == "the order of a set of strings, which differs from run to run"
    other = changed(put("losses", 0, (4.0000001).hex()), at=0)
    found = diagnose(trace(), other, repeats=False)
    assert (found.cause, found.possible) == (Cause.OPERATOR, ("an operator without a fixed order",))


def test_another_recipe_is_named_before_the_samples_that_follow_from_it():
    context = trace().context
    other = changed(put("samples", "0", "other"), context={**context, "micro_batches": "4"})
    found = diagnose(trace(context={**context, "micro_batches": "2"}), other)
    assert (found.cause, found.step, found.detail) == (Cause.RECIPE, -1, "micro_batches: 2 and 4")


@pytest.mark.parametrize(("key", "cause"), [("threads", Cause.THREADS), ("optimizers", Cause.OPTIMIZER)])
def test_another_context_explains_other_numbers_but_not_other_samples(key, cause):
    other = changed(scaled(1.0 + 1e-7))
    other.context[key] = "2"
    assert diagnose(trace(), other).cause is cause
    samples = changed(put("samples", "0", "other"))
    samples.context[key] = "2"
    assert diagnose(trace(), samples).cause is Cause.DATA_ORDER


@pytest.mark.parametrize(
    ("change", "cause"),
    [(put("losses", 1, (2.02).hex()), Cause.ROUNDING), (scaled(1.01), Cause.REDUCTION_ORDER)],
)
def test_a_coarse_type_rounds_further(change, cause):
    assert diagnose(trace(unit=2.0**-7), changed(change)).cause is cause
    assert diagnose(trace(), changed(change)).cause is not cause
