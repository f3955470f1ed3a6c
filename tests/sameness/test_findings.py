"""Programs that the generator found to end otherwise once, made small."""

import dataclasses
import functools

import pytest
from tests.sameness import trials
from tests.sameness.drawing import SINGLE, plain_program, text_of
from tests.sameness.programs import compare, judge
from tests.sameness.trials import Layout, Worlds

FSDP = Layout("fsdp 2", 2, {"strategy": "fsdp"})
DDP = Layout("ddp 2", 2, {"strategy": "ddp"})
SERVER = Layout("server 3/1", 3, {"strategy": "parameter_server", "parameter_server": {"servers": 1}})
SERVERS = Layout("server 3/2", 3, {"strategy": "parameter_server", "parameter_server": {"servers": 2}})
PIPELINE = Layout("pipeline 2", 2, {"strategy": "pipeline"})
WORLDS = Worlds()
run_trial = functools.partial(trials.run_trial, worlds=WORLDS)
PLAIN_RECIPE = (("global_batch", 4), ("micro_batches", 2))
ODD = (("global_batch", 6), ("micro_batches", 3))
K8 = (("global_batch", 16), ("micro_batches", 8))
FP16 = (("global_batch", 4), ("micro_batches", 2), ("precision", "fp16"))


@pytest.fixture(scope="module", autouse=True)
def ranks_end():
    """Kills the ranks of this file, which serve one program after the other."""
    with WORLDS:
        yield


@pytest.mark.parametrize(
    ("parts", "layout", "what"),
    [
        pytest.param(
            {"optimizer": "fused_adagrad", "recipe": FP16},
            FSDP,
            "equal",
            id="fp16, fused Adagrad",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"shape": "record", "recipe": ODD, "count": 12},
            FSDP,
            "equal",
            id="dataclass output, spare micro-batch",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"blocks": ("complex",), "recipe": FP16},
            FSDP,
            "refused",
            id="fp16, complex parameter",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"end": "zeros", "recipe": K8, "count": 24},
            DDP,
            "equal",
            id="gradients kept as zeros, ragged step",
        ),
        pytest.param(
            {"lines": ("dropped_gradient", "names"), "end": "by_hand", "blocks": ("unused", "linear")},
            SERVER,
            "equal",
            id="gradients cleared and counted on workers",
        ),
        pytest.param(
            {"lines": ("draw",), "optimizer": "noisy_sgd"},
            SERVER,
            "equal",
            id="drawn after a step that draws",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {
                "kind": "i",
                "blocks": ("conv",),
                "optimizer": "adafactor",
                "recipe": (*PLAIN_RECIPE, ("channels_last", True)),
            },
            SERVERS,
            "equal",
            id="Adafactor, channels-last weights",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"lines": ("assigned_gradient", "clip")},
            SERVER,
            "equal",
            id="clipped after p.grad = ...",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"lines": ("taken_out",), "group": "by_dims"},
            SERVER,
            "refused",
            id="a group taken out later",
            marks=pytest.mark.slow,
        ),
        pytest.param({"shape": "shared_body"}, PIPELINE, "equal", id="a module that has two names, called twice"),
        pytest.param(
            {"blocks": ("frozen",), "optimizer": "noisy_sgd"},
            SERVER,
            "refused",
            id="noise on frozen parameters",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"lines": ("centring_hook",), "blocks": ("squares",), "width": 8},
            SERVERS,
            "equal",
            id="a hook after the step, of a weight that two servers share",
        ),
        pytest.param(
            {"lines": ("gradient_zero",), "recipe": (("global_batch", 8), ("micro_batches", 4)), "count": 20},
            PIPELINE,
            "equal",
            id="a loop that looks at gradients of other stages",
        ),
        pytest.param(
            {"kind": "t", "loss": "per_token", "blocks": ("own_sequence",), "lines": ("tied_ends",)},
            PIPELINE,
            "equal",
            id="a weight of two layers that run in another order than they are made in",
        ),
        pytest.param({"blocks": ("cached_mask",)}, DDP, "equal", id="a static method with a cache"),
        pytest.param({"lines": ("clip_torch",)}, SERVER, "refused", id="torch's clip_grad_norm_ on workers"),
        pytest.param({"lines": ("set_buffer",)}, FSDP, "refused", id="a buffer registered late, fsdp"),
        pytest.param(
            {"lines": ("set_buffer",)},
            SERVER,
            "equal",
            id="a buffer registered late, server",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_it_ends_as_it_should(parts, layout, what):
    program = dataclasses.replace(plain_program(), **parts)
    verdict = judge(program, [layout])
    assert verdict.what == what, (verdict.said, verdict.traceback)


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([SINGLE, SINGLE], id="single"),
        pytest.param([SERVER, FSDP], id="server, fsdp", marks=pytest.mark.slow),
    ],
)
def test_gradients_that_are_kept_as_zeros_are_kept_over_a_restart(phases):
    """Momentum goes on to move a parameter with a gradient of zeros that the step did not use."""
    parts = {"blocks": ("experts",), "end": "zeros", "optimizer": "momentum", "recipe": K8, "epochs": 2}
    program = dataclasses.replace(plain_program(), **parts, count=32)
    verdict = judge(program, phases)
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


