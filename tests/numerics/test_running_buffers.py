"""Running statistics are the tree mean over a step's micro-batches, or their old bits."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from lockstep.core.summation_tree import TreeStack
from lockstep.errors import ConfigError
from lockstep.numerics.running_buffers import RunningBuffers, has_batch_norm


def micro_batches(leaves, *shape):
    generator = torch.Generator().manual_seed(leaves)
    return [3 * torch.randn(*shape, generator=generator) + 1 for _ in range(leaves)]


def run_step(running, forward, parts):
    """A step as one rank runs it: values and signals of each micro-batch, then the mean."""
    running.begin_step()
    stack, advanced = TreeStack(len(parts), torch.add), 0
    for k, part in enumerate(parts):
        running.begin_micro_batch()
        forward(part)
        values, signals = running.take()
        stack.push_leaf(k, values)
        advanced = advanced + signals
    (total,) = stack.take().values()
    running.finish_step(total, len(parts), advanced.double())


def by_hand(values):
    """The mean over 1 to 8 micro-batches, in the tree's order, written out."""
    v = values
    total = {
        1: lambda: v[0],
        2: lambda: v[0] + v[1],
        3: lambda: (v[0] + v[1]) + v[2],
        4: lambda: (v[0] + v[1]) + (v[2] + v[3]),
        5: lambda: ((v[0] + v[1]) + (v[2] + v[3])) + v[4],
        7: lambda: ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + v[6]),
        8: lambda: ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7])),
    }[len(v)]()
    return total / len(v)


def state_of(model):
    return {name: value.clone() for name, value in model.state_dict().items()}


def assert_equal(first, second):
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("leaves", [1, 2, 3, 4, 5, 7, 8])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_new_statistics_are_the_tree_mean_of_what_each_micro_batch_makes_of_the_old_ones(leaves, momentum):
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6, momentum=momentum))
    running = RunningBuffers(model)
    for _ in range(2):
        parts, alone = micro_batches(leaves, 10, 4), []
        for part in parts:
            single = copy.deepcopy(model)
            single(part)
            alone.append(single[1])
        before = int(model[1].num_batches_tracked)
        run_step(running, model, parts)
        assert torch.equal(model[1].running_mean, by_hand([norm.running_mean for norm in alone]))
        assert torch.equal(model[1].running_var, by_hand([norm.running_var for norm in alone]))
        assert int(model[1].num_batches_tracked) == before + 1


@pytest.mark.parametrize("leaves", [1, 3, 5, 7])
def test_statistics_that_nobody_used_keep_their_bits(leaves):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.norms = nn.ModuleList([nn.BatchNorm1d(50) for _ in range(3)])
            self.norms[1].eval()
            self.register_buffer("ema", torch.rand(50))

        def forward(self, x):
            return self.norms[1](self.norms[0](x))

    model = Model()
    with torch.no_grad():
        for norm in model.norms:
            norm.running_mean.uniform_(-1, 1)
            norm.running_var.uniform_(0.5, 2)
    running, before = RunningBuffers(model, ["ema"]), state_of(model)
    for _ in range(10):
        run_step(running, model, micro_batches(leaves, 4, 50))
    after = state_of(model)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert changed == {f"norms.0.{part}" for part in ("running_mean", "running_var", "num_batches_tracked")}


def test_statistics_used_in_some_micro_batches_only_count_the_old_ones_for_the_others():
    model = nn.BatchNorm1d(3)
    running = RunningBuffers(model)
    parts = micro_batches(3, 4, 3)
    single = copy.deepcopy(model)
    single(parts[1])
    old = model.running_mean.clone()
    run_step(running, lambda part: model(part) if part is parts[1] else None, parts)
    assert torch.equal(model.running_mean, by_hand([old, single.running_mean, old]))
    assert int(model.num_batches_tracked) == 1


def test_a_layer_called_twice_advances_its_counter_once():
    model = nn.BatchNorm1d(3)
    run_step(RunningBuffers(model), lambda part: model(model(part)), micro_batches(4, 5, 3))
    assert int(model.num_batches_tracked) == 1


def test_instance_norm_s_statistics_are_averaged_although_it_never_counts():
    model = nn.InstanceNorm1d(3, track_running_stats=True)
    running, parts = RunningBuffers(model), micro_batches(3, 2, 3, 8)
    alone = []
    for part in parts:
        single = copy.deepcopy(model)
        single(part)
        alone.append(single)
    run_step(running, model, parts)
    assert torch.equal(model.running_mean, by_hand([single.running_mean for single in alone]))
    assert not torch.equal(model.running_mean, torch.zeros(3))


