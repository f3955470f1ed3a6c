"""Changes that a loop made before a stop are there after it, on every layout, or the run is refused."""

import dataclasses

import pytest
from tests.sameness.drawing import SINGLE
from tests.sameness.programs import compare
from tests.sameness.trials import Layout, Worlds, run_trial

BEGIN = """
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

RECIPE = {"global_batch": 16, "micro_batches": 8, "seed": 3, "threads": 1}
EPOCHS = 3
inputs = torch.randn(40, 6, generator=torch.Generator().manual_seed(1))
data = TensorDataset(inputs, torch.arange(40) % 4)


def layers(*more):
    torch.manual_seed(5)
    ends = [nn.Linear(6, 40), nn.ReLU()], [nn.Linear(40, 40), nn.Tanh(), nn.Linear(40, 4)]
    return nn.Sequential(*ends[0], *more, *ends[1])


def ended(model, step):
    pass
"""
TRAIN = """

def train(run, epochs):
    global found
    found = {}
    model = make()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for epoch in run.epochs(epochs):
        for batch in run.batches(data):
            step = run.position.step
            found[f"e{epoch}s{step} loss"] = float(run.backward(batch, F.cross_entropy)).hex()
            optimizer.step()
            optimizer.zero_grad()
            ended(model, step)
        found[f"e{epoch} evaluated"] = run.evaluate(data, F.cross_entropy)
    found["fingerprint"] = run.fingerprint()
    return found
"""
FROZEN = """
def make():
    return layers(nn.BatchNorm1d(40))
def ended(model, step):
    if step == 1:
        model[0].requires_grad_(False)
        model[2].eval()
"""
ATTRIBUTES = """
class Changing(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("temperature", torch.tensor(1.0), persistent=False)
        self.mode, self.scales, self.bound, self.gains = "plain", (1.0, 2), None, torch.ones(40)
    def forward(self, x):
        x = x / self.temperature * self.scales[0] * self.gains
        x = x if self.bound is None else x.clamp(-self.bound, self.bound)
        return x.tanh() if self.mode == "tanh" else x
def make():
    return layers(Changing(), nn.Dropout(0.1), Changing())
def ended(model, step):
    model[2].temperature.mul_(0.9)
    model[4].gains.mul_(1.01)
    if step == 1:
        model[2].mode, model[4].scales, model[4].bound = "tanh", (0.5, 3), 0.7
"""
HOLDERS = """
import numpy as np
class Schedule:
    def __init__(self):
        self.scale, self.tables = 1.0, {"a": torch.ones(40), 2: [np.ones(40, np.float32)]}
class Changing(nn.Module):
    def __init__(self, schedule):
        super().__init__()
        self.schedule, self.large, self.queue = schedule, torch.ones(200, 40), [torch.ones(40), torch.ones(40)]
        self.teacher = [nn.Linear(40, 40)]
    def forward(self, x):
        with torch.no_grad():
            teacher = self.teacher[0](x.detach()).mean()
        x = x * self.schedule.scale * self.schedule.tables["a"] * torch.from_numpy(self.schedule.tables[2][0])
        return x * self.large[3] * self.queue[0] + teacher
def make():
    torch.manual_seed(5)
    schedule = Schedule()
    return layers(Changing(schedule), nn.Dropout(0.1), Changing(schedule))
def ended(model, step):
    held = model[2].schedule
    held.scale *= 0.9
    held.tables["a"] *= 0.95
    held.tables[2][0] *= np.float32(1.05)
    model[4].large[3] *= 0.9
    model[4].queue.pop(0)
    model[4].queue.append(torch.full((40,), 1.0 + step))
    with torch.no_grad():
        model[2].teacher[0].weight.mul_(0.9)
"""
EXTRA_STATES = """
class Keeping(nn.Module):
    def __init__(self):
        super().__init__()
        self.held = {"scale": torch.ones(40), "steps": 0}
    def forward(self, x):
        return x * self.held["scale"]
    def get_extra_state(self):
        return dict(self.held)
    def set_extra_state(self, state):
        self.held = dict(state)
def make():
    return layers(Keeping(), nn.Dropout(0.1))
def ended(model, step):
    model[2].held["scale"] *= 0.9
    model[2].held["steps"] += 1
    found[f"e.s{step} held"] = model[2].held["steps"], float(model[2].held["scale"].sum())
"""
IDLE = """
from typing import NamedTuple
class Drawn(NamedTuple):
    shape: torch.Size
    gains: torch.Tensor
class Augmenting(nn.Module):
    def __init__(self):
        super().__init__()
        self.drawn, self.shape = [], None
    def forward(self, x):
        self.drawn, self.shape = [Drawn(x.shape, torch.rand(len(x), 1))], x.shape
        return x * self.drawn[0].gains
class Noise:
    def __init__(self):
        self.angle, self.boxes = 0.0, {}
    def __call__(self, x):
        self.angle, self.boxes["last"] = float(torch.rand(())), (1, int(torch.randint(9, ())))
        return x + self.angle
class Rows(torch.utils.data.Dataset):
    def __init__(self, transform):
        self.transform = transform
    def __len__(self):
        return len(inputs)
    def __getitem__(self, index):
        return self.transform(inputs[index]), index % 4
data = Rows(Noise())
def make():
    return layers(Augmenting())
"""
PROGRAMS = {"freezing": FROZEN, "attributes": ATTRIBUTES, "holders": HOLDERS, "extra states": EXTRA_STATES}
DDP = Layout("ddp 2", 2, {"strategy": "ddp"})
WORLDS = Worlds()
FSDP = Layout("fsdp 3", 3, {"strategy": "fsdp"})
PIPELINE = Layout("pipeline 2", 2, {"strategy": "pipeline"})
SERVERS = Layout("server 3/2", 3, {"strategy": "parameter_server", "parameter_server": {"servers": 2}})
BOTH = Layout("fsdp x pipeline", 4, {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"})


@pytest.fixture(scope="module", autouse=True)
def ranks_end():
    """Kills the ranks of this file, which serve one program after the other."""
    with WORLDS:
        yield


def stopped(layout, step):
    return dataclasses.replace(layout, stop=step)


RESTARTS = [
    pytest.param([stopped(SINGLE, 3), SINGLE], id="single"),
    pytest.param([stopped(PIPELINE, 2), FSDP], id="pipeline, fsdp", marks=pytest.mark.slow),
    pytest.param([stopped(DDP, 1), SERVERS], id="ddp, servers", marks=pytest.mark.slow),
    pytest.param([stopped(BOTH, 5), PIPELINE], id="fsdp x pipeline, pipeline", marks=pytest.mark.slow),
    pytest.param([stopped(SERVERS, 4), BOTH], id="servers, fsdp x pipeline", marks=pytest.mark.slow),
    pytest.param([stopped(FSDP, 6), DDP], id="fsdp, ddp", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("phases", RESTARTS)
def test_what_the_loop_has_changed_in_modules_is_kept_over_a_stop(phases):
    """Layers frozen and put in evaluation mode, texts, tuples and tensors of modules, tensors in extra states."""
    for name, program in PROGRAMS.items():
        text = BEGIN + program + TRAIN
        expected = run_trial(text, [SINGLE], 40, WORLDS)
        verdict = compare(expected, run_trial(text, phases, 40, WORLDS), phases[-1])
        assert verdict.what == "equal", (name, verdict.said, verdict.traceback)


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([stopped(SINGLE, 4), DDP], id="single, ddp"),
        pytest.param([stopped(DDP, 1), FSDP], id="ddp, fsdp", marks=pytest.mark.slow),
    ],
)
def test_what_transforms_and_layers_note_of_their_last_call_refuses_no_resume(phases):
    """Nothing depends on the last draw of an augmentation, in objects that it makes anew."""
    text = BEGIN + IDLE + TRAIN
    expected = run_trial(text, [SINGLE], 40, WORLDS)
    verdict = compare(expected, run_trial(text, phases, 40, WORLDS), phases[-1])
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


SPLIT = """
def make():
    return layers()
def split(seed):
    order = torch.randperm(40, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.Subset(data, order[:30].tolist())
"""
OTHER_SPLIT = "set_ = split(int(run.position.step > 0))\n    for epoch in run.epochs"


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([stopped(SINGLE, 0), SINGLE], id="single"),
        pytest.param([stopped(DDP, 2), FSDP], id="ddp, fsdp", marks=pytest.mark.slow),
    ],
)
def test_other_samples_than_those_of_the_epoch_are_refused_after_a_stop(phases):
    """A split without a seed, or the other one of two sets that a loop goes through in turn."""
    train = TRAIN.replace("for epoch in run.epochs", OTHER_SPLIT).replace("batches(data)", "batches(set_)")
    ended = run_trial(BEGIN + SPLIT + train, phases)
    assert ended.how == "refused" and "choice of samples 1 (Subset)" in ended.message, ended
    assert "not what the checkpoint was reading in this epoch" in ended.message


