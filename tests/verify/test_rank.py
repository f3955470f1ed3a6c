"""A script as a rank of ``lockstep verify --script`` runs it: watched, ended in time, and nothing left behind."""

import sys

import pytest
import torch
from torch import nn

from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions
from lockstep.verify.micro_batches import AS_IT_IS, FirstStep, compared, table
from lockstep.verify.plain import Recording
from lockstep.verify.plain.diagnosis import compare_plain
from lockstep.verify.plain.recorder import requested
from lockstep.verify.rank import coarsest_type, nudge, settled, watch_micro_batches, watch_script
from lockstep.verify.trace import Trace, refusal

OWN_LOOP = """
import torch
import lockstep
from lockstep.data import Digits

torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.init(global_batch=64, micro_batches=4, directory="runs", resume="auto")
model, optimizer = run.prepare(model, optimizer)
for _ in run.epochs(3):
    for batch in run.batches(Digits("train")):
        run.backward(batch, torch.nn.CrossEntropyLoss())
        optimizer.step()
        optimizer.zero_grad()
        run.save()
        print("its own output")
"""
PLAIN = """
import sys
import torch
from lockstep.verify import Recorder

torch.manual_seed(0)
model = torch.nn.Linear(6, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
recorder = Recorder("records", model, optimizer)
for step in range(5):
    x = torch.randn(4, 6)
    losses = model(x)[:, 0] * float(sys.argv[1])
    optimizer.zero_grad()
    losses.mean().backward()
    recorder.batch(samples=range(4 * step, 4 * step + 4), inputs=x, losses=losses)
    optimizer.step()
    recorder.step()
sys.exit(0)
"""


