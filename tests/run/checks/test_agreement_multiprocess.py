"""Ranks that were told different things, or that drift apart, are named."""

import importlib
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from tests.launch.hosts.host import free_port
from tests.ranks import run_ranks
from tests.run.jobs import begin, correct, dataset, network, train_step
from torch import nn
from torch.utils.data import Subset, TensorDataset

import lockstep
from lockstep.errors import ConfigError, NonFiniteError, ReplicaError
from lockstep.run.checks.agreement import require_equal_code, source_digests


def messages(body, world_size, *args):
    """The error of each rank's ``body``; every rank must have raised one, or the world would wait."""
    return run_ranks(body, world_size, *args)


def passes_otherwise(world, strategy, calls):
    """One rank calls ``run.backward`` so often in one step."""
    run = lockstep.init(global_batch=8, micro_batches=4, strategy=strategy)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = TensorDataset(torch.randn(80, 8), torch.arange(80) % 3)
    for _ in run.epochs(1):
        for batch in run.batches(data):
            is_odd = batch.plan.step == 5 and world.rank == 1
            for _ in range(calls if is_odd else 1):
                run.backward(batch, nn.functional.cross_entropy)
            if not is_odd or calls:
                optimizer.step()
                optimizer.zero_grad()


@pytest.mark.parametrize(
    ("strategy", "calls"),
    [
        ("ddp", 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("ddp", 0),
                ("fsdp", 0),
                ("fsdp", 2),
                ("pipeline", 0),
                ("pipeline", 2),
                ("tensor", 2),
            )
        ),
    ],
)
def test_a_rank_that_makes_more_or_fewer_passes_than_others_is_told_at_once(strategy, calls):
    with pytest.raises(ConfigError, match="This rank computes step 5 where another rank computes step 6"):
        run_ranks(passes_otherwise, 2, strategy, calls)


def told_otherwise(world, what):
    other = world.rank == 2
    try:
        if what == "seed":
            begin(seed=1 if other else 0)
        elif what == "reduce":
            begin(reduce="ring" if other else "ordered")
        elif what == "lr":
            begin(lr=0.2 if other else 0.1)
        elif what == "model":
            begin(nn.Sequential(*network()[:4], nn.Linear(8, 4 if other else 3)))
        elif what == "order":
            layers = {name: nn.Linear(3, 3) for name in ("c d", "a")}
            begin(nn.ModuleDict(sorted(layers.items()) if other else layers))
        elif what == "frozen":
            model = network()
            model[0].bias.requires_grad_(not other)
            begin(model)
        elif what == "samples":
            run, *_ = begin()
            next(iter(run.batches(dataset(77 if other else 53))))
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("seed", "seed: 0 on ranks 0, 1; 1 on rank 2"),
        ("reduce", "reduce: ordered on ranks 0, 1; ring on rank 2"),
        ("lr", "lr of optimizer 0, group 0: 0.1 on ranks 0, 1; 0.2 on rank 2"),
        ("model", "'4.weight': (3, 8) torch.float32 on ranks 0, 1; (4, 8) torch.float32 on rank 2"),
        ("frozen", "'0.bias': (8,) torch.float32 on ranks 0, 1; (8,) torch.float32 fixed on rank 2"),
        ("order", "number 0 is c d.weight on ranks 0, 1; a.weight on rank 2. Sort the names."),
        ("samples", "samples: 53 on ranks 0, 1; 77 on rank 2"),
    ],
)
@pytest.mark.fault("S5", "C2", "C3", "C5")
def test_what_differs_is_named_on_every_rank(what, said):
    for message in run_ranks(told_otherwise, 3, what):
        assert said in message


class Activation(nn.Module):
    """Has attributes of many kinds; what is said of a device or a path is its type."""

    def __init__(self, rank, function=torch.relu, steps=(1, 2)):
        super().__init__()
        self.function, self.options = function, {"steps": list(steps), "scale": 0.5}
        self.device, self.folder = torch.device("cuda", rank), Path(f"/data/{rank}")
        self.name_or_path = f"/data/{rank}/weights"

    def forward(self, x):
        return self.function(x)


