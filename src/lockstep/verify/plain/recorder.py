"""Records the steps of any PyTorch loop, so that two runs of it can be compared.

    recorder = Recorder("records/four", model, optimizer)     # every rank, before the first step
    for indices, x, y in loader:
        losses = cross_entropy(model(x), y, reduction="none")
        losses.mean().backward()
        recorder.batch(samples=indices, inputs=x, losses=losses)
        optimizer.step()
        recorder.step()

Parameters, buffers, gradients, settings, random generators and the order of layers are read by hooks on model and
optimizer. Tensors are recorded as sketches, sums of entries with fixed random signs: since the sketch of a sum is the
sum of the sketches, the weights with which the ranks' gradients were summed follow from a few numbers per parameter (a
count sketch: Charikar, Chen and Farach-Colton, 2002).
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import time
import zlib
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from numbers import Integral
from operator import index
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from lockstep.config.checks import file_path
from lockstep.core.fingerprint import device_model, digest_tensor
from lockstep.core.generators import encoded_state
from lockstep.core.values import parts_of_tensor, repr_of, short_digest, stored_in
from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.numerics.sync_batch_norm import SyncBatchNorm
from lockstep.run.prepare import hyperparameters, implementation
from lockstep.runtime.devices import open_gpus, peak_memory
from lockstep.text import grouped
from lockstep.verify.plain.record import LOSS, BatchRecord, Measure, RankRecord, Sample, StepRecord

LENGTH = 16
"""Numbers per tensor; a smaller tensor is its own sketch."""


class Sketcher:
    """Measures tensors. The signs follow from a tensor's name and size, so they are equal on every rank and run."""

    def __init__(self) -> None:
        self._signs: dict[str, Tensor] = {}

    def measure(self, name: str, tensor: Tensor, *, bits: bool = True) -> Measure:
        """Digest (if ``bits``), norm and sketch of a tensor."""
        values = tensor.detach().to(torch.float64).reshape(-1)
        digest = digest_tensor(tensor) if bits else ""
        return Measure(digest, float(values.norm()), tuple(self._sketch(name, values).tolist()))

    def _sketch(self, name: str, values: Tensor) -> Tensor:
        if values.numel() <= LENGTH:
            return values
        signs = self._signs.get(name)
        if signs is None or signs.numel() != values.numel() or signs.device != values.device:
            generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            drawn = torch.randint(0, 2, values.shape, generator=generator, dtype=torch.int8)
            signs = self._signs[name] = (2 * drawn - 1).to(values.device)
        missing = -values.numel() % LENGTH
        return functional.pad(values * signs, (0, missing)).view(-1, LENGTH).sum(0)


@dataclass
class RecordingRequest:
    """The folder and number of steps that ``lockstep verify`` requests from a script."""

    folder: Path
    steps: int
    is_taken: bool = False
    """True once a Recorder writes there."""


class StopRecording(BaseException):
    """Ends a script after the last requested step; an ``except Exception`` of the script does not catch it."""


requested: ContextVar[RecordingRequest | None] = ContextVar("requested", default=None)
"""Set by ``lockstep verify --script`` around the script."""


def innermost(model: nn.Module) -> dict[nn.Module, str]:
    """The modules below ``model`` that contain no other, and their names."""
    modules = [(name, module) for name, module in model.named_modules() if name]
    return {module: name for name, module in modules if next(module.children(), None) is None}


def tied(model: nn.Module) -> dict[str, list[str]]:
    """Parameters that have several names: the first, and the others."""
    named = nn.Module.named_parameters(model, remove_duplicate=False)
    names = grouped((id(parameter), name) for name, parameter in named)
    return {first: rest for first, *rest in names.values() if rest}


def _row_digests(rows: Tensor) -> list[str]:
    return [digest_tensor(row)[:16] for row in rows]


def _targets(targets: Tensor) -> list[Sample]:
    if targets.dim() == 1 and not targets.is_floating_point():
        return [int(each) for each in targets]
    return [*_row_digests(targets)]


