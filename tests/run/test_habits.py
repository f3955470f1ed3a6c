"""Habits of training scripts: saving the model as it is, averaging losses over an epoch, streams."""

import io
import os
import re
import subprocess
import sys
from dataclasses import fields
from pathlib import Path

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import begin, dataset, network, train_step
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import lockstep
from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.run import Run, RunOptions


def trained(strategy):
    run, model, optimizer = begin(strategy=strategy)
    average = 0.0
    for batch in run.batches(dataset()):
        average += float(train_step(run, batch, optimizer)) * len(batch) / len(dataset())
    return run, model, optimizer, average


def saved_whole(world, strategy):
    run, model, optimizer, _ = trained(strategy)
    file, inputs = io.BytesIO(), dataset().tensors[0]
    try:
        torch.save({"model": model, "optimizer": optimizer.state_dict() if strategy != "fsdp" else {}}, file)
    except ConfigError as error:
        run.close()
        return str(error)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)["model"].eval()
    model.eval()
    for _ in range(2):  # its hooks are there and do nothing
        assert torch.equal(loaded(inputs), model(inputs))
    run.close()
    if strategy == "single":
        begin(loaded.train(), strategy=strategy)[0].close()
    return [tuple(each.shape) for each in loaded.state_dict().values()], loaded.eval()(inputs).sum().item()


def test_torch_save_of_the_prepared_model_is_whole_or_refused():
    alone = saved_whole(World(), "single")
    assert alone[0] == [tuple(each.shape) for each in network().state_dict().values()]
    assert run_ranks(saved_whole, 2, "ddp") == [alone, alone]
    for found in run_ranks(saved_whole, 2, "fsdp"):
        assert "under strategy 'fsdp' no process holds" in found and "run.save()" in found


def averaged(world):
    run, *_, average = trained("ddp")
    run.close()
    return average


def test_losses_times_len_of_the_batch_make_one_average_on_every_number_of_processes():
    assert run_ranks(averaged, 3) == [averaged(World())] * 3


class Lines(IterableDataset):
    """Draws for every sample; shuffled by the epoch."""

    def __len__(self):
        return 29

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for number in torch.randperm(29).tolist():
            yield torch.randn(6) + self.epoch, number % 3


def streamed(world, directory="", stop=None):
    run, _, optimizer = begin(
        strategy="ddp" if world.world_size > 1 else "single",
        directory=directory or None,
        resume="auto" * bool(directory),
    )
    loader = DataLoader(Lines(), batch_size=10, num_workers=2)
    for _ in run.epochs(2):
        for batch in run.batches(loader):
            train_step(run, batch, optimizer)
            if run.position.step == stop:
                run.save(wait=True)
                run.close()
                return None
    value = run.evaluate(loader, nn.functional.cross_entropy)
    found = value, run.fingerprint()
    run.close()
    return found


def test_a_stream_is_resumed_within_an_epoch_on_another_number_of_processes(tmp_path):
    whole = streamed(World())
    assert run_ranks(streamed, 3) == [whole] * 3
    assert run_ranks(streamed, 2, str(tmp_path), 2) == [None] * 2
    assert streamed(World(), str(tmp_path)) == whole


class Shared(Lines):
    """Gives each process a part of the samples."""

    def __iter__(self):
        rank = torch.distributed.get_rank()
        return ((torch.randn(6) + number, 0) for number in range(rank, 29))


def shared(world):
    run, _, _ = begin()
    with pytest.raises(ConfigError, match="The ranks hold different data: sample 0"):
        next(run.batches(Shared()))
    run.close()


def test_a_stream_that_shares_itself_out_is_refused():
    run_ranks(shared, 2)


def test_every_public_name_of_a_run_is_on_the_page_about_moving_a_script():
    page = (Path(__file__).parents[2] / "docs" / "moving.md").read_text()
    names = {name for name in dir(Run) if not name.startswith("_")} | {
        "device",
        "extra",
        "options",
        "strategy",
        "world",
    }
    assert [name for name in sorted(names) if not re.search(rf"[`.]{name}\b", page)] == []


def test_every_option_of_init_is_on_the_page_about_own_loops():
    page = (Path(__file__).parents[2] / "docs" / "own-loop.md").read_text()
    section = page.split("## Options of `lockstep.init`\n")[1].split("\n## ")[0]
    rows = [line.split("|")[1] for line in section.splitlines() if line.startswith("|")]
    named = re.findall(r"`(\w+)`", " ".join(rows))
    assert sorted(named) == sorted(field.name for field in fields(RunOptions))


class Networks(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.generator, self.critic = (
            nn.Linear(4, 6),
            nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 1)),
        )

    def fake(self, count):
        return self.generator(torch.randn(count, 4))


def ones(output, data):
    return nn.functional.binary_cross_entropy_with_logits(output, torch.ones_like(output))