@pytest.mark.parametrize(
    ("factor", "said"),
    [
        ("weights.sum()", "the global variable 'weights' is not the same on all of them"),
        ("(1 + int(os.environ['RANK']))", "the forward pass or the loss depends on the process"),
    ],
)
def test_a_loss_that_is_another_one_on_each_rank_is_refused(factor, said):
    """Each rank drew class weights for itself before the run was opened, which no comparison of replicas can find."""
    text = text_of(plain_program()).replace("(out, target)", f"(out, target) * {factor}")
    ended = run_trial(text.replace("def loss_fn", "weights = torch.rand(C)\ndef loss_fn"), [DDP])
    assert ended.how == "refused" and said in ended.message, ended


LEFT_BY_STEPS = """
state = {"shift": torch.zeros(())}

def loss_fn(output, target):
    state["next"] = output.detach().mean()
    return F.cross_entropy(output, target) + state["shift"]
"""
HARD_SAMPLES = """
kept, limits = [], {"low": -1.0}

def loss_fn(output, target):
    losses = F.cross_entropy(output, target, reduction="none")
    kept.append(float(losses.detach().mean()))
    return losses * (losses.detach() > limits["low"])
"""
KEPT_WEIGHTS = """
weights = torch.ones(C)
sampler = torch.utils.data.WeightedRandomSampler(torch.ones(N).double(), N)
data = DataLoader(data, sampler=sampler)

def loss_fn(output, target):
    losses = F.cross_entropy(output, target, reduction="none")
    weights.index_add_(0, target, 1e-5 * losses.detach())
    return losses
"""


@pytest.mark.parametrize(
    ("helpers", "line", "said"),
    [
        pytest.param(LEFT_BY_STEPS, 'state["shift"] = state["next"]', "'state'['shift']", id="a state"),
        pytest.param(
            LEFT_BY_STEPS, 'if steps == 2: state["shift"] = state["next"]', "'state'['shift']", id="by epochs"
        ),
        pytest.param(
            HARD_SAMPLES,
            'limits["low"] = -1.0 if steps < 2 else kept[0] - 10',  # too low for the samples that are compared
            r"reads the global variable 'limits'['low'], which was the same on all ranks before",
            id="a threshold",
        ),
        pytest.param(KEPT_WEIGHTS, "sampler.weights = weights[targets].double()", "choice of samples 1", id="weights"),
    ],
)
def test_what_a_loss_leaves_on_its_rank_is_refused_where_the_loop_gives_it_back(helpers, line, said):
    """Truncated backpropagation by hand; a threshold by epochs; weights too alike to draw other samples."""
    program = dataclasses.replace(plain_program(), recipe=K8, count=32, epochs=2)
    text = text_of(program).replace("def train(", f"{helpers}\n\ndef train(")
    text = text.replace("            steps += 1\n", f"            steps += 1\n            {line}\n")
    ended = run_trial(text, [DDP])
    assert ended.how == "refused" and said in ended.message, ended


def test_replicas_that_drift_are_named_where_a_rehearsal_finds_them():
    program = dataclasses.replace(plain_program(), recipe=K8, count=32, epochs=2)
    line = "if steps == 2 and run.world.rank: model[0].weight.data.add_(0.1)"
    text = text_of(program).replace("            steps += 1\n", f"            steps += 1\n            {line}\n")
    ended = run_trial(text, [DDP])
    assert ended.how == "refused" and "the ranks hold different bits in 1 of 6 tensors (0.weight)" in ended.message