def other_models(rank, other):
    """Models by what is different on one rank."""
    relu, dropout = Activation(rank), nn.Dropout(0.1)
    wordy = Activation(rank)
    wordy.words = ["word"] * 100 + ["other" if other else "same"]
    listed, tensor = Activation(rank), Activation(rank)
    listed.layers, tensor.noise = [nn.Linear(2, 2).requires_grad_(False)], torch.full((2,), float(other))
    nn.init.constant_(listed.layers[0].weight, float(other))
    nn.init.zeros_(listed.layers[0].bias)
    return {
        "nothing": (relu, dropout),
        "dropout": (relu, nn.Dropout(0.3 if other else 0.1)),
        "class": (relu, nn.AlphaDropout(0.1) if other else dropout),
        "function": (Activation(rank, torch.tanh if other else torch.relu), dropout),
        "nested": (Activation(rank, steps=(1, 3) if other else (1, 2)), dropout),
        "long": (wordy, dropout),
        "mode": (relu, nn.Dropout(0.1).train(not other)),
        "listed": (listed, dropout),
        "tensor": (tensor, dropout),
    }


def other_code(world, directory):
    """The message to each rank on each model; then with a module that one rank alone has, and with a changed one."""
    run, other, device = lockstep.init(global_batch=8, micro_batches=4), world.rank == 2, torch.device("cpu")
    told = {}

    def compare(what, model):
        told[what] = "nothing"
        try:
            require_equal_code([model], run._session.group, device)
        except ConfigError as error:
            told[what] = str(error)

    for what, parts in other_models(world.rank, other).items():
        compare(what, nn.Sequential(nn.Linear(6, 3), *parts))
    folder = directory / f"rank{world.rank}"
    folder.mkdir()
    sys.path.insert(0, str(folder))
    for what, name in (("one rank", f"only_{world.rank}"), ("source", "their_code")):
        (folder / f"{name}.py").write_text(f"SCALE = {int(other)}\n")
        importlib.invalidate_caches()
        importlib.import_module(name)
        compare(what, nn.Linear(6, 3))
    return told


@pytest.mark.fault("S5", "C5")
def test_other_code_on_a_rank_is_refused_and_named_on_every_rank(tmp_path):
    wanted = {
        "dropout": "2.p: 0.1 on ranks 0, 1; 0.3 on rank 2",
        "class": "class of 2: torch.nn.modules.dropout.Dropout on ranks 0, 1; torch.nn.modules.dropout.AlphaDropout",
        "function": "relu on ranks 0, 1; ",
        "nested": "1.options: {'steps': [1, 2], 'scale': 0.5} on ranks 0, 1; {'steps': [1, 3]",
        "long": "1.words: ['word', ",
        "mode": "2.training: True on ranks 0, 1; False on rank 2",
        "source": "source of their_code: ",
        "listed": "1.layers: [torch.nn.modules.linear.Linear with the values ",
        "tensor": "1.noise: torch.Tensor with the values ",
    }
    for told in run_ranks(other_code, 3, tmp_path):
        for what, said in wanted.items():
            assert "do not run the same code" in told[what]
            assert said in told[what]
            assert ("register_buffer" in told[what]) == (what in ("listed", "tensor"))
        assert told["nothing"] == told["one rank"] == "nothing", "devices, paths and modules of one rank alone"


SCRIPT = """\
import lockstep, torch

class Net(torch.nn.Linear):
    def forward(self, x):
        return super().forward(torch.nn.functional.dropout(x, RATE, self.training))

run = lockstep.init(global_batch=8, micro_batches=4)
run.prepare(Net(3, 2))
"""


@pytest.mark.slow
@pytest.mark.fault("S5")
def test_two_hosts_with_other_scripts_are_refused_under_a_foreign_launcher(tmp_path):
    port, processes = free_port(), []
    for rank, rate in enumerate(("0.1", "0.3")):
        script = tmp_path / f"host{rank}" / "train.py"
        script.parent.mkdir()
        script.write_text(SCRIPT.replace("RATE", rate))
        place = {"RANK": rank, "WORLD_SIZE": 2, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1, "GROUP_RANK": rank}
        place |= {"TORCHELASTIC_RUN_ID": "job", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        environment = os.environ | {name: str(value) for name, value in place.items()}
        words = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True, "env": environment}
        processes.append(subprocess.Popen([sys.executable, str(script)], **words))
    for process in processes:
        said, _ = process.communicate(timeout=90)
        assert "do not run the same code" in said
        assert re.search(r"source of __main__: \w{16} on rank 0; \w{16} on rank 1", said)
        assert process.returncode != 0


