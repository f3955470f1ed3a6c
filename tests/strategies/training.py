"""Trains the jobs on a rank, and says what came out."""

import logging
import pickle

import torch
from tests.strategies.jobs import JOBS

from lockstep.core.fingerprint import digest_tensor, digest_tensors
from lockstep.run import Run, RunOptions
from lockstep.runtime.lazy_compiler import postpone_compiler


def train_all(world, cases):
    """Trains several cases, one after the other: (name, job, options, loader workers). Digests by name of the case."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    found = {}
    for name, job, options, workers in cases:
        try:
            found[name] = pickle.dumps(digests_of(world, job, options, workers))  # runs look at variables of loops
        except Exception as error:
            error.add_note(f"in the case {name!r}")
            raise
    return {name: pickle.loads(each) for name, each in found.items()}


def digests_of(world, name, options, workers=0):
    """Trains a job. Gives what came out, by name: losses, norms, last gradients, model and optimizer state."""
    _, model, optimizer, found = train(world, name, options, workers)
    found |= digest_tensors(model.state_dict())
    return found | optimizer_digests(model, optimizer.wrapped)


def train(world, name, options, workers=0):
    """Trains a job; gives job, model, optimizer, and losses, norms and last gradients by name."""
    torch.manual_seed(world.rank)  # every rank builds another model; rank 0's counts
    job, found, steps = JOBS[name](), {}, 0
    run = Run(RunOptions.of(**{"seed": 3, "threads": 1, "fingerprint_every": 5, **job.options, **options}), world)
    schedulers = [job.schedule(job.optimizer)] if job.schedule else []
    model, optimizer, *schedulers = run.prepare(job.model, job.optimizer, *schedulers)
    for _ in run.epochs(job.epochs):
        for batch in run.batches(job.data, workers=workers):
            found[f"loss {steps:02}"] = float(run.backward(batch, job.loss)).hex()
            if job.clip is not None:
                found[f"norm {steps:02}"] = float(run.clip_gradients(job.clip)).hex()
            optimizer.step()
            steps += 1
            gradients = {f"gradient of {n}": p.grad for n, p in model.named_parameters() if p.grad is not None}
            found |= digest_tensors(gradients) if steps == job.last else {}
            optimizer.zero_grad(set_to_none=job.set_to_none)
            for each in schedulers:
                each.step()
    assert steps == job.last, f"{name} has {steps} steps, not {job.last}"
    found["skipped"] = run.skipped_steps
    run.close()
    return job, model, optimizer, found


def optimizer_digests(model, optimizer):
    digests = {}
    for name, parameter in model.named_parameters():
        for key, value in optimizer.state.get(parameter, {}).items():
            digests[f"{name} {key}"] = digest_tensor(value) if isinstance(value, torch.Tensor) else repr(value)
    return digests


def parameters_after(world, name, options):
    """The parameters themselves after a job, as one float64 tensor."""
    postpone_compiler()
    logging.getLogger("lockstep").setLevel(logging.ERROR)
    model = train(world, name, options)[1]
    return torch.cat([parameter.detach().double().flatten() for parameter in model.parameters()])
