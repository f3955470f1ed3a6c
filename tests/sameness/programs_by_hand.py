"""Random programs on Lockstep against the same on a plain PyTorch run, in float64: every value, apart from rounding.

    python -m tests.sameness.programs_by_hand --seeds 0:100           what differs, and a count
    python -m tests.sameness.programs_by_hand --seeds 17:18 --show    the program of a seed

``PlainRun`` has the methods of ``Run`` that a program calls, and does with them what a hand-written loop for one device
does: one forward and one backward pass over the whole batch. The batches are those that Lockstep has read. A program
whose values depend on random numbers, or on how a batch is divided, as the plain run itself shows, is not compared.
"""

import argparse
import collections
import contextlib
import copy
import dataclasses
import io
import linecache
import logging
import math
import multiprocessing
import os
import random
import re
import sys
import tempfile
import traceback
import types
import warnings
from pathlib import Path

import numpy as np
import torch
from tests.sameness.drawing import draw, text_of
from tests.sameness.parts import BLOCKS, DATA, LINES, LOSSES, OPTIMIZERS
from tests.sameness.trials import PROGRAM
from torch.utils.data import DataLoader

TOLERANCE = 1e-5
"""Relative; the losses of some programs are computed in float32."""
_NOT_COMPARED = ("fingerprint", "predictions", "kept", " size")


class NotCompared(Exception):
    """The program does something that has no counterpart in a plain loop."""


@dataclasses.dataclass
class PlainRun:
    """The methods of a ``Run`` in plain PyTorch.

    Args:
        recorded: for each step, the data of its micro-batches.
        together: the batch is one; otherwise its micro-batches are computed one after the other.
        seed: of the random numbers after ``prepare``.
    """

    recorded: list
    together: bool = True
    seed: int = 0
    is_main = True

    def __post_init__(self):
        self.options = types.SimpleNamespace(directory=None)
        self.position = types.SimpleNamespace(step=0, epoch=0, done=False)
        self.extra = {}

    def prepare(self, model, *others):
        self.model = model
        for set_seed in (random.seed, np.random.seed, torch.manual_seed):
            set_seed(self.seed)
        return (model, *others) if others else model

    def epochs(self, count):
        for epoch in range(self.position.epoch, count):
            self.position.epoch, self.position.step = epoch, 0
            yield epoch
        self.position.epoch = count

    def batches(self, data, drop_last=False):
        for epoch, step, parts in self.recorded:
            if epoch == self.position.epoch:
                self.position.step = step
                yield types.SimpleNamespace(parts=parts, plan=types.SimpleNamespace(position=step))
                self.position.step = step + 1

    def backward(self, batch, loss, forward=None):
        parts = [_joined(batch.parts)] if self.together else batch.parts
        total, weights = 0.0, 0.0
        for part in parts:
            output = _output(self.model, part, forward)
            value, weight = _weighed(loss(output, _target(part, forward)), len(_rows(part)))
            total, weights = total + value, weights + weight
        mean = total / max(float(weights), 1e-300) if float(weights) else total
        mean.backward()
        return mean.detach()

    def clip_gradients(self, max_norm):
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm)

    def evaluate(self, data, metric, forward=None):
        total, weights = 0.0, 0.0
        for part in self._in_evaluation(data):
            value, weight = _weighed(
                metric(_output(self.model, part, forward), _target(part, forward)), len(_rows(part))
            )
            total, weights = total + float(value), weights + float(weight)
        return total / weights

    def predict(self, data, keep, forward=None, everywhere=False):
        return torch.cat([keep(_output(self.model, part, forward)) for part in self._in_evaluation(data)])

    def _in_evaluation(self, data):
        collate = data.collate_fn if isinstance(data, DataLoader) else None
        sampler = None
        if isinstance(data, DataLoader):
            data, sampler = data.dataset, data.sampler
        if not hasattr(data, "__getitem__"):
            raise NotCompared("a stream")
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        with torch.no_grad():
            yield from DataLoader(data, batch_size=1 if self.together else 4, sampler=sampler, collate_fn=collate)
        for module, mode in modes:
            module.training = mode

    def state_dict(self):
        return {name: value.clone() for name, value in self.model.state_dict().items()}

    def load_state_dict(self, weights):
        self.model.load_state_dict(weights)

    def fingerprint(self):
        return ""

    def add_callback(self, callback):
        raise NotCompared("a callback")