LEVELS = """
class Levels(torch.utils.data.Dataset):
    level = 1.0
    def __len__(self):
        return len(inputs)
    def __getitem__(self, index):
        return inputs[index] * self.level, index % 4
data = Levels()
def make():
    return layers()
"""


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([stopped(SINGLE, 4), SINGLE], id="single"),
        pytest.param([stopped(DDP, 6), FSDP], id="ddp, fsdp", marks=pytest.mark.slow),
    ],
)
def test_a_data_set_may_have_another_loader_and_level_in_each_epoch(phases):
    """The samples of the first epoch were taken for those that the checkpoint was reading."""
    train = TRAIN.replace("        for batch", "        data.level = 1.0 + epoch\n        for batch", 1)
    text = BEGIN + LEVELS + train.replace("batches(data)", "batches(torch.utils.data.DataLoader(data, 16))")
    found = run_trial(text, phases, 40, WORLDS)
    verdict = compare(run_trial(text, [SINGLE], 40, WORLDS), found, phases[-1])
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


TWO_LOOPS = """
def train(run, epochs):
    global found
    found, model = {}, layers(nn.BatchNorm1d(40))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for upto in (1, epochs):
        if upto > 1:
            BETWEEN
        for epoch in run.epochs(upto):
            if epoch == 1 and not run.position.done:
                START
            for batch in run.batches(data):
                at = f"e{epoch}s{run.position.step}"
                found[f"{at} loss"] = float(run.backward(batch, F.cross_entropy)).hex()
                optimizer.step()
                optimizer.zero_grad()
            found[f"e{epoch} evaluated"] = run.evaluate(data, F.cross_entropy)
    found["fingerprint"] = run.fingerprint()
    return found
"""
ACTIONS = {
    "half of the rate": "optimizer.param_groups[0]['lr'] *= 0.5",
    "no momentum": "optimizer.state.clear()",
    "smaller weights": "for p in model.parameters(): p.data.mul_(0.9)",
}