def test_digests_are_of_sources_and_not_of_installed_packages():
    found = source_digests()
    assert f"source of {__name__}" in found
    assert "source of lockstep.run.checks.agreement" in found
    assert not {"source of torch", "source of pytest", "source of json"} & found.keys()


def saved(directory):
    run, _, optimizer = begin(directory=directory, resume="auto")
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
        run.save(wait=True)
        break
    run.close()


@pytest.mark.slow
def test_a_resumed_run_names_what_has_been_edited(tmp_path, monkeypatch, caplog):
    """It went on as if it were the same program."""
    for digests, said in (
        ({"source of net": "1", "source of __main__": "1"}, []),
        ({"source of net": "2", "source of __main__": "1"}, ["the source of net has changed"]),
        ({"source of net": "2", "source of data": "1"}, []),
    ):
        monkeypatch.setattr("lockstep.run.state.source_digests", lambda own, digests=digests: digests)
        caplog.clear()
        saved(tmp_path)
        found = [each.getMessage() for each in caplog.records if "has changed" in each.getMessage()]
        assert len(found) == len(said)
        assert all(text in message for text, message in zip(said, found))


@pytest.mark.slow
def test_a_resumed_run_that_evaluates_other_samples_says_so(tmp_path, caplog):
    """As after a split without a seed."""
    for numbers, said in ((range(6), 0), (range(6), 0), (range(6, 12), 1)):
        caplog.clear()
        run, _, optimizer = begin(directory=tmp_path, resume="auto")
        train_step(run, next(iter(run.batches(dataset()))), optimizer)
        for _ in range(2):
            run.evaluate(Subset(dataset(), numbers), correct)
        run.save(wait=True)
        run.close()
        found = [each for each in caplog.records if "The run evaluates 6 samples" in each.getMessage()]
        assert len(found) == said


def test_the_users_own_sources_are_not_lockstep():
    found = source_digests(own=True)
    assert f"source of {__name__}" in found
    assert not [name for name in found if name.startswith("source of lockstep")]


class Lazy(ModuleType):
    """A module that is imported when an attribute is asked for, as speechbrain has them."""

    def __getattr__(self, name):
        raise ImportError(f"no {name}")


def test_a_module_that_could_not_be_imported_on_demand_is_no_source(monkeypatch):
    monkeypatch.setitem(sys.modules, "lazy", Lazy("lazy"))
    assert "source of lazy" not in source_digests(own=True)


def other_values(world):
    records = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    run, _, optimizer = begin(network(seed=world.rank))
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
    return run.fingerprint(), [record for record in records if "began with different values" in record]


def test_other_initial_values_become_rank_0s_with_a_warning():
    results = run_ranks(other_values, 3)
    assert {result[0] for result in results} == {run_ranks(other_values, 1)[0][0]}
    assert "4 of 9 tensors (0.bias, 0.weight, 4.bias, 4.weight)" in results[0][1][0]


def drifting(world, what, drifts_in):
    run, model, optimizer = begin(fingerprint_every=2)
    try:
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
            if batch.plan.step == drifts_in and world.rank == 1:
                if what == "parameter":
                    with torch.no_grad():
                        model[4].weight.view(torch.int32)[0, 0] ^= 1
                elif what == "mode":
                    model.eval()  # as to show a sample, without going back
                elif what == "frozen":
                    model[4].requires_grad_(False)
                else:
                    optimizer.param_groups[0]["lr"] = 0.05
    except ReplicaError as error:
        return str(error), run.position.step
    return "nothing", run.position.step