def _joined(parts):
    first = parts[0]
    if torch.is_tensor(first):
        return torch.cat(parts)
    if isinstance(first, dict):
        return {name: _joined([part[name] for part in parts]) for name in first}
    if isinstance(first, (list, tuple)):
        return [_joined(list(values)) for values in zip(*parts)]
    raise NotCompared(f"a batch of {type(first).__name__}")


def _rows(part):
    while not torch.is_tensor(part):
        part = part[next(iter(part))] if isinstance(part, dict) else part[0]
    return part


def _output(model, part, forward):
    if forward is not None:
        return forward(part)
    return model(**part) if isinstance(part, dict) else model(*part[:-1])


def _target(part, forward):
    return part if isinstance(part, dict) or forward is not None else part[-1]


def _weighed(result, rows):
    """The sum and the weight of what a loss or metric returned: a mean, a value per sample or token, or the pair."""
    if isinstance(result, (tuple, list)):
        return result
    if result.ndim == 0 or (rows > 1 and result.shape == (1,)):
        return result.reshape(()) * rows, rows
    return result.sum(), result.numel()


def _copied(leaf):
    return leaf.detach().clone() if torch.is_tensor(leaf) else copy.deepcopy(leaf)


def _module(text):
    module = types.ModuleType("program")
    sys.modules["program"], module.__file__ = module, PROGRAM
    linecache.cache[PROGRAM] = (len(text), None, text.splitlines(keepends=True), PROGRAM)
    torch.manual_seed(0)
    exec(compile(text, PROGRAM, "exec"), module.__dict__)
    module.hashed = lambda tensor: float(tensor.detach().double().sum())
    return module


def with_lockstep(text, recipe):
    """The values of a program on Lockstep, its batches, and whether it was warned of a gradient that is bounded."""
    from lockstep.core.world import World
    from lockstep.data.batch import map_leaves
    from lockstep.run import Run, RunOptions
    from lockstep.runtime.events import Callback

    recorded = []

    class Recording(Callback):
        def on_step_begin(self, batch):
            parts = [map_leaves(part.data, _copied) for part in batch.micro_batches]
            recorded.append((batch.plan.epoch, batch.plan.step, parts))

    told = io.StringIO()
    logging.getLogger("lockstep").addHandler(logging.StreamHandler(told))
    module = _module(text)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        run = Run(RunOptions.of(**{**module.RECIPE, **recipe, "strategy": "single"}), World())
        run.add_callback(Recording())
        found = module.train(run, module.EPOCHS)
        run.close()
    return found, recorded, "does not double" in told.getvalue()


def by_hand(text, recorded, **settings):
    """The values of a program on a plain run."""
    module = _module(text)
    return module.train(PlainRun(copy.deepcopy(recorded), **settings), module.EPOCHS)


_DRAWS = re.compile(r"[Dd]rop|rand|noise|normal_|shuffle|permut|[sS]ample|stochastic|bernoulli|draw", re.IGNORECASE)
"""What the source of a part that draws random numbers holds."""