def test_a_batch_norm_with_a_forward_of_its_own_is_averaged():
    class Quiet(nn.BatchNorm1d):
        """Updates the statistics without counting, as published variants do."""

        def forward(self, x):
            return nn.functional.batch_norm(x, self.running_mean, self.running_var, training=True, momentum=0.5)

    model = nn.Sequential(nn.BatchNorm1d(3), Quiet(3))
    run_step(RunningBuffers(model), model, micro_batches(3, 4, 3))
    assert not torch.equal(model[1].running_var, torch.ones(3))
    assert int(model[1].num_batches_tracked) == 0


def test_batch_norm_without_a_counter_or_without_statistics():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm1d(3, track_running_stats=False))
    model[0].num_batches_tracked = None
    run_step(RunningBuffers(model), model, micro_batches(3, 4, 3))
    assert not torch.equal(model[0].running_mean, torch.zeros(3))
    assert model[1].running_mean is None


class Moving(nn.Module):
    """Keeps a mean of its own; in place, or by giving itself another tensor."""

    def __init__(self, assign):
        super().__init__()
        self.assign = assign
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mean", torch.zeros(3))

    def forward(self, x):
        new = 0.9 * self.mean + 0.1 * (x * self.scale).mean(0)
        if self.assign:
            self.mean = new
        else:
            self.mean.copy_(new.detach())
        return x * self.scale


@pytest.mark.parametrize("assign", [False, True])
def test_a_declared_buffer_is_averaged_however_it_is_set(assign):
    model, parts = nn.Sequential(Moving(assign)), micro_batches(5, 4, 3)
    with torch.no_grad():
        model[0].mean.fill_(1 / 3)
    buffer = model[0].mean
    running = RunningBuffers(model, ["*.mean"])
    expected = by_hand([0.9 * torch.full((3,), 1 / 3) + 0.1 * part.mean(0) for part in parts])
    run_step(running, model, parts)
    assert torch.equal(model[0].mean, expected)
    assert model[0].mean is buffer and not buffer.requires_grad


def test_a_tensor_given_between_steps_is_the_old_value_of_the_next():
    model = nn.Sequential(nn.BatchNorm1d(3))
    running = RunningBuffers(model)
    model.load_state_dict({**model.state_dict(), "0.running_mean": torch.full((3,), 7.0)}, assign=True)
    other = copy.deepcopy(model)
    part = micro_batches(1, 4, 3)
    run_step(running, model, part)
    other(part[0])
    assert_equal(state_of(model), state_of(other))


def test_patterns_that_match_nothing_and_types_that_do_not_fit_are_refused():
    model = nn.Sequential(nn.BatchNorm1d(3))
    with pytest.raises(ConfigError, match=r"running_buffers: no buffer of the model matches 'ema\.\*'"):
        RunningBuffers(model, ["ema.*"])
    with pytest.raises(ConfigError, match=r"'0.running_mean' is torch.bfloat16"):
        RunningBuffers(model.to(torch.bfloat16))
    with pytest.raises(ConfigError, match=r"'1.running_mean' is torch.float32, but .* all float32 or all float64"):
        RunningBuffers(nn.Sequential(nn.BatchNorm1d(3).double(), nn.BatchNorm1d(3)))
    assert RunningBuffers(nn.Sequential(nn.BatchNorm1d(3)), ["*running_mean", "0.*"]).numel == 2 * 16


class Keeps(nn.Module):
    def __init__(self, first, change):
        super().__init__()
        self.register_buffer("kept", first)
        self.change = change

    def forward(self, x):
        self.kept = self.change(self.kept, x)
        return x


@pytest.mark.parametrize(
    ("first", "change", "told"),
    [
        (torch.zeros(3), lambda kept, x: x.mean(), r"buffer 'kept' was float32 \[3\] and is float32 \[\] now"),
        (torch.zeros(1), lambda kept, x: kept.resize_(3), r"was float32 \[1\] and is float32 \[3\] now"),
        (torch.zeros((), dtype=torch.int64), lambda kept, x: kept + 0.5, r"was int64 \[\] and is float32 \[\] now"),
    ],
)
def test_a_running_buffer_of_another_shape_or_type_is_refused(first, change, told):
    """Numbers were broadcast and fractions cut off, where plain PyTorch has another buffer from then on."""
    model = Keeps(first.clone(), change)
    running = RunningBuffers(model, ["kept"])
    running.remember_others()
    with pytest.raises(ConfigError, match=told):
        run_step(running, model, micro_batches(2, 4, 3))


