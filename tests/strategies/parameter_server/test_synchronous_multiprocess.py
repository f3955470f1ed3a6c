"""Workers and servers on real ranks; that the bits are those of one device is in the contract over all strategies."""

import logging

import pytest
import torch
from tests.ranks import run_ranks
from tests.run.jobs import begin, correct, dataset, network
from torch import nn

from lockstep.errors import ConfigError
from lockstep.runtime.events import Callback
from lockstep.runtime.lazy_compiler import postpone_compiler


def wide():
    """More than half of its values are in one matrix, so two servers share its rows."""
    return nn.Sequential(nn.Linear(6, 64), nn.ReLU(), nn.Linear(64, 3))


def held_and_sent(world, servers, make=network):
    """The state of each rank's optimizer, and the bytes that it has sent, after three steps."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    model = make()
    sizes = {name: p.nbytes for name, p in model.named_parameters()}
    run, model, optimizer = begin(
        model, torch.optim.AdamW, strategy="parameter_server", parameter_server={"servers": servers}
    )
    for batch in run.batches(dataset(72)):
        run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    (held_optimizer,) = run.require_prepared().state.parts.optimizers
    state = sum(t.nbytes for each in held_optimizer.state.values() for t in each.values() if t.dim())
    held = {name: parameter.nbytes for name, parameter in run.strategy.trainable().items()}
    value = run.evaluate(dataset(seed=2), correct)
    found = held, state, run.strategy.bytes_sent, sizes, value, run.fingerprint()
    run.close()
    return found


@pytest.mark.parametrize(("world", "servers", "make"), [(2, 1, network), (4, 2, wide)])
def test_servers_hold_the_keys_and_the_optimizer_state_and_workers_none(world, servers, make):
    ranks = run_ranks(held_and_sent, world, servers, make)
    workers, kept = ranks[: world - servers], ranks[world - servers :]
    sizes = ranks[0][3]
    assert all((held, state) == ({}, 0) for held, state, *_ in workers)
    together = [name for held, *_ in kept for name in held]
    assert sorted(set(together)) == sorted(sizes)
    shared = {name for name in together if together.count(name) > 1}
    assert shared == ({"0.weight"} if make is wide else set()), "only what is larger than a fair share is cut"
    for name, size in sizes.items():
        assert sum(held.get(name, 0) for held, *_ in kept) == size
    for held, state, *_ in kept:
        assert state == 2 * sum(held.values()), "AdamW keeps two values for each"
    assert len({(value, fingerprint) for *_, value, fingerprint in ranks}) == 1


def test_the_traffic_is_what_the_formula_says():
    """A worker of two has 4 of 8 micro-batches, one node of the tree: it pushes every gradient once a step."""
    ranks = run_ranks(held_and_sent, 3, 1)
    whole, steps = sum(ranks[0][3].values()), 3
    assert [each[2] for each in ranks[:2]] == [steps * whole] * 2
    assert ranks[2][2] == steps * whole * 2, "the server gives its values to each of two workers"


def test_servers_give_their_values_to_each_other_too():
    """Two workers and two servers: all values go from their server to three ranks."""
    ranks = run_ranks(held_and_sent, 4, 2)
    sizes, steps = ranks[0][3], 3
    for held, _, sent, *_ in ranks[2:]:
        assert sent == steps * 3 * sum(held.values())
    assert sum(each[2] for each in ranks[2:]) == steps * 3 * sum(sizes.values())


class Phases(Callback):
    def __init__(self):
        self.seen = []

    def on_phase(self, phase, epoch, step, micro_batch):
        self.seen.append(phase)


def phases_of_a_step(world):
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    run, _, optimizer = begin(strategy="parameter_server")
    phases = Phases()
    for batch in run.batches(dataset(72)):
        with run.add_callback(phases):
            phases.seen.clear()
            run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad()
    run.close()
    return phases.seen


def test_waiting_for_the_other_ranks_is_no_work_of_a_worker_or_a_server():
    """The time was counted as that of the last backward pass, and a server's as that of reading data."""
    first, second, server = run_ranks(phases_of_a_step, 3)
    assert first[-3:] == second[-3:] == ["backward", "reduce", "update"]
    assert server == ["reduce", "update"]


