"""Trains small models in the process of the test, for strategies that need no other."""

import torch
from torch import nn
from torch.utils.data import TensorDataset

from lockstep.core.fingerprint import digest_tensors
from lockstep.core.world import World
from lockstep.run import Run, RunOptions


def rows(count=90, width=6):
    """Rows of ``width`` numbers with one of three labels."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(torch.randn(count, width, generator=generator), torch.arange(count) % 3)


def open_run(**options):
    """A run of 16 rows a step in 8 micro-batches, by default with strategy ``single``."""
    settings = {"global_batch": 16, "micro_batches": 8, "seed": 3, "threads": 1, "strategy": "single"}
    return Run(RunOptions.of(**{**settings, **options}), World())


def train(make, data=None, *, loss=None, forward=None, before_prepare=None, before_step=None, epochs=2, **options):
    """Digests of every loss, norm, gradient, parameter, buffer and optimizer tensor of a training.

    Args:
        make: makes the model.
        data: the training set; by default six steps an epoch, of which the last has 10 rows.
        loss: instead of cross-entropy.
        forward: as in ``Run.backward``.
        before_prepare: called with run, model and data.
        before_step: called with model and step.
        epochs: how many.
        options: of the run.
    """
    torch.manual_seed(0)
    model, run, data = make(), open_run(**options), data or rows()
    own = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    if before_prepare:
        before_prepare(run, model, data)
    model, optimizer = run.prepare(model, own)
    found = {}
    for _ in run.epochs(epochs):
        for batch in run.batches(data):
            if before_step:
                before_step(model, batch.plan.step)
            step = f"{batch.plan.step:02}"
            found[f"loss {step}"] = run.backward(
                batch, loss or nn.CrossEntropyLoss(), forward=forward and forward(model)
            )
            gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
            found |= {f"{name} gradient {step}": gradient.clone() for name, gradient in gradients.items()}
            found[f"norm {step}"] = run.clip_gradients(0.5)
            optimizer.step()
            optimizer.zero_grad()
    states = {name: own.state[p] for name, p in model.named_parameters() if p in own.state}
    found |= {f"{name} {key}": tensor for name, state in states.items() for key, tensor in state.items()}
    found |= run.state_dict()
    run.close()
    return digest_tensors(found)


def differing(expected, found):
    """The names under which two trainings have other bits."""
    assert set(found) == set(expected)
    return [name for name in expected if found[name] != expected[name]]