def test_a_running_buffer_of_one_number_may_lose_its_dimension():
    model, parts = Keeps(torch.zeros(1), lambda kept, x: kept.sum() + x.mean()), micro_batches(2, 4, 3)
    running = RunningBuffers(model, ["kept"])
    running.remember_others()
    run_step(running, model, parts)
    assert torch.allclose(model.kept, torch.cat(parts).mean()[None])


def test_a_model_of_float64_keeps_its_statistics_in_float64():
    model, parts = nn.BatchNorm1d(3).double(), [part.double() for part in micro_batches(2, 8, 3)]
    running = RunningBuffers(model)
    run_step(running, model, parts)
    assert running.dtype == torch.float64
    means = [0.1 * part.mean(0) for part in parts]
    assert torch.allclose(model.running_mean, (means[0] + means[1]) / 2, rtol=1e-14)


def test_a_changed_buffer_that_was_not_declared_is_refused_by_name():
    for assign in (False, True):
        model = nn.Sequential(nn.BatchNorm1d(3), Moving(assign))
        running = RunningBuffers(model)
        running.remember_others()
        run_step(running, model, micro_batches(2, 4, 3))
        with pytest.raises(ConfigError, match=r"changes the buffer '1\.mean'.*running_buffers=\['1\.mean'\]"):
            running.refuse_changed_others()


class KeptInBackward(torch.autograd.Function):
    """Writes the rows of its input to a table in the backward pass, as memory banks do."""

    @staticmethod
    def forward(ctx, x, table):
        ctx.save_for_backward(x, table)
        return x @ table.T

    @staticmethod
    def backward(ctx, gradient):
        x, table = ctx.saved_tensors
        table[: len(x)] = x
        return gradient @ table, None


def test_a_declared_buffer_that_the_backward_pass_changes_is_refused():
    bank = nn.BatchNorm1d(3)
    bank.register_buffer("table", torch.randn(5, 3))
    running = RunningBuffers(bank, ["table"])

    def step(function):
        running.begin_step()
        running.remember_others()
        running.begin_micro_batch()
        loss = function(bank(torch.randn(2, 3)), bank.table).sum()
        values, signals = running.take()
        loss.backward()
        running.finish_step(values, 1, signals.double())
        running.refuse_changed_others()

    step(lambda x, table: x @ table.T)
    with pytest.raises(ConfigError, match="The backward pass changes the buffer 'table'"):
        step(KeptInBackward.apply)


def test_all_changed_buffers_are_named_at_once():
    """A flow with BatchNorm layers of its own was refused once for each of their buffers."""
    model = nn.Sequential(Moving(assign=False), nn.Identity(), Moving(assign=True))
    running = RunningBuffers(model)
    running.remember_others()
    run_step(running, model, micro_batches(2, 4, 3))
    with pytest.raises(
        ConfigError, match=r"buffer '0\.mean'.* It changes '2\.mean', too; running_buffers takes patterns"
    ):
        running.refuse_changed_others()


def test_a_mark_of_an_initialisation_is_told_when_to_be_set():
    """As that of ActNorm; the variational strategies of GPyTorch have one, too."""
    model = nn.BatchNorm1d(3)
    model.register_buffer("is_initialised", torch.tensor(0.0))
    running = RunningBuffers(model)
    running.remember_others()
    model.is_initialised.fill_(1)
    with pytest.raises(ConfigError, match=r"'is_initialised'.* call the model once before run.prepare"):
        running.refuse_changed_others()


def test_buffers_that_stay_are_not_refused():
    model = nn.Sequential(nn.BatchNorm1d(3), Moving(assign=False))
    running = RunningBuffers(model, ["1.mean"])
    model.register_buffer("table", torch.arange(4), persistent=False)
    running.remember_others()
    run_step(running, model, micro_batches(2, 4, 3))
    running.refuse_changed_others()