@pytest.mark.parametrize("phases", RESTARTS)
@pytest.mark.parametrize("action", ACTIONS.values(), ids=ACTIONS)
def test_a_second_loop_over_epochs_begins_as_it_would_without_the_stop(phases, action):
    """Where its start is under the number of its first epoch; between the loops it is refused or named."""
    for between, start in (("pass", action), (action, "pass")):
        text = BEGIN + TWO_LOOPS.replace("BETWEEN", between).replace("START", start)
        expected = run_trial(text, [SINGLE], 40, WORLDS)
        verdict = compare(expected, run_trial(text, phases, 40, WORLDS), phases[-1])
        is_once = between == "pass" or phases[0].stop < 2  # it stops a step later
        wanted = {"equal"} if is_once else {"refused", "warned"}
        assert verdict.what in wanted, (between, start, verdict.what, verdict.said, verdict.traceback)


@pytest.mark.parametrize("how", ["shuffle", "drop_last"])
def test_samples_that_are_read_in_another_way_are_refused_after_a_stop(how):
    """The run went on with other batches, in silence."""
    train = TRAIN.replace("batches(data)", f"batches(data, {how}=run.position.step == 0)")
    ended = run_trial(BEGIN + "def make():\n    return layers()\n" + train, [stopped(SINGLE, 0), SINGLE])
    assert ended.how == "refused", ended
    assert f"{how}=False of the data set is not what the checkpoint was reading" in ended.message