@pytest.fixture
def watched(tmp_path, monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", sys.argv)
    monkeypatch.setitem(sys.modules, "__main__", sys.modules["__main__"])

    def run(text, name, *arguments, steps):
        (tmp_path / "script.py").write_text(text)
        folder = tmp_path / name
        folder.mkdir()
        script = {"path": "script.py", "arguments": arguments}
        payload = {"script": script, "steps": steps, "label": name}
        watch_script({**payload, "folder": str(folder)})
        return folder

    return run


def test_a_run_is_observed_for_the_steps_that_are_wanted(watched, tmp_path, capsys):
    before = dict(vars(Run))
    trace = Trace.read(watched(OWN_LOOP, "one", steps=3) / "trace.json")
    assert [step.step for step in trace.steps] == [0, 1, 2]
    assert (trace.label, trace.strategy, trace.level) == ("one", "single", "A")
    assert len(trace.steps[0].losses) == 4
    assert (tmp_path / "one" / "final.safetensors").exists()
    assert not (tmp_path / "runs").exists(), "the run has written into the folder of verify"
    assert capsys.readouterr().out == ""
    assert dict(vars(Run)) == before
    assert requested.get() is None


def test_steps_whose_batches_were_taken_before_are_observed(watched):
    """As by ``(batch,) = run.batches(data)``: no step was found, and the script was said to have none."""
    text = OWN_LOOP.replace('run.batches(Digits("train")):', 'list(run.batches(Digits("train"))):')
    trace = Trace.read(watched(text.replace("        run.save()\n", ""), "one", steps=3) / "trace.json")
    assert [step.step for step in trace.steps] == [0, 1, 2] and all(step.parameters for step in trace.steps)
    whole = Trace.read(watched(OWN_LOOP, "two", steps=3) / "trace.json")
    assert [step.parameters for step in trace.steps] == [step.parameters for step in whole.steps]


def test_passes_over_a_batch_that_was_taken_ahead_are_one_step(watched):
    """Each counted as a step of its own, and the time of a step was half of what it is."""
    twice = "[each for each in run.batches(Digits('train')) for _ in range(2)]:"
    text = OWN_LOOP.replace("        run.save()\n", "").replace('run.batches(Digits("train")):', twice)
    trace = Trace.read(watched(text, "one", steps=3) / "trace.json")
    assert [step.step for step in trace.steps] == [0, 1, 2]


def test_every_step_is_counted_once_however_the_loop_takes_and_leaves_its_batches(watched):
    """A batch taken ahead counted as two steps and as one less, a step that ends in ``break`` as none."""
    ahead = "ahead(run.batches(Digits('train'))):"
    taking = "def ahead(steps, last=None):\n    for each in steps:\n        if last:\n            yield last\n"
    taking += "        last = each\n\n\ntorch.manual_seed(0)"
    text = OWN_LOOP.replace("        run.save()\n", "").replace('run.batches(Digits("train")):', ahead)
    leaving = OWN_LOOP.replace("run.save()", "if run.position.step % 2:\n            break")
    programs = text.replace("torch.manual_seed(0)", taking), leaving.replace("run.epochs(3)", "run.epochs(9)")
    for name, program in zip(("ahead", "left"), programs, strict=True):
        trace = Trace.read(watched(program, name, steps=4) / "trace.json")
        assert [step.step for step in trace.steps] == [0, 1, 2, 3], name
        assert len({step.loss for step in trace.steps}) == 4


def test_settings_are_those_of_the_update_and_shared_weights_are_no_buffers(watched):
    """A learning rate that a loop sets after the backward pass was found in "running statistics"."""
    layers = "torch.nn.Linear(64, 64), torch.nn.Linear(64, 64), torch.nn.Linear(64, 10)"
    text = OWN_LOOP.replace("torch.nn.Linear(64, 10)", layers).replace(
        "\noptimizer = ", "\nmodel[2].weight = model[1].weight\noptimizer = "
    )
    text = text.replace(
        "        optimizer.step()", "        optimizer.param_groups[0]['lr'] = 0.5\n        optimizer.step()"
    )
    step = Trace.read(watched(text, "one", steps=1) / "trace.json").steps[0]
    assert step.settings["lr of optimizer 0, group 0"] == "0.5"
    assert step.buffers == {} and "2.weight" in step.parameters


def test_what_a_forward_pass_leaves_in_an_attribute_is_not_compared(watched):
    """It is of the last micro-batch of a process: layouts with equal bits were said to differ in it."""
    layer = "class Showing(torch.nn.Linear):\n    def forward(self, x):\n"
    layer += "        self.last = super().forward(x).detach().repeat(100, 1)\n        return super().forward(x)\n"
    text = OWN_LOOP.replace("torch.manual_seed(0)", f"{layer}\ntorch.manual_seed(0)")
    text = text.replace("torch.nn.Linear(64, 10)", "Showing(64, 10)")
    trace = Trace.read(watched(text, "one", steps=2) / "trace.json")
    assert len(trace.steps[0].outputs) == 4
    assert trace.steps[1].optimizer == {}


def test_a_script_that_ends_before_is_observed_so_far(watched):
    short = OWN_LOOP.replace("print(", "break; print(").replace("run.epochs(3)", "run.epochs(1)")
    before = short.replace("run.backward", "break; run.backward")
    assert not (watched(before, "empty", steps=9) / "trace.json").exists()
    assert len(Trace.read(watched(short, "broken", steps=9) / "trace.json").steps) == 1
    closing = OWN_LOOP.replace("run.epochs(3)", "run.epochs(1)") + "run.close()\n"
    trace = Trace.read(watched(closing, "closed", steps=99) / "trace.json")
    assert 3 < len(trace.steps) < 99


@pytest.mark.slow
def test_runs_after_the_first_are_counted_since_they_are_not_observed(watched):
    closing = OWN_LOOP.replace("run.epochs(3)", "run.epochs(1)") + "run.close()\n"
    assert Trace.read(watched(closing, "one", steps=99) / "trace.json").further_runs == 0
    assert Trace.read(watched(closing + closing, "two", steps=99) / "trace.json").further_runs == 1


def test_records_go_where_verify_wants_them(watched, tmp_path):
    folder = watched(PLAIN, "plain", "1", steps=3)
    assert Recording.read(folder / "records").length == 3
    assert not (tmp_path / "records").exists()
    assert Recording.read(watched(PLAIN, "short", "1", steps=9) / "records").length == 5


def test_a_second_recorder_is_refused(watched):
    """Both wrote into one file, and the steps of two models were compared as those of one."""
    two = PLAIN.replace("for step in", 'other = Recorder("more", model, optimizer)\nfor step in')
    with pytest.raises(ConfigError, match="the script makes a second one"):
        watched(two, "two", "1", steps=3)


def test_plain_runs_are_compared_like_layouts(watched):
    reference, again, twice = (
        Recording.read(watched(PLAIN, name, factor, steps=4) / "records")
        for name, factor in (("reference", "1"), ("again", "1"), ("twice", "2"))
    )
    same = compare_plain(reference, again, "2 processes", again=again)
    assert (same.reached, same.diagnosis, same.trace.label, len(same.trace.steps)) == (
        "A",
        None,
        "2 processes",
        4,
    )
    assert same.trace.milliseconds > 0
    other = compare_plain(reference, twice, "2 processes", again=again)
    assert (other.reached, other.diagnosis.step) == ("-", 0)
    assert other.difference > 0.01


def test_a_script_that_fails_fails(watched):
    with pytest.raises(ValueError, match="no data"):
        watched("raise ValueError('no data')", "failing", steps=1)
    with pytest.raises(SystemExit):
        watched("raise SystemExit(3)", "exiting", steps=1)
    assert requested.get() is None


def test_the_sentence_of_a_refusal_is_kept(watched, tmp_path):
    text = OWN_LOOP.replace(
        "        run.backward",
        "        raise lockstep.errors.ConfigError('It has two.')\n        run.backward",
    )
    with pytest.raises(ConfigError, match="It has two"):
        watched(text, "refusing", steps=1)
    assert refusal(tmp_path / "refusing") == "It has two."
    assert refusal(tmp_path) == ""


def test_the_time_of_a_step_leaves_out_those_that_are_checked():
    assert settled([9.0, 8.0, 1.0, 3.0, 2.0]) == 2.0
    assert settled([9.0, 8.0]) == 8.5
    assert settled([9.0]) == 9.0


def test_a_program_that_the_checks_refuse_has_their_sentence_as_its_finding(watched, tmp_path):
    counting = (
        "class Counter(torch.nn.Module):\n    calls = 0\n    def forward(self, x):\n"
        "        self.calls += 1\n        return x * self.calls\n"
    )
    text = OWN_LOOP.replace("torch.manual_seed(0)\n", f"torch.manual_seed(0)\n{counting}")
    with pytest.raises(ConfigError, match="the attribute 'calls' of 1"):
        watched(text.replace("torch.nn.Flatten(),", "torch.nn.Flatten(), Counter(),"), "counting", steps=1)
    assert "It changed the attribute 'calls' of 1" in refusal(tmp_path / "counting")


def test_inputs_change_in_their_last_place_only_and_alike_in_every_run():
    inputs, seen = torch.linspace(0.1, 2, 200), []
    for _ in range(2):
        model = nn.Identity()
        nudge(model, torch.float32)
        seen.append((model(inputs), model(inputs)))
    changed = seen[0][0]
    assert 0.4 < (changed > inputs).float().mean() < 0.6
    assert 0 < ((changed - inputs) / inputs).abs().max() <= 2.0**-22
    assert torch.equal(changed, seen[1][0])


def test_another_change_has_other_signs_and_layers_change_too():
    def changed(model, number):
        nudge(model, torch.float32, number)
        return model(torch.linspace(0.1, 2, 200))

    inputs_only = changed(nn.Identity(), 1)
    assert not torch.equal(inputs_only, changed(nn.Identity(), 2))
    assert not torch.equal(inputs_only, changed(nn.Sequential(nn.Identity()), 1))


def test_inputs_that_are_changed_are_alike_when_a_micro_batch_is_rehearsed():
    """Each pass drew anew, so that verify refused a job of level B as one that depends on what Lockstep cannot see."""
    run = Run(RunOptions.of(global_batch=8, micro_batches=2, strategy="single"), World())
    model = nn.Linear(4, 1)
    run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    nudge(model, torch.float32)
    (batch,) = run.batches([(torch.rand(4), torch.rand(1)) for _ in range(8)])
    run.backward(batch, nn.MSELoss())


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({}, torch.float32),
        ({"precision": "fp16"}, torch.float16),
        ({"reduce": "bf16", "precision": "fp16"}, torch.bfloat16),
        ({"strategy": "fsdp", "fsdp": {"mixed_precision": "bf16"}}, torch.bfloat16),
    ],
)
def test_inputs_change_by_the_unit_of_the_coarsest_type_that_is_computed_in(options, kind):
    assert coarsest_type(RunOptions.of(global_batch=8, **options)) is kind
    model, inputs = nn.Identity(), torch.rand(64) + 0.1
    nudge(model, kind)
    assert ((model(inputs) - inputs) / inputs).abs().max().item() == pytest.approx(torch.finfo(kind).eps, rel=0.6)