class Versioned(nn.Module):
    """Its first format kept the weight negated: a state without its version would be turned once more."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return x * self.weight

    def _load_from_state_dict(self, state, prefix, metadata, *rest):
        if (metadata.get("version") or 1) < 2:
            state[prefix + "weight"] = -state[prefix + "weight"]
        super()._load_from_state_dict(state, prefix, metadata, *rest)


def saved_or_resumed(world, directory, resume):
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    model = nn.Sequential(network(), Versioned())
    run, model, optimizer = begin(model, strategy="parameter_server", directory=directory, resume=resume)
    if not resume:
        for batch in run.batches(dataset(72)):
            run.backward(batch, nn.functional.cross_entropy)
            optimizer.step()
            optimizer.zero_grad()
        run.save()
    found = run.fingerprint()
    run.close()
    return found


def test_a_state_of_a_module_with_versions_is_read_in_its_own_version(tmp_path):
    saved = run_ranks(saved_or_resumed, 2, str(tmp_path), "")
    assert run_ranks(saved_or_resumed, 2, str(tmp_path), "auto") == saved


def all_frozen(world):
    with pytest.raises(ConfigError, match="No parameter of the model requires a gradient"):
        begin(network().requires_grad_(False), strategy="parameter_server")
    return True


def test_a_model_without_trained_parameters_is_refused():
    assert run_ranks(all_frozen, 2) == [True, True]


def refused(world):
    with pytest.raises(ConfigError, match=r"servers is 2, which leaves no worker among 2 processes\. Use at most 1"):
        begin(strategy="parameter_server", parameter_server={"servers": 2})
    return True


def test_a_world_of_servers_only_is_refused():
    assert run_ranks(refused, 2) == [True, True]


def added_to(world, servers):
    """The messages on the user's own backward passes, onto cleared, then onto kept gradients."""
    settings = {"strategy": "parameter_server", "parameter_server": {"servers": servers}}
    run, model, optimizer = begin(wide(), torch.optim.AdamW, **settings)
    said = []
    for batch in run.batches(dataset(72)):
        try:
            model(torch.ones(2, 6)).sum().backward()
        except ConfigError as error:
            said.append(str(error))
        optimizer.zero_grad()
        run.backward(batch, nn.functional.cross_entropy)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    run.close()
    return said


@pytest.mark.parametrize(("world", "servers"), [(3, 1), pytest.param(4, 2, marks=pytest.mark.slow)])
def test_a_backward_pass_onto_gradients_that_a_server_has_is_refused(world, servers):
    for said in run_ranks(added_to, world, servers):
        assert said, "the second step began with kept gradients"
        assert all(text.startswith("backward() adds to the gradient of '") for text in said)
        assert all("Call optimizer.zero_grad() before it, without set_to_none=False" in text for text in said)


def stepped_after_the_loop(world, strategy):
    """The fingerprint after a step of every two batches, and one of the last batch below the loop."""
    run, _, optimizer = begin(network(), torch.optim.SGD, strategy=strategy)
    for _ in run.epochs(1):
        for number, batch in enumerate(run.batches(dataset(72))):
            run.backward(batch, nn.functional.cross_entropy)
            if number % 2:
                optimizer.step()
                optimizer.zero_grad()
    assert number % 2 == 0, "the last batch is left over"
    optimizer.step()
    found = run.fingerprint()
    run.close()
    return found


def test_a_step_below_the_loop_takes_what_was_left_over():
    """A worker, which holds no gradient, took it for a step without a backward pass."""
    alone = run_ranks(stepped_after_the_loop, 1, "single")
    assert set(run_ranks(stepped_after_the_loop, 3, "parameter_server")) == set(alone)