SAVING = """
def train(run, epochs):
    model = layers()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    average = torch.optim.swa_utils.AveragedModel(model)
    model, optimizer, scheduler, average = run.prepare(model, optimizer, scheduler, average)
    for epoch in run.epochs(epochs):
        for batch in run.batches(data):
            step = run.position.step
            run.backward(batch, F.cross_entropy)
            optimizer.step()
            BODY
        EPOCH
    return {"fingerprint": run.fingerprint()}
"""
LATE = {
    "optimizer.zero_grad()": "the gradients of optimizer 0, as by zero_grad()",
    "scheduler.step()": "scheduler 0 (StepLR)",
    "average.update_parameters(model)": "modules beside the model",
    "run.extra['best'] = step": "run.extra",
    "run.backward(batch, F.cross_entropy)": "gradients, by run.backward",
    "if step == 1: break": "the end of the loop over its batches, by break",
}


def saved(body, epoch, layout=SINGLE):
    """How a program ends that saves in the body of a step, or of an epoch."""
    text = BEGIN + SAVING.replace("BODY", body.replace("; if", "\n            if")).replace("EPOCH", epoch)
    return run_trial(text, [layout, SINGLE], 40, WORLDS)


QUICK = ("optimizer.zero_grad()", "scheduler.step()")


@pytest.mark.parametrize("line", [pytest.param(each, marks=() if each in QUICK else pytest.mark.slow) for each in LATE])
def test_what_a_loop_does_after_a_save_in_its_body_is_refused(line):
    """A resumed run does not do it again: it stepped with gradients that had been cleared, or another learning rate."""
    ended = saved(f"{'optimizer.zero_grad(); ' * ('zero' not in line)}run.save(); {line}", "pass")
    assert ended.how == "refused" and "came before the end of the body of the loop over batches" in ended.message
    assert LATE[line] in ended.message, ended.message


def test_what_a_loop_does_after_a_save_at_the_end_of_an_epoch_is_refused():
    ended = saved("optimizer.zero_grad()", "run.save(); scheduler.step()")
    assert ended.how == "refused" and "end of the body of the loop over epochs" in ended.message, ended
    assert "changed scheduler 0 (StepLR). A resumed run" in ended.message


EVALUATED = "run.evaluate(data, F.cross_entropy); run.evaluate(data, F.cross_entropy, model=average)"


@pytest.mark.parametrize(
    "layout",
    [SINGLE, *(pytest.param(each, marks=pytest.mark.slow) for each in (FSDP, PIPELINE, SERVERS, BOTH))],
)
def test_a_loop_may_evaluate_and_print_after_a_save(layout):
    ended = saved(f"optimizer.zero_grad(); run.save(); {EVALUATED}", f"run.save(); {EVALUATED}", layout)
    assert ended.how == "ran", ended


PREPARED = {
    "model.load_state_dict(layers(nn.BatchNorm1d(40)).state_dict())": "parameters",
    "model[0].requires_grad_(False)": "which parameters are frozen",
    "model[0].requires_grad_(False); model[0].requires_grad_(True)": "",
}


@pytest.mark.parametrize("line", PREPARED)
def test_what_a_script_does_after_prepare_does_not_undo_what_was_restored(line):
    """Weights that it loads there were those that the resumed run went on with."""
    train = TRAIN.replace("    for epoch", f"    {line}\n    for epoch", 1)
    thawed = "        if epoch == 1 and not run.position.done: model.requires_grad_(True)\n        for batch"
    text = BEGIN + STARTING.replace("START", "pass") + train.replace("        for batch", thawed, 1)
    expected = run_trial(text, [SINGLE], 40, WORLDS)
    found = run_trial(text, [stopped(SINGLE, 4), SINGLE], 40, WORLDS)
    if PREPARED[line]:
        assert found.how == "refused", found
        assert f"After run.prepare the script has changed {PREPARED[line]}" in found.message, found.message
    else:
        assert compare(expected, found, SINGLE).what == "equal", found