def test_a_model_of_tokens_has_its_parameters_changed_once():
    model = nn.Embedding(8, 4)
    before = model.weight.detach().clone()
    nudge(model, torch.float32)
    model(torch.arange(8))
    after = model.weight.detach().clone()
    assert 0 < ((after - before) / before).abs().max() <= 2.0**-22
    model(torch.arange(8))
    assert torch.equal(model.weight, after)


IN_MICRO_BATCHES = """
import sys
import torch
import lockstep
from torch import nn
from torch.nn.functional import cross_entropy, dropout, mse_loss, normalize

kind = sys.argv[1]
torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(64, 12), torch.randint(0, 4, (64,)))


class Own(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += kind == "state"
        return dropout(x, 0.5, self.training) * 2**self.calls if kind == "random" else x * 2**self.calls


def masked(output, target):
    counts = (target != 0).float()
    return (cross_entropy(output, target, reduction="none") * counts).sum() / counts.sum()


def contrastive(output, target):
    rows = normalize(output)
    return cross_entropy(rows @ rows.T / 0.1, torch.arange(len(rows)))


losses = {
    "sum": lambda output, target: cross_entropy(output, target, reduction="sum"),
    "masked": masked,
    "contrastive": contrastive,
    "whole": contrastive,
    "root": lambda output, target: mse_loss(output[:, 0], target.float()).sqrt(),
}
middle = {"batch_norm": nn.BatchNorm1d(16), "dropout": nn.Dropout(0.5)}.get(kind, Own())
model = nn.Sequential(nn.Linear(12, 16), middle, nn.ReLU(), nn.Linear(16, 4))
if kind == "channels_last":
    model = nn.Sequential(nn.Unflatten(1, (3, 2, 2)), nn.Conv2d(3, 4, 2), nn.Flatten())
    model.to(memory_format=torch.channels_last)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
run = lockstep.init(global_batch=32, micro_batches=4, seed=0, checks="off")
model, optimizer = run.prepare(model, optimizer)
for batch in run.batches(data):
    model.train()
    run.backward(batch, losses.get(kind, cross_entropy), whole_batch=kind == "whole")
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("kind", "cause", "words"),
    [
        ("plain", "", ""),
        ("channels_last", "", ""),
        ("dropout", "", ""),
        ("whole", "", ""),
        ("batch_norm", "batch_norm", "sync_batch_norm=True"),
        ("sum", "loss", "is a sum over the samples"),
        ("masked", "loss", "one over something else, such as unmasked tokens"),
        ("contrastive", "loss", "whole_batch=True"),
        ("root", "loss", "the root or the exponential"),
        ("random", "random", "keyed by micro-batch"),
        ("state", "refused", "It changed the attribute 'calls' of 1"),
    ],
)
def test_what_depends_on_the_micro_batches_has_its_cause_named(kind, cause, words, watched, tmp_path):
    del watched  # the environment of a script
    (tmp_path / "script.py").write_text(IN_MICRO_BATCHES)

    def computed(count, variant=AS_IT_IS):
        folder = tmp_path / f"{count}-{variant}"
        folder.mkdir()
        script = {"path": "script.py", "arguments": [kind]}
        payload = {"script": script, "micro_batches": count, "variant": variant}
        try:
            watch_micro_batches({**payload, "folder": str(folder)})
        except ConfigError:
            return FirstStep(count, refused=refusal(folder), in_training=True)
        return FirstStep.read(folder / "step.json")

    found = compared([computed(1), computed(8)], computed)[1]
    assert found.cause == cause
    assert words in found.text
    assert words in table([found])
    assert (found.difference.factor == pytest.approx(1 / 8)) is (kind == "sum")


def test_what_lockstep_warned_of_is_shown_where_a_script_fails(watched, capsys):
    """The error may come of it, and was all that there was to see."""
    text = f"{OWN_LOOP}list(run.epochs(1))\nundefined\n"
    with pytest.raises(NameError):
        watched(text.replace("epochs(3)", "epochs(1)"), "fails", steps=100)
    assert "run.epochs(1) has nothing to do" in capsys.readouterr().err