@pytest.mark.parametrize(
    "line, part",
    [("trained = model.append(nn.Tanh())", "3"), ("trained[2].bias = trained[0].bias", "2.bias")],
)
def test_what_is_added_or_tied_later_is_refused_where_replicas_were_copied(line, part):
    text = text_of(plain_program()).replace("    trained = model\n", f"    trained = model\n    {line}\n")
    ended = run_trial(text, [Layout("dp 2", 1, {"strategy": "dp", "dp": {"replicas": 2}})])
    assert ended.how == "refused" and f"The part '{part}' of the model was replaced" in ended.message, ended


CALLS_MODEL = """
def loss_fn(output, target):
    loss = F.cross_entropy(output, target)
    with torch.no_grad():
        other = trained(inputs[:2]) if target[0] == 0 else output
    return loss + trained(inputs[:3]).square().mean() + F.mse_loss(output.mean(), other.mean())

def accuracy(output, target):
    if target[0] == 0:
        trained(inputs[:2])
    return output.sum(-1) - trained(inputs[:2]).mean()
"""


@pytest.mark.parametrize("ranks", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_losses_and_metrics_may_call_the_model_on_some_ranks_only(ranks):
    """A rank that asked whether the loss is a mean called the model more often, and the other went on without it."""
    program = dataclasses.replace(plain_program(), recipe=ODD, count=14, blocks=("dropout", "linear"))
    text = text_of(program).replace("def keep(", CALLS_MODEL + "\ndef keep(")
    assert text.count("def loss_fn") == 2
    phases = [Layout(f"fsdp {ranks}", ranks, {"strategy": "fsdp"})]
    verdict = compare(run_trial(text, [SINGLE]), run_trial(text, phases), phases[0])
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


@pytest.mark.parametrize(
    "layout", [pytest.param(DDP, marks=pytest.mark.slow), FSDP, pytest.param(SERVER, marks=pytest.mark.slow)]
)
def test_a_backward_pass_without_a_step_leaves_the_loss_scale_right(layout):
    """The second backward pass of sharpness-aware minimisation raised that gradients had been divided already."""
    text = text_of(dataclasses.replace(plain_program(), recipe=FP16, count=16))
    again = "optimizer.zero_grad(); run.backward(batch, loss_fn); optimizer.step()"
    text = text.replace("optimizer.step()", again)
    verdict = compare(run_trial(text, [SINGLE]), run_trial(text, [layout]), layout)
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([SINGLE, SINGLE], id="single", marks=pytest.mark.slow),
        pytest.param([SERVER, FSDP], id="server, fsdp", marks=pytest.mark.slow),
        pytest.param([FSDP, PIPELINE], id="fsdp, pipeline"),
        pytest.param([PIPELINE, SERVERS], id="pipeline, servers", marks=pytest.mark.slow),
    ],
)
def test_gradients_that_no_optimizer_clears_are_kept_over_a_restart(phases):
    """They add up from step to step, and a clip over all parameters counts them."""
    program = dataclasses.replace(plain_program(), lines=("clip",), epochs=2, count=12, blocks=("linear",) * 2)
    text = text_of(program).replace("SGD(model.parameters()", "SGD(list(model.parameters())[2:]")
    assert "[2:]" in text
    verdict = compare(run_trial(text, [SINGLE]), run_trial(text, phases), phases[-1])
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


PRESENT = "found[f'{at} present %s'] = [n for n, p in model.named_parameters() if p.grad is not None]"