STARTING = """
def make():
    return layers(nn.BatchNorm1d(40))
def started(model, optimizer, epoch):
    START
"""
STARTS = {
    "for group in optimizer.param_groups: group['lr'] *= 0.5": "lr of optimizer 0, group 0",
    "optimizer.state.clear()": "the state of optimizer 0",
    "[each.data.mul_(0.99) for each in model.parameters()]": "parameters",
    "model.train()": "which modules are in evaluation mode",
    "for group in optimizer.param_groups: group['lr'] = 0.1 / (1 + epoch)": "",
    "model.train(); model[2].eval()": "",
}


@pytest.mark.parametrize(
    "start", [pytest.param(each, marks=() if "lr" in each else pytest.mark.slow) for each in STARTS]
)
def test_what_a_loop_does_at_the_start_of_an_epoch_is_not_done_twice(start):
    """It enters the epoch again after a stop: a rate that was multiplied there was multiplied once more."""
    train = TRAIN.replace("        for batch", "        started(model, optimizer, epoch)\n        for batch", 1)
    text = BEGIN + STARTING.replace("START", start) + train
    if "model.train()" in start:
        text = text.replace("            ended(model, step)", "            model[2].eval()")
    expected = run_trial(text, [SINGLE], 40, WORLDS)
    found = run_trial(text, [stopped(SINGLE, 3), DDP], 40, WORLDS)
    if STARTS[start]:
        assert found.how == "refused" and "Do it under 'if not run.position.done:'" in found.message, found
        assert f"has changed {STARTS[start]}" in found.message, found.message
    else:
        assert compare(expected, found, DDP).what == "equal", found


BETWEEN = {
    "for group in optimizer.param_groups: group['lr'] *= 0.5": "lr of optimizer 0, group 0",
    "seen = 0.0": "seen (0.0, was ",
    "place = rng.random()": "",
}


@pytest.mark.parametrize("start", BETWEEN)
def test_what_a_loop_does_before_the_first_of_its_batches_counts_as_the_start_of_the_epoch(start):
    """``bar = tqdm(run.batches(data)); total = 0.0; for batch in bar``: such a sum began anew without a word."""
    made = ["batches = run.batches(data)", "seen = place = 0.0", start, "for batch in batches:"]
    steps = "".join(f"        {line}\n" for line in made)
    train = TRAIN.replace("        for batch in run.batches(data):\n", steps)
    train = train.replace("    for epoch", "    rng = torch.Generator().manual_seed(4)\n    for epoch", 1)
    noted = "            seen += float(model[0].bias.sum())\n            found[f'e{epoch}s{step} seen'] = seen\n"
    drawn = "            found[f'e{epoch}s{step} drawn'] = place + float(torch.rand((), generator=rng))\n"
    train = train.replace("            ended(model, step)\n", noted if "seen" in start else drawn)
    text = BEGIN + FROZEN + train.replace("rng.random()", "float(torch.rand((), generator=rng))")
    expected = run_trial(text, [SINGLE], 40, WORLDS)
    found = run_trial(text, [stopped(SINGLE, 3), DDP], 40, WORLDS)
    if "lr" in start:
        assert found.how == "refused" and f"has changed {BETWEEN[start]}" in found.message, found
    elif BETWEEN[start]:
        assert any(BETWEEN[start] in each for each in found.warnings), found
    else:
        assert compare(expected, found, DDP).what == "equal", found


def test_a_sum_that_begins_there_is_named_after_a_stop_by_return_too():
    """The code after the call of ``run.batches`` sets it before it is read: it was not in the checkpoint."""
    steps = "        batches = run.batches(data)\n        seen = 0.0\n        for batch in batches:\n"
    train = TRAIN.replace("        for batch in run.batches(data):\n", steps)
    left = (
        "            seen += 1.0\n            if step == 1:\n                run.save()\n                return found\n"
    )
    train = train.replace("            ended(model, step)\n", left)
    text = BEGIN + FROZEN + train.replace("] = run.evaluate(data, F.cross_entropy)", "] = seen")
    found = run_trial(text, [SINGLE, SINGLE], 40, WORLDS)
    assert found.how == "ran" and any("seen (0.0, was 2.0)" in each for each in found.warnings), found