def program_of(seed):
    """The source of a seed's program in float64, and the changes to its recipe; most parts that draw are left out."""
    tables = (BLOCKS, LINES, LOSSES, DATA, OPTIMIZERS)
    drawing = {name for table in tables for name, part in table.items() if _DRAWS.search(str(part))}
    program = draw(seed, drawing)
    recipe = {"precision": "fp32"} | ({"micro_batches": 1} if seed % 2 else {})
    text = text_of(dataclasses.replace(program, saves=""))
    text = text.replace(".float()", ".double()").replace("torch.float32", "torch.float64")
    return text.replace("\nD, C, H,", "\ntorch.set_default_dtype(torch.float64)\n\nD, C, H,", 1), recipe


def first_difference(expected, found):
    """The first value that is another one than expected, as a sentence; empty for none."""
    for key, value in expected.items():
        if any(each in key for each in _NOT_COMPARED):
            continue
        if key not in found:
            return f"{key} is missing"
        if not _close(value, found[key]):
            return f"{key}: {value!r} by hand, {found[key]!r} with Lockstep"[:300]
    return ""


def _close(one, other):
    if isinstance(one, str) and "0x" in one:
        return _close(float.fromhex(one), float.fromhex(other))
    if isinstance(one, float) and isinstance(other, float):
        return math.isclose(one, other, rel_tol=TOLERANCE, abs_tol=TOLERANCE) or (math.isnan(one) and math.isnan(other))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_close, one, other))
    if isinstance(one, dict):
        return list(one) == list(other) and all(map(_close, one.values(), other.values()))
    return one == other


def outcome(seed):
    """How a seed's program ended: a word, and a sentence."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    text, recipe = program_of(seed)
    from lockstep.errors import LockstepError

    try:
        found, recorded, is_warned = with_lockstep(text, recipe)
    except LockstepError as error:
        return "refused", f"{type(error).__name__}: {error}"
    except Exception as error:
        return "wrong in itself", f"{type(error).__name__}: {error}"
    try:
        plain = by_hand(text, recorded)
        if first_difference(plain, by_hand(text, recorded, seed=1)):
            return "random", ""
        if first_difference(plain, by_hand(text, recorded, together=False)):
            return "depends on the division", ""
    except NotCompared as error:
        return "not compared", str(error)
    except Exception as error:
        return "raised by hand", f"{type(error).__name__}: {error}\n{traceback.format_exc()}"
    said = first_difference(plain, found)
    return ("warned" if is_warned else "differs", said) if said else ("equal", "")


def _answer(seed, sender):
    quiet = os.open(os.devnull, os.O_WRONLY)
    os.dup2(quiet, 1), os.dup2(quiet, 2)
    sender.send(outcome(seed))


def main(arguments=None):
    """Compares the programs of some seeds, each in a process of its own."""
    parser = argparse.ArgumentParser(prog="python -m tests.sameness.programs_by_hand")
    parser.add_argument("--seeds", default="0:20", metavar="A:B", help="programs A to B - 1")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for a program")
    parser.add_argument("--show", action="store_true", help="print the programs and run none")
    parser.add_argument("--folder", default="", help="where the program of each difference is written")
    given = parser.parse_args(arguments)
    first, last = map(int, given.seeds.split(":"))
    counts, context = collections.Counter(), multiprocessing.get_context("fork")
    for seed in range(first, last):
        if given.show:
            print(program_of(seed)[0], "\n#", program_of(seed)[1])
            continue
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=_answer, args=(seed, sender))
        process.start()
        sender.close()
        try:
            word, said = receiver.recv() if receiver.poll(given.limit) else ("hung", "")
        except EOFError:
            word, said = "died", ""
        process.kill()
        process.join()
        counts[word] += 1
        if word in ("differs", "hung", "died", "raised by hand"):
            print(f"{seed}: {word}: {said}", flush=True)
            if given.folder:
                Path(given.folder).mkdir(exist_ok=True)
                (Path(given.folder) / f"{seed}.py").write_text(program_of(seed)[0])
    print(*(f"{count} {word}" for word, count in counts.most_common()), sep=", ")
    return 1 if counts["differs"] else 0


if __name__ == "__main__":
    sys.exit(main())