@pytest.mark.parametrize(
    "layout",
    [
        PIPELINE,
        pytest.param(
            Layout("fsdp x pipeline", 4, {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"}),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_parameters_that_a_step_did_not_use_have_no_gradient_in_any_process(layout):
    """Those of other stages seemed to have one once there had been a step."""
    program = dataclasses.replace(plain_program(), blocks=("unused", "linear", "unused"), recipe=K8, count=32)
    text = text_of(program).replace("optimizer.step()", f"{PRESENT % 'before'}; optimizer.step()")
    text = text.replace("optimizer.zero_grad()", f"optimizer.zero_grad(); {PRESENT % 'after'}")
    assert text.count("present") == 2
    verdict = compare(run_trial(text, [SINGLE]), run_trial(text, [layout]), layout)
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


@pytest.mark.parametrize("view", ["", ".detach()", ".view(-1)[1:]"])
def test_a_gradient_that_the_loop_keeps_has_its_values_at_later_steps(view):
    """Gradients were in memory that the next step used again."""
    kept = f"globals().setdefault('kept', []).append(next(model.parameters()).grad{view}); optimizer.step()"
    text = text_of(dataclasses.replace(plain_program(), count=80)).replace("optimizer.step()", kept)
    text = text.replace("steps += 1", "found[f'{at} kept'] = [float(each.sum()) for each in kept]")
    verdict = compare(run_trial(text, [SINGLE]), run_trial(text, [DDP]), DDP)
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


SHALLOW = """
class Shallow(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(D, D)

    def forward(self, x):
        return copy.copy(self.inner)(x) + self.inner(x)

"""


@pytest.mark.parametrize("layout", [DDP, FSDP, PIPELINE])
def test_a_shallow_copy_of_a_module_may_be_called(layout):
    """Its weight is the model's own; it was refused as a parameter that nobody sums."""
    text = text_of(plain_program()).replace("nn.Linear(D, D)", "Shallow()")
    text = text.replace("data = Tensor", SHALLOW + "data = Tensor")
    verdict = compare(run_trial(text, [SINGLE]), run_trial(text, [layout]), layout)
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


def test_a_copy_of_a_module_may_have_weights_that_are_computed():
    """As an inner step of ``higher`` makes them; it was refused as a parameter that nobody sums."""
    computed = SHALLOW.replace(
        "        return copy.copy(self.inner)(x)",
        "        fast = copy.copy(self.inner)\n"
        "        fast._parameters = {name: each * 0.9 for name, each in self.inner.named_parameters()}\n"
        "        return fast(x)",
    )
    text = text_of(plain_program()).replace("nn.Linear(D, D)", "Shallow()")
    text = text.replace("data = Tensor", computed + "data = Tensor")
    verdict = compare(run_trial(text, [SINGLE]), run_trial(text, [DDP]), DDP)
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


PACKED = """
RECIPE = {"global_batch": 8, "micro_batches": 4, "seed": 3, "threads": 1}
EPOCHS = 1
import torch
from torch import nn
from torch.nn.utils.rnn import pack_sequence


class Sequences(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, row):
        return torch.randn(2 + row % 5, 6, generator=torch.Generator().manual_seed(row)), row % 4


class Reading(nn.GRU):
    def forward(self, rows):
        return super().forward(rows)[1][-1]


def collate(samples):
    return pack_sequence([each for each, _ in samples], enforce_sorted=False), torch.tensor([n for _, n in samples])


def train(run, epochs):
    torch.manual_seed(5)
    model = nn.Sequential(Reading(6, 8), nn.Linear(8, 4))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    found = {}
    for batch in run.batches(torch.utils.data.DataLoader(Sequences(), collate_fn=collate)):
        found[f"s{batch.plan.step} loss"] = float(run.backward(batch, nn.functional.cross_entropy)).hex()
        optimizer.step()
    return {**found, "fingerprint": run.fingerprint()}
"""


def test_packed_sequences_are_batches_on_several_processes():
    """It ended in an AssertionError of torch, where the ranks exchanged a micro-batch."""
    assert compare(run_trial(PACKED, [SINGLE]), run_trial(PACKED, [DDP]), DDP).what == "equal"


@pytest.mark.parametrize(
    ("parts", "what"),
    [
        ({"loss": "hooked"}, "equal"),
        ({"blocks": ("always_eval",)}, "equal"),
        ({"lines": ("weight_hook_between",)}, "refused"),
    ],
    ids=["features kept by a hook", "a method by the name of a function", "a gradient's hook of a step"],
)
def test_a_resumed_program_is_refused_where_the_stop_has_lost_a_hook_only(parts, what):
    program = dataclasses.replace(plain_program(), count=20, epochs=2, **parts)
    phases = [dataclasses.replace(SINGLE, stop=2), SINGLE]
    verdict = compare(run_trial(text_of(program), [SINGLE]), run_trial(text_of(program), phases), SINGLE)
    assert verdict.what == what, (verdict.said, verdict.traceback)