def watch_calls(model: nn.Module, note: Callable[[str, str, str], None]) -> list[RemovableHandle]:
    """Calls ``note`` with name, digest of input and of output for each call of an innermost module; returns the hooks.

    Calls without gradients are ignored.
    """
    names = innermost(model)
    inputs: dict[nn.Module, str] = {}
    handles = []

    def before(module: nn.Module, arguments: Any) -> None:
        inputs[module] = _digest(arguments)  # before the module may change it in place

    def after(module: nn.Module, arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled() and module in inputs:
            note(names[module], inputs[module], _digest(output))

    for module in names:
        handles += [module.register_forward_pre_hook(before), module.register_forward_hook(after)]
    return handles


def _digest(value: Any) -> str:
    """Of the first tensor, without its shape: flattening changes no values."""
    first = value[0] if isinstance(value, tuple | list) and value else value
    return digest_tensor(first.reshape(-1))[:16] if isinstance(first, Tensor) else ""


def context(model: nn.Module, optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """The conditions of the whole run; called within the forward pass, where autocast is known."""
    parameter = next(model.parameters())
    device = parameter.device.type
    precision = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else parameter.dtype
    return {
        "threads": str(torch.get_num_threads()),
        "device": device_model(parameter.device),
        "torch": torch.__version__,
        "precision": str(precision).removeprefix("torch."),
        "optimizers": ", ".join(implementation(each) for each in optimizers),
    }


def batch_norms(model: nn.Module) -> list[str]:
    """Names of the modules that normalise with the statistics of this rank's batch."""
    own = (nn.SyncBatchNorm, SyncBatchNorm)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, _BatchNorm) and module.training and not isinstance(module, own)
    ]


def generators() -> str:
    """Digest of the state of the generators that a model's forward pass draws from."""
    digest = hashlib.sha256(torch.get_rng_state().numpy().data)
    if open_gpus():
        digest.update(torch.cuda.get_rng_state().numpy().data)
    return digest.hexdigest()[:16]


def other_generators() -> dict[str, str]:
    """Digests of the global generators of NumPy and Python."""
    states = {"numpy.random": np.random.get_state(legacy=False), "random": random.getstate()}
    return {name: hashlib.sha256(pickle.dumps(state)).hexdigest()[:16] for name, state in states.items()}


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