MOVED = """
def train(run, epochs):
    global found
    found = {}
    model = layers()
    groups = [{"params": list(model[:2].parameters())}, {"params": list(model[2:].parameters())}]
    model, optimizer = run.prepare(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9))
    for epoch in run.epochs(epochs):
        for batch in run.batches(data):
            found[f"e{epoch}s{run.position.step} loss"] = float(run.backward(batch, F.cross_entropy)).hex()
            optimizer.step()
            optimizer.zero_grad()
            if run.position.step == 1:
                MOVE
        optimizer.param_groups[0]["lr"] *= 0.5
    found["fingerprint"] = run.fingerprint()
    return found
"""


@pytest.mark.parametrize("step", [0, 4])
@pytest.mark.parametrize(
    "move",
    [
        "optimizer.param_groups.reverse()",
        'optimizer.param_groups[0]["params"].append(optimizer.param_groups[1]["params"].pop())',
    ],
)
def test_groups_that_the_loop_has_made_of_other_parameters_are_not_those_of_a_resumed_run(move, step):
    text = BEGIN + MOVED.replace("MOVE", move)
    found = run_trial(text, [stopped(SINGLE, step), SINGLE], 40, WORLDS)
    if step:
        assert found.how == "refused" and "have other parameters or another order" in found.message, found
    else:
        assert compare(run_trial(text, [SINGLE], 40, WORLDS), found, SINGLE).what == "equal", found


ADDED = """
def train(run, epochs):
    global found
    found = {}
    model = layers()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model[2:].parameters(), lr=0.01))
    for epoch in run.epochs(epochs):
        if epoch == 1GUARD:
            optimizer.add_param_group({"params": model[0].parameters(), "lr": 0.05})
        for batch in run.batches(data):
            found[f"e{epoch}s{run.position.step} loss"] = float(run.backward(batch, F.cross_entropy)).hex()
            optimizer.step()
            optimizer.zero_grad()
    found["groups"] = [(len(group["params"]), group["lr"]) for group in optimizer.param_groups]
    found["fingerprint"] = run.fingerprint()
    return found
"""
GUARD = " and not run.position.done"


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([stopped(SINGLE, 4), FSDP], id="single, fsdp"),
        pytest.param([stopped(FSDP, 4), PIPELINE], id="fsdp, pipeline", marks=pytest.mark.slow),
        pytest.param([stopped(PIPELINE, 4), stopped(DDP, 7), SERVERS], id="three", marks=pytest.mark.slow),
    ],
)
def test_groups_that_the_loop_has_added_to_an_optimizer_are_there_after_a_stop(phases):
    """The checkpoint was refused as one about other parameters."""
    text = BEGIN + ADDED.replace("GUARD", GUARD)
    expected = run_trial(text, [SINGLE], 40, WORLDS)
    found = run_trial(text, phases, 40, WORLDS)
    assert compare(expected, found, phases[-1]).what == "equal", found
    again = run_trial(BEGIN + ADDED.replace("GUARD", ""), phases, 40, WORLDS)
    assert again.how == "refused" and "under if not run.position.done" in again.message, again


