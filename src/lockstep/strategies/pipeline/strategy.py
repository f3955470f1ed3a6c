"""Pipeline parallel: stages of the model in different processes, micro-batches one after the other.

        rank 0, stage 0   F0 F1 .. .. B0 -- F2 B1 -- F3 B2 -- .. B3 -- | update of stage 0
        rank 1, stage 1   .. F0 B0 -- F1 B1 -- F2 B2 -- F3 B3 --       | update of stage 1

A rank holds the parameters, gradients and optimizer state of its stages only. Each stage adds the gradients of its
micro-batches in the tree, by the same hooks as ``single``. With a data axis, each stage is reduced over its replicas.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils._pytree import tree_flatten

from lockstep.checkpoint.state import tensor_state
from lockstep.config.strategy_options import Level, PipelineOptions
from lockstep.core.plan import Share
from lockstep.core.summation_tree import sum_of_squares
from lockstep.data.batch import Batch, MicroBatch
from lockstep.distributed.collectives import all_gather_rows
from lockstep.distributed.process_group import Groups
from lockstep.distributed.rank_exchange import RankExchange, SharedMemoryExchange
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import Snapshot
from lockstep.numerics.hooks import backward_hooks, forward_hooks, hooked_globally, hooks_made, is_hooked
from lockstep.numerics.initial_values import empty_tensors, give_values, without_values
from lockstep.numerics.running_buffers import RunningBuffers
from lockstep.reduce import Reducer
from lockstep.strategies.absent import (
    Absence,
    AbsentBuffer,
    AbsentParameter,
    computing,
    explain_missing_parameters,
    gradient_of,
    held_of,
)
from lockstep.strategies.gradients import StepSums
from lockstep.strategies.loop_writes import LoopWrites, setting_values
from lockstep.strategies.optimizer_trial import Unit
from lockstep.strategies.pipeline.chain import autocasts, reading, what_it_calls, what_it_reads
from lockstep.strategies.pipeline.channels import PipelineChannel
from lockstep.strategies.pipeline.links import OTHER_FREEZING
from lockstep.strategies.pipeline.loss_reads import LossReads, StagesRead
from lockstep.strategies.pipeline.partition import Partition
from lockstep.strategies.pipeline.schedule import Action, order_of
from lockstep.strategies.pipeline.stage import Passes, PipelineChannels, Stage, refusing_backward
from lockstep.strategies.sharding import require_plain_state
from lockstep.strategies.strategy import Compute, StepResult, Strategy

_CHECKED_STEPS = 2
"""The first steps, in which the stages are watched for changes of what the loss or other stages read."""
_CHECKED_AGAIN = 32
"""The first step after those, as of rehearsals: on a GPU the host waits for each value that is looked at."""


def _empty(module: nn.Module, names: Mapping[int, str], absence: Absence) -> None:
    """Takes the values of a module's parameters, and puts tensors without values in place of its buffers."""
    for _, tensor in empty_tensors(module):
        give_values(tensor, torch.empty_like(tensor, device="cpu"))
    for inner in module.modules():
        for parameter in inner._parameters.values():
            if parameter is not None and not isinstance(parameter, AbsentParameter):
                parameter.data = torch.empty_like(parameter)  # in memory of its own, which is given back
                parameter.untyped_storage().resize_(0)
                AbsentParameter.describe(parameter, names[id(parameter)], None, absence)
                parameter.__class__ = AbsentParameter
        for key, buffer in inner._buffers.items():
            if buffer is not None and not isinstance(buffer, AbsentBuffer):
                inner._buffers[key] = AbsentBuffer(buffer, names[id(buffer)], absence)


def _forward_of(module: nn.Module) -> Any:
    """The function that a call of a module runs: its own, or that of its class."""
    return vars(module).get("forward", type(module).forward)


def kind_of(value: Any) -> tuple[object, ...]:
    """Returns what determines the shapes and types inside a model: those of its input, and autocast."""
    leaves, structure = tree_flatten(value)
    shapes = tuple((leaf.shape, leaf.dtype) if isinstance(leaf, Tensor) else leaf for leaf in leaves)
    return str(structure), *autocasts(), *shapes