def attributes(modules: Mapping[str, nn.Module]) -> dict[str, str]:
    """The state that modules keep outside of parameters and floating-point buffers, as text or digest, by name.

    Numbers, texts, small containers of them, tensors, arrays and random generators count; ``num_batches_tracked`` and
    anything else does not.
    """
    found = {}
    for prefix, root in modules.items():
        for path, module in root.named_modules(prefix=prefix):
            kept = {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
            whole = {n: b for n, b in module.named_buffers(recurse=False) if not b.is_floating_point()}
            for key, value in (kept | whole).items():
                text = _text(value) if key != "num_batches_tracked" else None
                if text is not None:
                    found[f"{path}.{key}" if path else key] = text
    return found


_MOST_ENTRIES = 64


def _text(value: Any, depth: int = 4) -> str | None:
    """A short text that changes with a value; None for a value of an unknown kind."""
    if value is None or isinstance(value, bool | int | float | complex | str):
        return repr_of(value)
    if isinstance(value, np.ndarray | np.generic):
        return _text(torch.as_tensor(value)) if value.dtype.kind in "biuf" else None
    if isinstance(value, Tensor):
        return " ".join(["tensor", *(digest_tensor(each)[:8] for each in parts_of_tensor(value))])
    if (state := encoded_state(value)) is not None:
        return f"generator {short_digest(repr(state).encode())}"
    if depth and isinstance(value, list | tuple | set | deque | dict) and len(stored_in(value)) <= _MOST_ENTRIES:
        entries = stored_in(value) if isinstance(value, dict) else [("", each) for each in stored_in(value)]
        texts = [(str(key), _text(each, depth - 1)) for key, each in entries]
        # The order of a set is another one in each process.
        return repr(sorted(texts, key=repr) if isinstance(value, set) else texts)
    return None


_MOST_OUTPUTS = 4096


def output_rows(output: Any) -> list[list[float]]:
    """A sketch of each row of the first tensor of an output; of a large one, of entries at equal distances."""
    first = next((leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor) and leaf.dim()), None)
    if first is None or not first.numel() or not first.is_floating_point():
        return []
    rows = first.detach().reshape(len(first), -1)
    rows = rows[:, :: max(1, rows.shape[1] // _MOST_OUTPUTS)].double()
    rows = functional.pad(rows, (0, -rows.shape[1] % LENGTH)) if rows.shape[1] > LENGTH else rows
    return rows.view(len(rows), -1, min(rows.shape[1], LENGTH)).sum(1).tolist()


_COARSE = ("bfloat16", "float16")


def coarse_type(gradient: Tensor, world_size: int) -> str:
    """The coarser type that all entries of a gradient fit into, or of its multiple by ``world_size``; else empty."""
    values = gradient.detach().reshape(-1)
    if values.dtype not in (torch.float32, torch.float64) or not values.isfinite().all() or not values.any():
        return ""
    for part in (values[:LENGTH], values):  # most are seen not to fit by a few entries
        fitting = [name for name in _COARSE if any(_fits(part * n, name) for n in {1, world_size})]
        if not fitting:
            return ""
    return fitting[0]


def _fits(values: Tensor, name: str) -> bool:
    gap = (values.to(getattr(torch, name)).to(values.dtype) - values).abs()
    return bool((gap <= 2.0**-21 * values.abs()).all())


class Recorder:
    """Writes ``rank-000.jsonl`` and so on: one line for each step. Not collective: no rank waits for another.

    Args:
        folder: one for each run; a rank's file in it is replaced.
        model: the model, or the DistributedDataParallel or DataParallel around it. Of a model that is spread over
            ranks, the part that this rank holds, with the names that its parameters have in the whole.
        optimizers: all that are stepped.
        first_step: first step of a resumed run; the recorded steps before it are kept.
        loss: the loss, if it is a module; what it keeps between calls is recorded too.

    Raises:
        ConfigError: no optimizer was given, parameters are sharded (DTensor), or the file lacks the steps before.
    """

    def __init__(
        self,
        folder: str | Path,
        model: nn.Module,
        *optimizers: Optimizer,
        first_step: int = 0,
        loss: nn.Module | None = None,
    ) -> None:
        self._model = model.module if isinstance(model, DistributedDataParallel | DataParallel) else model
        self._optimizers, self._sketcher = optimizers, Sketcher()
        _require_arguments(folder, self._model, optimizers, first_step, loss)
        _require_plain(self._model, optimizers)
        session = requested.get()
        if session is not None:
            _take(session)
        self._enough = session.steps if session is not None else None
        rank, world_size = _rank_and_world_size()
        self._path = Path(session.folder if session is not None else folder) / f"rank-{rank:03d}.jsonl"
        self._record = RankRecord(rank, world_size, torch.initial_seed())
        self._number, self._hooked = first_step, set[str]()
        self._step: StepRecord | None = None
        self._modules = {"": self._model} if loss is None else {"": self._model, LOSS: loss}
        self._attributes = attributes(self._modules)
        self._watches: list[RemovableHandle] = []
        if first_step:
            _keep(self._path, first_step)
        elif not hasattr(self._model, "_orig_mod"):  # a compiled model calls no modules
            self._watches = watch_calls(self._model, self._call)
        self._model.register_forward_pre_hook(self._before_forward)
        self._model.register_forward_hook(self._after_forward)
        for optimizer in optimizers:
            optimizer.register_step_pre_hook(self._before_update)
        self._mark = time.perf_counter()

    def batch(
        self,
        *,
        samples: Sequence[int] | Tensor | None = None,
        inputs: Tensor | None = None,
        targets: Tensor | None = None,
        losses: Tensor | None = None,
        loss: Tensor | float | None = None,
    ) -> None:
        """Adds to what is known of the latest forward pass. What is not given is not compared.

        Args:
            samples: index in the data set of each sample that this rank has read; without them samples are known by
                the digests of their inputs.
            inputs: their inputs, as the model got them; first dimension as ``samples``.
            targets: their targets; first dimension as ``samples``.
            losses: the loss of each of them, 1-dim.
            loss: the loss as the loop reports it: the mean over the global batch.
        """
        began = time.perf_counter()
        step = self._begun()
        if not step.batches:
            step.batches.append(BatchRecord())
        record = step.batches[-1]
        for name, given in (("inputs", inputs), ("targets", targets), ("losses", losses)):
            if given is not None and not (isinstance(given, Tensor) and (given.dim() or name == "losses")):
                raise ConfigError(
                    f"{name}={given!r:.60} was given to recorder.batch. Give a tensor with a row for each sample."
                )
        record.inputs = _row_digests(inputs) if inputs is not None else []
        record.samples = _indices(samples) if samples is not None else list(record.inputs)
        record.targets = _targets(targets) if targets is not None else []
        record.losses = losses.detach().double().reshape(-1).tolist() if losses is not None else []
        record.loss = _number(loss) if loss is not None else None
        named = (("inputs", record.inputs), ("targets", record.targets), ("losses", record.losses))
        for name, found in named:
            if found and len(found) != len(record.samples):
                raise ConfigError(
                    f"recorder.batch was given {len(found)} {name} and {len(record.samples)} samples. Pass one of each "
                    "per sample; losses per sample come from a loss with reduction='none'."
                )
        self._mark += time.perf_counter() - began

    def step(self) -> None:
        """Ends a step: writes its line. Call it after ``optimizer.step()``, also where that was left out."""
        began = time.perf_counter()
        step = self._begun()
        step.seconds = began - self._mark
        step.memory = peak_memory(torch.device("cpu"))
        step.values = {n: self._sketcher.measure(n, p) for n, p in self._model.named_parameters()}
        now = attributes(self._modules).items()
        step.attributes = {name: value for name, value in now if self._attributes.get(name) != value}
        while self._watches:
            self._watches.pop().remove()
        with self._path.open("a") as file:
            file.write(json.dumps(step, default=vars) + "\n")
        self._step, self._number = None, self._number + 1
        if self._enough is not None and self._number >= self._enough:
            raise StopRecording
        self._mark = time.perf_counter()

    def _begun(self) -> StepRecord:
        """The step that is being recorded; begins one if none is."""
        if self._step is not None:
            return self._step
        if not self._number:
            self._record.context = context(self._model, self._optimizers)
            self._record.start = {n: self._sketcher.measure(n, p) for n, p in self._model.named_parameters()}
            self._record.tied = tied(self._model)
            self._record.modules = list(innermost(self._model).values())
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._path.write_text(self._record.header() + "\n")
        measure, named = self._sketcher.measure, list(self._model.named_parameters())
        step = self._step = StepRecord(self._number)
        step.begin = {name: digest_tensor(parameter) for name, parameter in named}
        floating = ((n, b) for n, b in self._model.named_buffers() if b.is_floating_point())
        step.buffers = {name: measure(name, buffer) for name, buffer in floating}
        step.settings = hyperparameters(self._optimizers)
        step.trained = [name for name, parameter in named if parameter.requires_grad]
        step.batch_norms = batch_norms(self._model)
        held = {id(p) for each in self._optimizers for group in each.param_groups for p in group["params"]}
        step.unheld = [name for name, p in named if p.requires_grad and id(p) not in held]
        for name, parameter in named:
            if parameter.requires_grad and name not in self._hooked:
                self._hooked.add(name)
                parameter.register_hook(partial(self._gradient, name))
        return step

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        if torch.is_grad_enabled():
            began = time.perf_counter()
            step = self._begun()
            if not step.batches:
                step.evaluating = [name for each, name in innermost(self._model).items() if not each.training]
            step.batches.append(BatchRecord(generators=(generators(), ""), states=other_generators()))
            self._mark += time.perf_counter() - began

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled() and self._step is not None and self._step.batches:
            began = time.perf_counter()
            latest = self._step.batches[-1]
            latest.generators = (latest.generators[0], generators())
            latest.drawn = [name for name, state in other_generators().items() if state != latest.states[name]]
            latest.outputs = output_rows(output)
            self._mark += time.perf_counter() - began

    def _gradient(self, name: str, gradient: Tensor) -> None:
        if self._step is not None and self._step.batches and not gradient.is_sparse:
            began = time.perf_counter()
            self._step.batches[-1].gradients[name] = self._sketcher.measure(name, gradient, bits=False)
            self._mark += time.perf_counter() - began

    def _before_update(self, optimizer: Optimizer, arguments: Any, keywords: Any) -> None:
        began = time.perf_counter()
        step = self._begun()
        step.updates += 1
        step.settings = hyperparameters(self._optimizers)
        for name, parameter in self._model.named_parameters():
            if parameter.grad is not None and not parameter.grad.is_sparse:
                step.used[name] = self._sketcher.measure(name, parameter.grad)
                if kind := coarse_type(parameter.grad, self._record.world_size):
                    step.coarse[name] = kind
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    step.state[f"{key} of {name}"] = self._sketcher.measure(name, value, bits=False)
        self._mark += time.perf_counter() - began

    def _call(self, name: str, before: str, after: str) -> None:
        if self._step is not None:
            self._step.calls.append((name, before, after))


def _take(request: RecordingRequest) -> None:
    if request.is_taken:
        raise ConfigError(
            "lockstep verify compares what one Recorder records, and the script makes a second one. Leave one of them "
            "out, and verify the script once more with the other."
        )
    request.is_taken = True


def _require_arguments(
    folder: object, model: object, optimizers: Sequence[object], first_step: object, loss: object
) -> None:
    if problem := file_path(folder):
        raise ConfigError(f"The folder of Recorder {problem}")
    for name, each in (("model", model), *([] if loss is None else [("loss", loss)])):
        if not isinstance(each, nn.Module):
            raise ConfigError(f"The {name} of Recorder is {each!r:.60}. Give a torch.nn.Module.")
    for each in optimizers:
        if isinstance(each, type) or not hasattr(each, "register_step_pre_hook"):
            raise ConfigError(f"Recorder was given the optimizer {each!r:.60}. Give torch.optim.Optimizer objects.")
    if not isinstance(first_step, Integral) or first_step < 0:
        raise ConfigError(f"first_step={first_step!r:.60} was given. Give a number of steps, 0 or more.")


def _indices(samples: Sequence[int] | Tensor) -> list[Sample]:
    try:
        return [index(n) for n in samples]
    except TypeError as error:
        raise ConfigError(
            f"samples={samples!r:.60} was given to recorder.batch. Give the index of each sample in the data set."
        ) from error


def _number(loss: Tensor | float) -> float:
    try:
        return float(loss.detach() if isinstance(loss, Tensor) else loss)
    except (TypeError, ValueError, RuntimeError) as error:
        raise ConfigError(f"loss={loss!r:.60} was given to recorder.batch. Give one number.") from error


def _require_plain(model: nn.Module, optimizers: Sequence[Optimizer]) -> None:
    if not optimizers:
        raise ConfigError("Recorder(folder, model) was given no optimizer. Pass every optimizer that the loop steps.")
    sharded = [name for name, p in model.named_parameters() if type(p.data).__name__ == "DTensor"]
    if sharded:
        raise ConfigError(
            f"Recorder supports ordinary tensors only, and {sharded[0]!r} is sharded (DTensor). Record the loop with "
            "DistributedDataParallel, or use lockstep verify with strategy fsdp."
        )


def _rank_and_world_size() -> tuple[int, int]:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    world = World.from_environment()
    return world.rank, world.world_size


def _keep(path: Path, steps: int) -> None:
    """Truncates a file after a number of steps."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    if len(lines) < steps + 1:
        raise ConfigError(
            f"Recorder(first_step={steps}) cannot resume {path}, which holds {max(0, len(lines) - 1)} steps. Pass the "
            "folder in which the run was recorded before it stopped."
        )
    path.write_text("".join(lines[: steps + 1]))