def adversarial(world, directory=None, stop=None, clears=True, strategy="ddp"):
    """The critic keeps the gradients of the generator's loss until its next turn; ``clears=False``: adds to them."""
    options = {"strategy": strategy, "directory": directory, "resume": "auto" * bool(directory)}
    run = lockstep.init(global_batch=24, micro_batches=8, **options)
    networks = Networks()
    critic = torch.optim.SGD(networks.critic.parameters(), lr=0.1)
    generator = torch.optim.SGD(networks.generator.parameters(), lr=0.1)
    networks, critic, generator = run.prepare(networks, critic, generator)
    for _ in run.epochs(2):
        for batch in run.batches(dataset()):
            if clears:
                critic.zero_grad()
            run.backward(batch, ones, forward=lambda data: networks.critic(data[0]))
            critic.step()
            generator.zero_grad()
            run.backward(batch, ones, forward=lambda data: networks.critic(networks.fake(len(data[0]))))
            if stop is not None:
                with pytest.raises(ConfigError, match=r"between run\.backward and"):
                    run.save()
            generator.step()
            if run.position.step == stop:
                try:
                    return run.save(wait=True) and "saved"
                except ConfigError as error:
                    return str(error)
                finally:
                    run.close()
    found = run.fingerprint()
    run.close()
    return found


@pytest.mark.parametrize("clears", [True, False])
def test_gradients_of_the_other_network_are_saved(tmp_path, clears):
    whole = adversarial(World(), clears=clears)
    assert adversarial(World(), tmp_path, 3, clears) == "saved"
    assert adversarial(World(), tmp_path, clears=clears) == whole
    if not clears:
        assert run_ranks(adversarial, 2, None, None, False) == [whole] * 2


def test_gradients_of_the_other_network_are_saved_where_no_process_has_them_whole(tmp_path):
    whole = adversarial(World(), clears=False)
    assert run_ranks(adversarial, 2, tmp_path, 3, False, "fsdp") == ["saved", None]
    assert run_ranks(adversarial, 3, tmp_path, None, False, "fsdp") == [whole] * 3


def test_a_gradscaler_of_the_scripts_own_is_refused_and_one_that_is_switched_off_steps():
    run, _, optimizer = begin()
    (batch, *_) = run.batches(dataset())
    loss = run.backward(batch, nn.CrossEntropyLoss())
    torch.amp.GradScaler("cpu", enabled=False).step(optimizer)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss)
    with pytest.raises(ConfigError, match=r"write lockstep\.init\(precision='fp16'\)"):
        scaler.step(optimizer)
    run.close()


def scaled_with_a_graph(world):
    """Adaptive clipping as people write it, without torch.no_grad, where a norm of parameters has a graph."""
    run, model, optimizer = begin(strategy="ddp" if world.world_size > 1 else "single")
    for batch in run.batches(dataset()):
        run.backward(batch, nn.CrossEntropyLoss())
        for parameter in model.parameters():
            parameter.grad.mul_((0.1 * parameter.norm() / parameter.grad.norm()).clamp(max=1))
        optimizer.step()
        optimizer.zero_grad()
    found = run.fingerprint()
    run.close()
    return found


def test_gradients_may_be_scaled_by_what_has_a_graph():
    assert run_ranks(scaled_with_a_graph, 2) == [scaled_with_a_graph(World())] * 2


class Spiking(nn.Module):
    """A neuron that keeps its potential until it is reset."""

    def __init__(self):
        super().__init__()
        self.layer, self.potential = nn.Linear(6, 3), torch.zeros(())

    def forward(self, inputs):
        self.potential = self.potential / 2 + self.layer(inputs)
        return self.potential


@pytest.mark.parametrize("kept", ["a potential", "a term of the loop"])
def test_a_graph_that_outlives_its_micro_batch_is_refused_with_what_to_change(kept):
    with lockstep.init(global_batch=8, micro_batches=4) as run:
        model = Spiking()
        model, _ = run.prepare(model, torch.optim.SGD(model.parameters(), 0.1))
        with pytest.raises(ConfigError, match=r"graph of an earlier one.* at the beginning of forward=") as refused:
            for batch in run.batches(dataset()):
                if kept == "a potential":
                    run.backward(batch, nn.functional.cross_entropy)
                else:
                    model.potential = model.layer.weight.square().sum()
                    run.backward(
                        batch,
                        lambda output, _: output.mean(),
                        forward=lambda data: model.layer(data[0]) + model.potential,
                    )
    assert "retain_graph" in str(refused.value.__cause__)


def test_a_loop_that_was_left_says_nothing_at_the_end_of_the_program(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(
        "from torch import nn, optim\nimport lockstep\nfrom tests.run.jobs import dataset, network\n"
        "run = lockstep.init(global_batch=16, micro_batches=2)\nmodel = network()\n"
        "model, optimizer = run.prepare(model, optim.SGD(model.parameters(), lr=0.1))\n"
        "batches = run.batches(dataset(48))\nfor batch in batches:\n"
        "    run.backward(batch, nn.CrossEntropyLoss())\n    optimizer.step()\n    break\n"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ended = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, env=environment)
    assert (ended.returncode, ended.stderr) == (0, "")


@pytest.mark.parametrize("when", ["training", "evaluation"])
def test_another_number_of_threads_than_the_recipe_has_is_refused(when):
    """Scripts divide the cores by the number of processes: sums of a CPU had other bits on each."""
    run, _, optimizer = begin()
    threads = torch.get_num_threads()
    try:
        with pytest.raises(ConfigError, match=r"get_num_threads\(\) was 1 .* is 2 now.*init\(threads=\.\.\.\)"):
            for batch in run.batches(dataset()):
                train_step(run, batch, optimizer)
                torch.set_num_threads(2)
                if when == "evaluation":
                    run.evaluate(dataset(), nn.functional.cross_entropy)
    finally:
        torch.set_num_threads(threads)