def test_a_layer_under_two_names_counts_under_the_first():
    model = nn.Sequential(nn.BatchNorm1d(3), nn.Identity())
    model.add_module("again", model[0])
    model[1].mean_too = model[0]
    running = RunningBuffers(model)
    running.remember_others()
    run_step(running, model, micro_batches(2, 4, 3))
    running.refuse_changed_others()


def test_activation_checkpointing_updates_once():
    """Backward runs the layers again; what that leaves in the buffers is thrown away."""
    plain = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), Moving(assign=True))
    saving = copy.deepcopy(plain)
    parts = micro_batches(3, 4, 3)
    run_step(RunningBuffers(plain, ["2.mean"]), lambda part: plain(part).sum().backward(), parts)
    running = RunningBuffers(saving, ["2.mean"])
    running.begin_step()
    total, advanced = torch.zeros(running.numel), 0
    for part in parts:
        running.begin_micro_batch()
        output = checkpoint(saving, part, use_reentrant=False)
        values, signals = running.take()
        output.sum().backward()
        total, advanced = total + values, advanced + signals
    running.finish_step(total, 3, advanced.double())
    assert_equal(state_of(saving), state_of(plain))
    assert int(saving[1].num_batches_tracked) == 1


def test_state_dict_and_load_state_dict_work_after_the_buffers_were_joined():
    model = nn.Sequential(nn.Conv2d(1, 2, 1), nn.BatchNorm2d(2), nn.BatchNorm2d(2))
    other = copy.deepcopy(model)
    running = RunningBuffers(model)
    other(torch.randn(4, 1, 2, 2))
    model.load_state_dict(other.state_dict())
    assert_equal(model.state_dict(), other.state_dict())
    parts = micro_batches(1, 4, 1, 2, 2)
    run_step(running, model, parts)
    other(parts[0])
    assert_equal(model.state_dict(), other.state_dict())
    assert model[1].running_mean.shape == (2,) and model[1].num_batches_tracked.shape == ()


def test_joining_changes_no_value_and_keeps_the_buffers_apart():
    model = nn.Sequential(*[nn.BatchNorm1d(size) for size in (1, 3, 17)])
    with torch.no_grad():
        for number, buffer in enumerate(model.buffers()):
            buffer.fill_(number + 1)
    before = state_of(model)
    RunningBuffers(model)
    assert_equal(state_of(model), before)
    model[1].reset_running_stats()
    assert torch.equal(model[2].running_mean, before["2.running_mean"])


def test_a_model_without_running_buffers_has_nothing_to_do():
    model = nn.Linear(3, 3)
    running = RunningBuffers(model)
    assert (running.numel, running.counters) == (0, 0)
    run_step(running, model, micro_batches(2, 2, 3))


def test_batch_norm_needs_two_rows_and_instance_norm_does_not():
    assert has_batch_norm(nn.Sequential(nn.Sequential(nn.BatchNorm2d(1))))
    assert not has_batch_norm(nn.Sequential(nn.InstanceNorm2d(1), nn.GroupNorm(1, 1)))


def test_a_running_buffer_must_be_saved():
    """A resumed run would go on from its first value."""
    model = nn.Sequential(nn.Linear(2, 2), nn.Module())
    model[1].register_buffer("mean", torch.zeros(2), persistent=False)
    with pytest.raises(ConfigError, match=r"running_buffers has '1.mean', which was registered with persistent=False"):
        RunningBuffers(model, ["1.*"])
    model[1].register_buffer("mean", torch.zeros(2))
    assert RunningBuffers(model, ["1.*"]).numel == 16, "64 bytes"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_running_buffers_begin_as_in_memory_of_their_own(dtype):
    """Under pipeline, products with a buffer of odd size had other bits: a stage has only some of the buffers."""
    model = nn.Sequential(nn.BatchNorm1d(33), nn.BatchNorm1d(3), nn.BatchNorm1d(16)).to(dtype)
    for layer in model:
        layer.running_mean.normal_()
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    buffers = RunningBuffers(model)
    averaged = {name: buffer for name, buffer in model.named_buffers() if "batches" not in name}
    assert all(buffer.data_ptr() % 64 == 0 for buffer in averaged.values())
    assert all(torch.equal(buffer, before[name]) for name, buffer in averaged.items())
    assert buffers.numel == {torch.float32: 2 * (48 + 16 + 16), torch.float64: 2 * (40 + 8 + 16)}[dtype]