class PlacedPipeline(nn.Module):
    """Runs all stages in order, for evaluation; to all else it is the user's model.

    Modules, parameters and buffers are the model's own, by their names there, those of other ranks' stages without
    values. Every rank of the pipeline must call it with the same inputs, and gets the output. One micro-batch is in the
    pipeline at a time.

    Args:
        passes: this rank's stages by number.
        answers: channels for the output, by place in the pipeline.
        absences: of what is not here, which know whether a step is being computed.
        whole: a context in which the stages have whole parameters; where they are shared out, the ranks that share
            them must call the model together too.
        calling: a context of each call, which may raise ``ConfigError``.
    """

    def __init__(
        self,
        model: nn.Module,
        passes: dict[int, Passes],
        answers: dict[int, PipelineChannel],
        absences: Sequence[Absence],
        whole: Callable[[], AbstractContextManager[None]] = nullcontext,
        calling: Callable[[], AbstractContextManager[None]] = nullcontext,
    ) -> None:
        super().__init__()
        self._modules, self._parameters, self._buffers = model._modules, model._parameters, model._buffers
        self._passes, self._answers, self._absences, self._whole = passes, answers, absences, whole
        self._calling = calling
        vars(self).update(_model=model, training=model.training)  # not a child: its children are

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_model"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Sets an attribute of the user's model, whose modules read it."""
        model = vars(self).get("_model")
        if model is None or name in vars(self):
            super().__setattr__(name, value)
        else:
            setattr(model, name, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> PlacedPipeline:
        """Refuses a copy, which would have the values of some stages only."""
        raise ConfigError(
            "The model was copied or pickled, and no process has the values of all stages. Copy it before run.prepare, "
            "write the weights with run.save(), or use strategy 'ddp'."
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled."""
        return self.__deepcopy__({})

    def train(self, mode: bool = True) -> PlacedPipeline:
        """Sets the mode, as the user's own class does it."""
        vars(self)["_model"].train(mode)
        self.training = mode
        return self

    def __bool__(self) -> bool:
        return True

    def __len__(self) -> int:
        return len(vars(self)["_model"])

    def __iter__(self) -> Iterator[Any]:
        return iter(vars(self)["_model"])

    def __getitem__(self, key: Any) -> Any:
        return vars(self)["_model"][key]

    def __setitem__(self, key: Any, value: Any) -> None:
        vars(self)["_model"][key] = value

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The output of the whole model, whose backward is refused. Collective over the ranks of the pipeline."""
        if absence := next((each for each in self._absences if each.is_computing), None):
            raise ConfigError(
                "The model that run.prepare returned was called in the middle of run.backward, by the loss, a hook or "
                f"a module's forward. Strategy {absence.strategy!r} has its stages in several processes, each "
                "of which is at another place of the step then, so they cannot answer. Give the model all inputs at "
                "once (torch.cat) and take the output apart in the loss, call it before run.backward, or use strategy "
                "'ddp' or 'fsdp'."
            )
        if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
            raise ConfigError(
                "The model was called within a transform of torch.func, such as vmap or jvp, or in forward mode. Its "
                "stages run in several processes, which torch cannot transform. Use strategy 'ddp' or 'fsdp'."
            )
        kind = (self.training, *kind_of((args, kwargs)))
        with self._calling():
            with self._whole(), torch.no_grad():
                for each in self._passes.values():
                    output = each.evaluate(kind, args, kwargs)
            channels = list(self._answers.values())
            if any(each.is_last for each in self._passes.values()):
                for channel in channels:
                    channel.send(kind, output)
            else:
                description, tensors = channels[0].receive(kind)
                output = description.value(tensors)
            for each in self._passes.values():
                each.neighbours.flush()
            for channel in channels:
                channel.flush()
        return refusing_backward(output, (args, kwargs), self.parameters())


class Pipeline(Strategy):
    """Trains the stages of one model on the ranks of a pipeline, and replicas of the pipeline along a data axis.

    Args:
        groups: of a mesh with an axis ``pipeline``, and maybe ``data``.
        reducers: one for each stage of this rank, over the data axis; none if that has one holder.
        exchange: between all ranks.
        timeout: seconds a rank waits for another in shared memory.
        shared_memory: whether CPU ranks of one host may use it.
    """

    name = "pipeline"
    replicated = False
    computes_together = True
    interleaves = True
    largest_unit = Unit.PARAMETER
    separates_units = True
    fills_model = True
    axis = "data"
    """The axis of the mesh over which micro-batches are shared out."""

    def __init__(
        self,
        device: torch.device,
        micro_batches: int,
        groups: Groups,
        reducers: Sequence[Reducer],
        exchange: RankExchange,
        options: PipelineOptions,
        *,
        timeout: float,
        shared_memory: bool,
    ) -> None:
        self.device, self._micro_batches = device, micro_batches
        self.share = Share(holders=groups.size(self.axis), holder=groups.coordinate(self.axis))
        self.level = reducers[0].level if reducers else Level.BITWISE
        self._per_rank = options.stages_of_a_rank
        self._channels = PipelineChannels(
            groups, device, around=self._per_rank > 1, timeout=timeout, shared=shared_memory
        )
        self.model_group = self._channels.group
        stages = self._channels.length * self._per_rank
        self.partition = Partition("pipeline", stages, options.split, options.balance == "time")
        self._groups, self._reducers, self._options = groups, reducers, options
        self._exchange = exchange
        self._last_ranks = [
            rank
            for rank in range(groups.mesh.ranks)
            if groups.mesh.coordinate("pipeline", rank) == self._channels.length - 1
        ]

    def setup_model(self, model: nn.Module) -> nn.Module:
        """Keeps this rank's stages of the model, on the device, and empties the others. Collective."""
        # A pattern must match somewhere, if not in every stage.
        RunningBuffers.names(model, self.running_buffers)
        require_plain_state(model, self.name)
        channels, parts = self._channels, self.partition.of(model)
        kept = {inner for part in parts for link in part for inner in link.module.modules()}
        self._opened = {name: each for name, each in model.named_modules() if each not in kept}
        self._hooks_seen, self._steps = -1, 0
        self._module_hooks, self._steps_alike, self._last_step = -1, 0, -1
        """The number of hooks on modules, and of the steps since it changed, of which the first pass counts."""
        names = [part[-1].name for part in parts]
        mine = range(channels.place, len(parts), channels.length)
        modules = [[link.module for link in part] for part in parts]
        self._note_state(model, modules)
        self.absences: list[Absence] = []
        self.writes = LoopWrites()
        self._frozen_seen: dict[bytes, int] = {}
        self._passes: dict[int, Passes] = {}
        self._sums: dict[int, StepSums] = {}
        self._trainable: dict[str, nn.Parameter] = {}
        self._answers = channels.answers(names[-1])
        elsewhere = {
            f"{link.name}.{name}".strip("."): inner
            for number, part in enumerate(parts)
            for link in part
            for name, inner in link.module.named_modules()
            if number not in mine
        }
        for local, number in enumerate(mine):
            stage = Stage(parts[number], model)
            if self.initial_values is not None:
                self.initial_values.fill(empty_tensors(stage), self.device)
            stage = stage.to(self.device)
            neighbours, name = channels.neighbours(number, names), parts[number][0].name
            self._passes[number] = Passes(stage, neighbours, name, elsewhere)
            self._sums[number] = self._make_sums(stage, local)
        self._empty_others(model, modules)
        placed = PlacedPipeline(*(model, self._passes, self._answers, self.absences, self._whole_stages, self._calling))
        state = tensor_state(model)
        self._held = {name: held_of(state[name]) for name in self._specs if self._is_mine(name)}
        """The held tensors of the model's state, by name: no copies, as assignments to ``.data`` are seen."""
        self._present: tuple[Sequence[int], Tensor] = (), torch.empty(0)
        """Which gradients there are here after a step, and why to stop; the same on the device."""
        self._whole_parameters = list(placed.parameters())
        self._frozen, self._freezing_changed = self._frozen_now(), False
        self._elsewhere = {n: p for n, p in placed.named_parameters() if isinstance(p, AbsentParameter)}
        self._opened["the prepared model"] = placed
        opened = self._opened.items()
        self._read = [(name, each, _forward_of(each), dict(each._modules)) for name, each in opened]
        own = {name: each for name, each in opened if each is not placed}
        self._attributes = {name: what_it_reads(each) for name, each in own.items()}
        self._calls = {name: what_it_calls(each) for name, each in own.items()}
        self._require_called()
        return placed

    def _empty_others(self, model: nn.Module, stages: Sequence[Sequence[nn.Module]]) -> None:
        """Empties the modules of the stages that other ranks have."""
        names = {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}
        for number, modules in enumerate(stages):
            if number not in self._passes:
                rank = self._channels.ranks[number % self._channels.length]
                absence = Absence(self.name, f"rank {rank} has its stage")
                self.absences.append(absence)
                for module in modules:
                    _empty(module, names, absence)

    def backward(self, batch: Batch, compute: Compute, *, scale: float, stop: int) -> StepResult:
        """Runs this rank's part of the schedule and reduces. See ``Strategy.backward``."""
        self._require_called()
        self._steps += 1
        self._steps_alike += self._steps_alike <= _CHECKED_STEPS or batch.plan.step != self._last_step
        self._last_step = batch.plan.step
        mine, leaves = self.share.of(batch.plan.leaves), batch.plan.leaves
        order = order_of(self._options.schedule, self._channels.place, self._channels.length, self._per_rank, len(mine))
        for number, sums in self._sums.items():
            sums.begin(mine, leaves)
            self._passes[number].forget()
        self._losses = torch.zeros(2, self.share.longest(self._micro_batches), dtype=torch.float64, device=self.device)
        with computing(self.absences):
            self._run_schedule(batch, mine, order, compute, scale)
        return self._finish(len(mine), stop)

    def _run_schedule(
        self, batch: Batch, mine: Sequence[int], order: Sequence[Action], compute: Compute, scale: float
    ) -> None:
        """Does this rank's passes in their order."""
        self._freezing_changed = self._frozen != (frozen := self._frozen_now())
        self._frozen = frozen
        kinds = [("trained", self._frozen, *kind_of(each.data)) for each in batch.micro_batches]
        if self._is_watching:
            self._require_unset(compute.readers)
        begun: set[int] = set()
        for action, following in zip(order, (*order[1:], None)):
            micro_batch, kind = batch.micro_batches[action.place], kinds[action.place]
            received = partial(self._expect, following, batch.micro_batches, kinds)
            if action.forward and action.place not in begun:
                begun.add(action.place)
                compute.begin(micro_batch)
            else:
                compute.resume(micro_batch, "forward" if action.forward else "backward")
            passes, sums = self._passes[action.stage], self._sums[action.stage]
            reads = self._read_elsewhere(passes, compute)
            if action.forward:
                sums.begin_forward()
                output, target = passes.run(micro_batch, kind, compute, received)
                sums.end_forward(micro_batch.k)
                if passes.is_last:
                    loss = self._end(action.place, len(mine), output, target, micro_batch, compute)
                for each in reads:
                    each.require_unchanged(passes.name)
                if passes.is_last:
                    passes.end_in(micro_batch.k, loss if scale == 1.0 else loss * scale)
                else:
                    passes.pass_on(micro_batch.k, kind, output)
            else:
                if compute.disturbs and not (passes.is_last and self._options.schedule == "1f1b"):
                    passes.disturb(micro_batch, compute)
                passes.run_back(micro_batch.k, kind, received)
                for each in reads:
                    each.require_unchanged(passes.name)
                sums.tree.end_micro_batch()
                if action.stage == min(self._passes):
                    for call in self.events.micro_batch_end:
                        call(micro_batch)

    def _read_elsewhere(self, passes: Passes, compute: Compute) -> list[LossReads | StagesRead]:
        """Looks at what stages, the loss and metrics of other processes read now, if this step is watched."""
        reads: list[LossReads | StagesRead] = [StagesRead(passes.others)] if self._is_watching else []
        if (self._is_watching or self._steps <= _CHECKED_STEPS) and not passes.is_last:
            first, *metrics = compute.readers
            reads += [LossReads(first), *(LossReads(each, "metric") for each in metrics)]
        return reads

    def note_readers(self, readers: Sequence[Callable[..., Any]]) -> None:
        """See ``Strategy.note_readers``."""
        for passes in self._passes.values():
            passes.readers = readers

    @property
    def _is_watching(self) -> bool:
        """True in the first steps, and each time that their number has doubled: the loop may have changed something."""
        steps = self._steps_alike
        return steps <= _CHECKED_STEPS or (steps >= _CHECKED_AGAIN and steps.bit_count() == 1)

    def _require_unset(self, readers: Sequence[Callable[..., Any]]) -> None:
        """Raises ``ConfigError`` where a loss reads what the forward of an opened module, which is not run, sets."""
        for name in self._calls:
            reads, module = [*map(LossReads, readers)], self._opened[name]
            with reading(module, training=module.training):
                for each in reads:
                    each.require_unchanged(name)

    def places_not_set(self) -> list[str]:
        """See ``Strategy.places_not_set``."""
        found: list[str] = []
        for name in self._calls:
            module = self._opened[name]
            before = Snapshot({name: module}, restorable=False, gradients=False)
            with reading(module, training=module.training):
                found += before.changed(Snapshot({name: module}, restorable=False, gradients=False))
        return found

    def _frozen_now(self) -> int:
        """A number for what is frozen now, equal on all ranks: it decides which activations need gradients."""
        with torch._C.DisableTorchFunctionSubclass():
            frozen = bytes(not parameter.requires_grad for parameter in self._whole_parameters)
        return self._frozen_seen.setdefault(frozen, zlib.crc32(frozen))

    def gather(self, row: Tensor) -> Tensor:
        """The rows of the ranks with the last stage, shape (holders, n). Collective over the world."""
        rows = all_gather_rows(row, self._groups.world)
        return torch.stack([rows[rank] for rank in self._last_ranks])

    def release(self) -> None:
        """See ``Strategy.release``."""
        super().release()
        self._groups.release()
        self._channels.release()
        self._exchange.release()
        for reducer in self._reducers:
            reducer.release()

    def trainable(self) -> Mapping[str, nn.Parameter]:
        """The parameters of this rank's stages that require a gradient."""
        return self._trainable

    def watched(self) -> Mapping[str, Tensor]:
        """See ``Strategy.watched``: a tied parameter by its first name, as on the ranks that do not have it."""
        held = {id(t): (n, t) for n, t in reversed(self._held.items()) if isinstance(t, nn.Parameter)}.values()
        return {**dict(held), **{gradient_of(n): p.grad for n, p in held if p.grad is not None}}

    def squares(self) -> Tensor:
        """See ``Strategy.squares``: each stage's, added to the others' zeros."""
        own, zero = self._own_squares(), torch.zeros((), dtype=torch.float64, device=self.device)
        found = torch.stack([own.get(name, zero) for name in self._trained] or [zero])
        dist.all_reduce(found, group=self._channels.group)
        return found

    def state(self) -> Iterator[tuple[str, Tensor]]:
        """See ``Strategy.state``: each tensor from the rank of its stage."""
        for name, spec in self._specs.items():
            yield name, self.gather_full(name, self._held.get(name), spec.dtype)

    def own_rows(self) -> Mapping[str, Tensor]:
        """The tensors of this rank's stages, from the first of their replicas."""
        held = self._held if self._groups.coordinate(self.axis) == 0 else {}
        return {name: tensor.detach() for name, tensor in held.items()}

    def load_state(self, state: Mapping[str, Tensor]) -> None:
        """Copies the values into this rank's stages."""
        with torch.no_grad():
            for name, tensor in self._held.items():
                tensor.copy_(state[name])

    def gather_full(self, name: str, part: Tensor | None, dtype: torch.dtype) -> Tensor:
        """See ``Strategy.gather_full``: what the stage's rank holds, given to all."""
        if not self._is_mine(name):
            part = torch.empty(self._specs[name].shape, dtype=dtype, device=self.device)
        assert part is not None, f"the rank of the stage of {name!r} holds it"
        packed = part.detach().contiguous()
        dist.broadcast(packed, self._channels.ranks[self._keeper[name]], group=self._channels.group)
        return part.detach() if self._is_mine(name) else packed

    def local_shard(self, name: str, whole: Tensor) -> Tensor | None:
        """The tensor itself where the parameter's stage is, None elsewhere."""
        return whole if self._is_mine(name) else None

    @property
    def all_bytes_sent(self) -> int:
        """See ``Strategy.all_bytes_sent``: activations, their gradients, and those of parameters over the data axis."""
        return self._channels.bytes_sent + sum(reducer.bytes_sent for reducer in self._reducers)

    def _require_called(self) -> None:
        """Raises ``ConfigError`` for a hook of the user that would not run, or for other modules than the user's."""
        for name, module, forward, kept in self._read:
            children = module._modules
            if children != kept:
                changed = next(key for key in (*children, *kept) if children.get(key) is not kept.get(key))
                raise ConfigError(
                    f"The module {f'{name}.{changed}'.lstrip('.')!r} of the model was replaced, added or taken out "
                    f"after run.prepare, and strategy {self.name!r} has put the modules into stages. Change modules "
                    "before run.prepare."
                )
            if forward is not _forward_of(module):
                raise ConfigError(
                    f"The forward of {name or 'the model'!r} was replaced after run.prepare, and strategy "
                    f"{self.name!r} calls what is in it in several processes. Replace it before run.prepare, which "
                    "then keeps the module in one stage, or use strategy 'ddp'."
                )
            before = self._attributes.get(name)
            if before is not None and (now := what_it_reads(module)) != before:
                self._attributes[name] = now
                if self._calls[name] != what_it_calls(module):
                    changed = next(key for key in (*now, *before) if now.get(key) != before.get(key))
                    raise ConfigError(
                        f"{changed!r} was changed after run.prepare, and the forward of {name or 'the model'!r} calls "
                        f"other modules now than those that strategy {self.name!r} has put into stages. Set it before "
                        "run.prepare, or use strategy 'ddp' or 'layers'."
                    )
        if self._hooks_seen != hooks_made():
            self._require_no_hooks()

    def _require_no_hooks(self) -> None:
        """Raises ``ConfigError`` for a hook of the user that would not run, and watches the next steps again."""
        self._hooks_seen, self._steps = hooks_made(), 0
        passes = [*self._passes.values()]
        modules = [module for each in passes for module in (*each.stage.modules(), *each.others.values())]
        kinds = [each for module in modules for each in (*forward_hooks(module), *backward_hooks(module))]
        if self._module_hooks != (count := sum(map(len, kinds))):  # hooks on tensors are made in every step
            self._module_hooks, self._steps_alike = count, 0
        for name, module in self._opened.items():
            if any(map(is_hooked, (*forward_hooks(module), *backward_hooks(module)))):
                raise ConfigError(
                    f"A hook was registered on {name or 'the model'!r} after run.prepare, and strategy {self.name!r} "
                    "calls what is in it in several processes, so the hook would not run. Register it before "
                    "run.prepare, which then keeps the module in one stage, or on modules within it, or use strategy "
                    "'ddp'."
                )
        if hooked_globally():
            raise ConfigError(
                "Hooks are registered for all modules (torch.nn.modules.module.register_module_forward_hook or one "
                f"like it), and under strategy {self.name!r} no process calls all modules. Register them on the "
                "modules that they are for, or use strategy 'ddp'."
            )

    def _note_state(self, model: nn.Module, parts: Sequence[Sequence[nn.Module]]) -> None:
        """Notes the tensors of the whole model, and the place of the rank that keeps each."""
        stage_of = {
            id(tensor): number
            for number, modules in enumerate(parts)
            for module in modules
            for tensor in (*module.parameters(), *module.buffers())
        }
        state = tensor_state(model)
        self._keeper = {n: stage_of[id(tensor)] % self._channels.length for n, tensor in state.items()}
        self._specs = {name: without_values(tensor) for name, tensor in state.items()}
        self._trained = sorted(name for name, p in model.named_parameters() if p.requires_grad)

    def _is_mine(self, name: str) -> bool:
        """Returns whether a parameter or buffer is held here."""
        return self._keeper[name] == self._channels.place

    def _own_squares(self) -> dict[str, Tensor]:
        """The sum of squares of the gradients of this rank's stages."""
        found = {name: parameter.grad for name, parameter in self._trainable.items()}
        return {name: sum_of_squares(gradient) for name, gradient in found.items() if gradient is not None}

    def _make_sums(self, stage: Stage, local: int, held: Mapping[str, nn.Parameter] | None = None) -> StepSums:
        """The sums of this rank's stage number ``local``; ``held`` as in ``GradientTree``."""
        names = [name for name, _ in stage.named_buffers()]
        here = [pattern for pattern in self.running_buffers if any(fnmatchcase(name, pattern) for name in names)]
        trained = {name: p for name, p in stage.named_parameters() if p.requires_grad}
        self._trainable |= {name: p if held is None else held[name] for name, p in trained.items()}
        reducer = self._reducers[local] if self._reducers else None
        k, buffers = self._micro_batches, RunningBuffers(stage, here)
        return StepSums(trained, buffers, reducer, self.share, k, self.device, held)

    @contextmanager
    def _calling(self) -> Iterator[None]:
        """A context of a call of the model by the loop, whose error leaves other ranks waiting for its output."""
        self._require_called()
        self.require_joint_call()
        try:
            yield
        except Exception as error:
            if self._channels.ranks[1:]:
                self.fail("A call of the model", error)
            raise

    def _whole_stages(self) -> AbstractContextManager[None]:
        """A context in which this rank's stages have whole parameters, to which their forward passes may write."""
        return setting_values(self)

    def _expect(
        self, action: Action | None, micro_batches: Sequence[MicroBatch], kinds: list[tuple[object, ...]]
    ) -> None:
        if action is not None:
            k = micro_batches[action.place].k
            self._passes[action.stage].expect(kinds[action.place], k, forward=action.forward)

    def _end(
        self, place: int, count: int, output: Any, target: Any, micro_batch: MicroBatch, compute: Compute
    ) -> Tensor:
        """The loss of the holder's micro-batch number ``place``; the last one's sends those of all to all stages."""
        with explain_missing_parameters(self.name):
            loss, weight = compute.loss(output, target, micro_batch)
            self._losses[0, place], self._losses[1, place] = loss.detach(), weight
        if place == count - 1:
            for channel in self._answers.values():
                channel.send("losses", self._losses)
                self.bytes_outside_steps += self._losses.nbytes  # losses do not count
        return loss

    def _finish(self, count: int, stop: int) -> StepResult:
        if count and self._channels.place < self._channels.length - 1:
            (channel,) = self._answers.values()
            self._losses = channel.receive("losses")[1][0]
        losses, weights = self._losses[:, :count]
        for waits in self.events.exchange_begin:
            waits()
        results = [sums.reduce(list(losses), list(weights), stop) for sums in self._sums.values()]
        for ends in self.events.exchange_end:
            ends()
        finite = torch.stack([result.finite for result in results]).all()
        gradients = [getattr(self._trainable.get(name), "grad", None) is not None for name in self._trained]
        present = (self._frozen, -self._frozen, *gradients)
        if present != self._present[0]:  # a copy to a device, which the host waits for
            self._present = present, torch.tensor(present, device=self.device)
        stops = torch.full((1,), stop, dtype=torch.int64, device=self.device)
        flags = torch.cat([stops, self._present[1], (~finite).long().view(1)])
        if isinstance(self._exchange, SharedMemoryExchange):  # a fifth of the time
            flags = self._exchange.all_gather(flags).amax(0)
        else:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=self._groups.world)
        if self._freezing_changed and flags[1] != -flags[2]:  # before waiting for what nobody may receive
            raise ConfigError(OTHER_FREEZING)
        for passes in self._passes.values():
            passes.neighbours.flush()
        for channel in self._answers.values():
            channel.flush()
        for name, has_gradient in zip(self._trained, flags[3:-1].unbind()):
            if name in self._elsewhere:
                self._elsewhere[name].has_gradient = has_gradient
        return replace(results[0], stop=flags[0], finite=flags[-1] == 0)