OWN_STEP = """
momenta = {}
def of_parameter(p):
    return momenta.setdefault(p, torch.zeros_like(p))
class Own(torch.optim.Optimizer):
    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.05})
    @torch.no_grad()
    def step(self, closure=None):
        for p in (each for group in self.param_groups for each in group["params"] if each.grad is not None):
            MOMENTUM
            p.add_(m.mul_(0.9).add_(p.grad), alpha=-0.05 * getattr(p, "lr_scale", 1.0))
def make():
    return layers()
def ended(model, step):
    for p in model[0].parameters():
        p.lr_scale = 0.9 ** (step + 1)
"""
MOMENTA = {
    "state": "m = self.state[p].setdefault('m', torch.zeros_like(p))",
    "on the parameter": "p.m = m = getattr(p, 'm', torch.zeros_like(p))",
    "in a global": "m = of_parameter(p)",
}


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([stopped(FSDP, 4), FSDP], id="fsdp"),
        pytest.param([stopped(SERVERS, 4), SERVERS], id="servers", marks=pytest.mark.slow),
        pytest.param([stopped(PIPELINE, 4), FSDP], id="pipeline, fsdp", marks=pytest.mark.slow),
        pytest.param([stopped(DDP, 4), FSDP], id="ddp, fsdp", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("where", MOMENTA)
def test_what_an_optimizer_keeps_by_parameter_is_there_after_a_stop_or_refuses_it(where, phases):
    """It was lost without a word, on the parameter under every strategy; so were rates that the loop had set there."""
    train = TRAIN.replace("torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)", "Own(model.parameters())")
    text = BEGIN + OWN_STEP.replace("MOMENTUM", MOMENTA[where]) + train
    expected = run_trial(text, [SINGLE], 40, WORLDS)
    assert compare(expected, run_trial(text, phases[-1:], 40, WORLDS), phases[-1]).what == "equal"
    found = run_trial(text, phases, 40, WORLDS)
    if where == "state":
        assert compare(expected, found, phases[-1]).what == "equal", found
    elif where == "in a global" and phases[0].name == DDP.name:
        assert any("momenta (0 entries, was 6 entries)" in words for words in found.warnings), found
    elif phases[0].name == DDP.name:
        assert "the attribute 'm' of the parameter 'weight' of 0" in found.message, found
    else:
        name = "momenta[... 0]" if where == "in a global" else "'m' of parameter 0"
        assert f"does not hold {name} of Own" in found.message, found


OF_A_STAGE = """
class Loss:
    first, cache = None, {}
    def __call__(self, output, target):
        if len(output) not in self.cache:
            self.cache[len(output)] = torch.linspace(0.5, 1.0, 4)
        if FIRST and self.first is None:
            self.first = float(output.detach().mean())
        return F.cross_entropy((output - (self.first or 0.0)) * self.cache[len(output)], target, reduction="none")
loss = Loss()
def make():
    return layers()
"""


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("layout", [PIPELINE, pytest.param(SERVERS, marks=pytest.mark.slow)])
def test_what_only_the_process_keeps_that_computes_the_loss_is_named_after_a_stop(layout, first):
    """It was lost without a word; and a cache, which that process fills again, refused the run for the others."""
    text = BEGIN + OF_A_STAGE.replace("FIRST", str(first)) + TRAIN.replace("batch, F.cross_entropy", "batch, loss")
    expected = run_trial(text, [SINGLE], 40, WORLDS)
    for phases in ([stopped(layout, 4), SINGLE], [stopped(layout, 4), layout]):
        found = run_trial(text, phases, 40, WORLDS)
        assert found.how == "ran", found
        told = "".join(found.warnings)
        assert "cache (0 entries, was 1 entries)" in told
        assert ("loss.first (None, was " in told) is first
        same = expected.found[0]["fingerprint"] == found.found[0]["fingerprint"]
        assert same is not first


TAKEN_AHEAD = """
def make():
    return layers(nn.Dropout(0.2))
def ahead(steps):
    before = next(steps)
    for batch in steps:
        yield before
        before = batch
    yield before
def unpacked(steps):
    (batch,) = steps
    return [batch]
def train(run, epochs):
    global found
    found = {}
    model = make()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    for epoch in run.epochs(epochs):
        for batch in TAKEN(run.batches(data)):
            found[f"e{epoch}s{batch.plan.step} loss"] = float(run.backward(batch, F.cross_entropy)).hex()
            optimizer.step()
            optimizer.zero_grad()
        found[f"e{epoch} evaluated"] = run.evaluate(data, F.cross_entropy)
    found["fingerprint"] = run.fingerprint()
    return found
"""


@pytest.mark.parametrize(("taken", "stop"), [("ahead", 1), ("list", 2), ("list", 3), ("unpacked", 1)])
def test_a_loop_that_takes_batches_ahead_goes_on_where_it_was(taken, stop):
    """Steps counted as done when the next batch was taken: the resumed run left one out, in silence."""
    text = (
        BEGIN.replace("40, 6", "16, 6").replace("arange(40)", "arange(16)") if taken == "unpacked" else BEGIN
    ) + TAKEN_AHEAD
    expected = run_trial(text.replace("TAKEN", "iter"), [SINGLE], 40, WORLDS)
    assert expected.how == "ran", expected
    found = run_trial(text.replace("TAKEN", taken), [stopped(DDP, stop), SINGLE], 40, WORLDS)
    verdict = compare(expected, found, SINGLE)
    assert verdict.what == "equal", (verdict.said, verdict.traceback)


FINISHED = """
halves = [torch.utils.data.Subset(data, range(number, 40, 2)) for number in range(2)]

def train(run, epochs):
    global data
    model = layers()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    best, kept = 9.9, run.extra.get("kept", 9.9)
    for epoch in run.epochs(epochs):
        total, data = 0.0, halves[epoch % 2]
        for batch in run.batches(data):
            total += float(run.backward(batch, F.cross_entropy))
            optimizer.step()
            optimizer.zero_grad()
        best = min(best, total)
        run.extra["kept"] = kept = best
        if run.options.directory is not None:
            run.save(wait=True)
    return {"best": best, "kept": kept, "evaluated": run.evaluate(data, F.cross_entropy)}
"""


@pytest.mark.parametrize("layout", [SINGLE, pytest.param(FSDP, marks=pytest.mark.slow)])
def test_a_run_without_a_step_left_names_what_its_script_goes_on_to_read(layout):
    """It printed the first value of the best result, and evaluated the first data set, after a word on its steps."""
    whole = run_trial(BEGIN + FINISHED, [layout], 40, WORLDS)
    ended = run_trial(BEGIN + FINISHED, [layout, layout], 40, WORLDS)
    assert ended.found[0]["kept"] == whole.found[0]["kept"], ended
    told = [words for words in ended.warnings if "at the checkpoint" in words]
    sets = [f"torch.utils.data.dataset.{name}" for name in ("TensorDataset", "Subset")]
    was = f"train: best (9.9, was {whole.found[0]['best']}), data ({sets[0]}, was {sets[1]})."
    assert [was in words for words in told] == [True], told


BEST = """
import tempfile
from pathlib import Path
found = {}

def train(run, epochs):
    model = layers(nn.BatchNorm1d(40))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
    run.extra.setdefault("best", [9.9, 0])
    with tempfile.TemporaryDirectory() as own:
        file = Path(run.options.directory or f"{own}/run").parent / "best.pt"
        for epoch in run.epochs(5):
            for batch in run.batches(data):
                run.backward(batch, F.cross_entropy)
                optimizer.step()
                optimizer.zero_grad()
            loss = run.evaluate(data, F.cross_entropy)
            if loss < run.extra["best"][0]:
                best = run.state_dict()
                if run.is_main:
                    torch.save(best, file)
                run.extra["best"] = [loss, epoch]
        run.load_state_dict(torch.load(file) if run.is_main else {})
    loss, epoch = run.extra["best"]
    return {"best epoch": epoch, "again": run.evaluate(data, F.cross_entropy) == loss, "bits": run.fingerprint()}
"""


@pytest.mark.parametrize(
    "phases",
    [
        pytest.param([stopped(SINGLE, 13), SINGLE], id="single"),
        pytest.param([stopped(DDP, 13), FSDP], id="ddp, fsdp"),
        pytest.param([stopped(PIPELINE, 11), DDP], id="pipeline, ddp", marks=pytest.mark.slow),
    ],
)
def test_best_weights_in_a_file_are_there_after_a_stop(phases):
    """As docs/moving.md has it. ``best = run.state_dict()`` alone is named: no checkpoint holds it."""
    expected = run_trial(BEGIN + BEST, [SINGLE], 40, WORLDS)
    assert expected.how == "ran", expected
    assert expected.found[0]["best epoch"] == 2, expected.found  # before the stop
    assert expected.found[0]["again"]
    verdict = compare(expected, run_trial(BEGIN + BEST, phases, 40, WORLDS), phases[-1])
    assert verdict.what == "equal", (verdict.said, verdict.traceback)