@pytest.mark.parametrize(
    ("what", "name"),
    [
        ("parameter", "4.weight"),
        ("lr", "<lr of optimizer 0, group 0>' is 0.1 on ranks 0, 2; 0.05 on rank 1"),
        pytest.param(
            "mode",
            "0 is in training mode on ranks 0, 2; in evaluation mode on rank 1. Every rank has to call",
            marks=pytest.mark.slow,
        ),
        (
            "frozen",
            "4.bias is trained on ranks 0, 2; frozen on rank 1. Every rank has to call requires_grad_()",
        ),
    ],
)
@pytest.mark.fault("C4", "C7", "M3")
def test_a_replica_that_drifts_is_found_at_the_next_comparison(what, name):
    for message, step in run_ranks(drifting, 3, what, 1):
        assert step == 2
        assert name in message
        assert message.startswith("After 2 steps the ranks ")  # which are steps 0 and 1
        assert "on ranks 0, 2" in message


@pytest.mark.parametrize(("what", "name"), [("parameter", "4.weight")])
def test_a_replica_that_drifts_in_the_first_step_is_found_after_it(what, name):
    for message, step in run_ranks(drifting, 3, what, 0):
        assert step == 1
        assert name in message
        assert "on ranks 0, 2" in message


def poisoned(world, directory):
    data = dataset()
    data.tensors[0][30] = float("inf")
    run, _, optimizer = begin(directory=directory)
    try:
        for batch in run.batches(data, shuffle=False):
            train_step(run, batch, optimizer)
            run.save()
    except NonFiniteError as error:
        return str(error), error.exit_code, run.position.step
    return "nothing"


@pytest.mark.fault("D6")
def test_every_rank_names_the_sample_whose_loss_is_not_finite(tmp_path):
    results = run_ranks(poisoned, 3, str(tmp_path))
    assert len({message for message, *_ in results}) == 1
    message, code, step = results[0]
    assert (code, step) == (6, 1)
    assert "loss of step 1 is nan in micro-batch 2 (samples 30, 31, 32)" in message
    assert [path.name for path in tmp_path.iterdir() if "2" in path.name] == [], "the step was not saved"


def unseeded(world, evaluated, checks):
    import lockstep

    torch.manual_seed(world.rank)  # as unseeded processes have other random numbers
    own, common = (TensorDataset(x, torch.zeros(9, dtype=torch.long)) for x in (torch.randn(9, 6), torch.ones(9, 6)))
    run = lockstep.init(global_batch=8, micro_batches=4, checks=checks)
    model, _ = run.prepare(model := nn.Linear(6, 3), torch.optim.SGD(model.parameters(), lr=0.1))
    try:
        for data in (common, own):  # the second one is of the same size
            if evaluated:
                run.evaluate(data, nn.functional.cross_entropy)
            else:
                list(run.batches(data))
        return ""
    except ConfigError as error:
        return str(error)
    finally:
        run.close()


@pytest.mark.parametrize("evaluated", [False, True])
def test_ranks_with_other_samples_are_refused(evaluated):
    for found in run_ranks(unseeded, 2, evaluated, "first"):
        assert found.startswith("The ranks hold different data: sample 0 of the data set") and "init(seed" in found
    assert run_ranks(unseeded, 2, evaluated, "off") == ["", ""]


def changed_on_one(world, what):
    """The message where rank 1 alone changes something between two evaluations."""
    run, model, _ = begin()
    beside, data = network(), dataset()
    kept = list(range(20))
    part = torch.utils.data.Subset(data, kept)
    try:
        for _ in run.epochs(2):
            run.evaluate(data, nn.functional.cross_entropy, model=beside)
            run.evaluate(part, nn.functional.cross_entropy)
            list(run.batches(part))
            if world.rank == 1 and what == "model":
                beside.load_state_dict(model.state_dict())
                beside[4].bias.data += 1
            elif world.rank == 1:
                kept[:] = reversed(kept)
        return ""
    except ConfigError as error:
        return str(error)
    finally:
        run.close()


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("model", "The Sequential that is evaluated as model= has other values on other ranks: '4.bias' is "),
        (
            "data",
            "The loop, or the loss, has changed changed_on_one: ",
        ),
    ],
)
def test_what_one_rank_alone_has_changed_is_not_evaluated(what, said):
    assert all(found.startswith(said) for found in run_ranks(changed_on_one, 2, what))


def called_otherwise(world, folder, call, where, strategy):
    """The error of each rank where the main process alone makes a call, before all make another one."""
    run, _, optimizer = begin(directory=folder, strategy=strategy)
    calls = {
        "state_dict": run.state_dict,
        "evaluate": lambda: run.evaluate(dataset(), nn.functional.cross_entropy),
        "fingerprint": run.fingerprint,
        "save": run.save,
    }
    try:
        for epoch in run.epochs(2):
            for batch in run.batches(dataset()):
                train_step(run, batch, optimizer)
            if run.is_main and (where == "epoch" or epoch):
                calls[call]()
        calls[where]()
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.fault("C1")
@pytest.mark.parametrize(
    ("call", "where", "others", "strategy"),
    [
        ("evaluate", "epoch", "run.batches", "ddp"),
        ("state_dict", "epoch", "run.batches", "fsdp"),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ("evaluate", "fingerprint", "run.fingerprint", "ddp"),
                ("evaluate", "save", "run.save", "ddp"),
                ("fingerprint", "evaluate", "run.evaluate", "ddp"),
                ("fingerprint", "epoch", "run.batches", "ddp"),
                ("fingerprint", "evaluate", "run.evaluate", "fsdp"),
                ("state_dict", "evaluate", "run.evaluate", "pipeline"),
                ("state_dict", "save", "run.save", "parameter_server"),
            )
        ),
    ],
)
def test_a_call_that_only_some_ranks_make_is_named_with_the_others(call, where, others, strategy, tmp_path):
    """It was told as settings, layers or tensors that differ, or ended in an AttributeError or SIGABRT."""
    found = run_ranks(called_otherwise, 3, tmp_path, call, where, strategy)
    file = Path(__file__).name
    said = rf"different calls of the run: run\.{call} \({file}:\d+\) on rank 0; {others} \({file}:\d+\) on ranks 1, 2"
    for message in found:
        assert re.search(said, message), message


def left_early(world):
    """The error of each rank where one leaves the loop before its last step, which is rehearsed."""
    run, _, optimizer = begin()
    last = 2 * run.steps_per_epoch(dataset()) - 1
    try:
        for _ in run.epochs(2):
            for batch in run.batches(dataset()):
                if not run.is_main and batch.plan.step == last:
                    break
                train_step(run, batch, optimizer)
        run.fingerprint()
    except ConfigError as error:
        return str(error)
    return "nothing"


def test_a_rank_that_leaves_the_loop_before_its_last_step_is_named():
    """The other one ended in a TypeError."""
    for message in run_ranks(left_early, 2):
        assert re.search(r"run\.backward .* on rank 0; run\.fingerprint .* on rank 1", message), message


WORDS = ["the", "winters", "shall", "besiege", "thy", "brow", "and", "dig", "deep", "trenches", "in", "beauty"]


def words_in_an_order(world, follows_rank):
    """A network on texts, by the numbers that a dictionary gives their words: that of a set has another order."""
    own = WORDS[world.rank :] + WORDS[: world.rank] if follows_rank else WORDS
    numbers = {word: number for number, word in enumerate(own)}
    run = lockstep.init(global_batch=4, micro_batches=4)
    model = nn.Sequential(nn.Embedding(len(WORDS), 4), nn.Flatten(), nn.Linear(4, len(WORDS)))
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    data = [(word, torch.tensor([0.5]), {"length": len(word)}) for word in WORDS]

    def forward(data):
        return model(torch.tensor([[numbers[word]] for word in data[0]]))

    def loss(output, data):
        return nn.functional.cross_entropy(output, data[2]["length"]) * data[1].mean()

    try:
        for _ in run.epochs(2):
            for batch in run.batches(data):
                run.backward(batch, loss, forward=forward)
                optimizer.step()
                optimizer.zero_grad()
    except ConfigError as error:
        return str(error)
    return run.fingerprint()


def test_a_dictionary_in_another_order_on_each_rank_is_refused_where_samples_are_texts():
    """By torchrun, where each process orders a set of strings in its own way; the ranks trained on other numbers."""
    for found in run_ranks(words_in_an_order, 3, True):
        assert "The loss of one micro-batch has other bits on other ranks" in found
        assert "the variable 'numbers'" in found
    assert set(run_ranks(words_in_an_order, 3, False)) == set(run_ranks(words_in_an_order, 1, False))
