"""Prepares the arguments of ``run.prepare``: sorts them by kind, compiles the model, and gives it to the strategy.

The optimizers then step what the strategy holds of the model. What cannot be trained or saved is refused.
Blocks are compiled one by one, so that the keyed randomness between them stays outside of compiled code.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from inspect import isfunction, unwrap
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DataParallel, DistributedDataParallel
from torch.nn.parameter import is_lazy
from torch.optim import Optimizer, SparseAdam
from torch.optim.swa_utils import AveragedModel

from lockstep.checkpoint import model_state, parameter_names
from lockstep.checkpoint.state import encoded_extra_states, tensor_state
from lockstep.checkpoint.writer import require_storable
from lockstep.config.options import RunOptions
from lockstep.core.fingerprint import Context, cpu_of, device_model, digest_tensors
from lockstep.core.users_code import names_in
from lockstep.errors import ConfigError
from lockstep.numerics.blocks import compile_blocks
from lockstep.numerics.compilation import CompiledForward
from lockstep.numerics.hidden_state import draws_globally
from lockstep.numerics.initial_values import InitialValues, empty_tensors, without_values
from lockstep.numerics.precision import Precision
from lockstep.numerics.randomness import KeyedRandomness
from lockstep.numerics.running_buffers import explain_single_values, saved_buffers
from lockstep.numerics.sync_batch_norm import SyncBatchNorm
from lockstep.run.loaders import smallest_micro_batch
from lockstep.run.optimizer_step import PreparedOptimizer
from lockstep.run.session import RunSession, returning_freed_memory
from lockstep.runtime.devices import is_gpu
from lockstep.strategies import IndependentStrategy, Strategy
from lockstep.strategies.absent import AbsentTensor
from lockstep.strategies.optimizer_trial import (
    Unit,
    knows_parameters,
    needs_closure,
    refused_optimizer,
    require_gradients_only,
    require_whole,
    try_optimizer,
)
from lockstep.strategies.sharding import require_separate_memory
from lockstep.text import plural

EVALUATING, FREEZING = "<evaluation mode of ", "<freezing of "
"""Beginnings of names in ``Parts.digests``."""

_STORED = (dict, list, tuple, Tensor, int, float, str, type(None))


@dataclass(frozen=True)
class Parts:
    """The objects of a run, as the user made them."""

    model: nn.Module
    optimizers: tuple[Optimizer, ...] = ()
    schedulers: tuple[Any, ...] = ()
    modules: tuple[nn.Module, ...] = ()
    """Not trained by gradients but kept beside the model, such as a moving average of its weights."""
    frozen: frozenset[str] = frozenset()
    """The names of the model's parameters that required no gradient."""
    start: str = ""
    """Digest of how the values of a model without values will be made; empty where the model has some."""

    @classmethod
    def of(cls, model: Any, others: Sequence[Any], initial_values: InitialValues, *, keep_empty: bool = False) -> Parts:
        """The arguments of ``run.prepare``, sorted by kind; ``ConfigError`` names an argument of any other kind.

        A model that was built without values gets them here, unless the strategy does it: ``keep_empty``.
        """
        _require_plain_model(model)
        if not keep_empty:
            initial_values.fill(empty_tensors(model), torch.device("cpu"))
        optimizers = tuple(each for each in others if isinstance(each, Optimizer))
        modules = tuple(each for each in others if isinstance(each, nn.Module))
        for each in optimizers:
            if isinstance(each, PreparedOptimizer):
                raise ConfigError(
                    f"run.prepare was given the {type(each.wrapped).__name__} that run.prepare of an earlier run "
                    "returned. Make a new one for each run, of the parameters of the model that it trains."
                )
        for module in (model, *modules):
            _require_own_memory(module, initial_values if module is model else None)
        schedulers = tuple(each for each in others if not isinstance(each, Optimizer | nn.Module))
        _require_schedulers(schedulers)
        _require_own_parameters(optimizers, list(model.parameters()))
        if left := [name for name, parameter in model.named_parameters() if parameter.grad is not None]:
            raise ConfigError(
                f"{left[0]!r} has a gradient already, of a backward pass before run.prepare, which would be added to "
                "that of the first step. Write model.zero_grad() before run.prepare."
            )
        if optimizers and not any(parameter.requires_grad for parameter in model.parameters()):
            raise ConfigError(
                "No parameter of the model requires a gradient, so there is nothing to train. Call run.prepare while "
                "those that will be trained require one: parameter.requires_grad_(True)."
            )
        _require_own_optimizers(schedulers, optimizers)
        frozen = frozenset(frozen_parameters(model))
        start = initial_values.digest() if any(True for _ in empty_tensors(model)) else ""
        return cls(model, optimizers, schedulers, modules, frozen, start)

    @property
    def named_modules(self) -> dict[str, nn.Module]:
        """All modules of the model and of those beside it, by name."""
        found = dict(self.model.named_modules())
        for number, beside in enumerate(self.modules):
            found |= {f"module{number}|{name}": module for name, module in beside.named_modules()}
        return found

    def digests(self, prepared: nn.Module, *, of_all_modules: bool) -> dict[str, str]:
        """Digests of what replicas must agree on beside the model's values, each name in angle brackets.

        Args:
            prepared: the model that the user has.
            of_all_modules: every process calls all modules, so that they agree on the modes that a forward pass sets.
        """
        found = {f"<{name}>": value for name, value in hyperparameters(self.optimizers).items()}
        found |= {f"{FREEZING}{name}>": "set" for name in frozen_parameters(prepared)}
        modules = prepared.named_modules() if of_all_modules else [("", prepared)]
        evaluating = [name for name, each in modules if not each.training]
        found |= {f"{EVALUATING}{name or 'the model'}>": "set" for name in evaluating}
        tensors: dict[str, Tensor] = {}
        for name, value in encoded_extra_states(self.named_modules, tensors).items():
            found[f"<extra state of {name or 'the model'}>"] = repr(value)
        found |= {f"<{name}>": digest for name, digest in digest_tensors(tensors).items()}
        for number, module in enumerate(self.modules):
            own = digest_tensors(tensor_state(module))
            found |= {f"<module {number}> {name}": digest for name, digest in own.items()}
        return found

    def require_all_saved(self, wrapped: Iterable[Optimizer]) -> None:
        """Raises ``ConfigError`` where a scheduler steps an optimizer and no checkpoint would hold it.

        Args:
            wrapped: the optimizers that ``run.prepare`` returned, in order.
        """
        known = {id(optimizer) for each in self.schedulers for optimizer in _stepped_by(each)}
        for number, (optimizer, wrapper) in enumerate(zip(self.optimizers, wrapped)):
            scheduled = hasattr(optimizer.step, "_wrapped_by_lr_sched") and id(optimizer) not in known
            if scheduled or hasattr(wrapper.step, "_wrapped_by_lr_sched"):
                raise ConfigError(
                    f"Optimizer {number} ({type(optimizer).__name__}) has a scheduler that run.prepare was not given, "
                    "so a checkpoint would not hold it. Make it first: run.prepare(model, optimizer, scheduler)."
                )


def _require_schedulers(given: Sequence[Any]) -> None:
    """Raises ``ConfigError`` for what is neither a model nor an optimizer, and no scheduler either."""
    for each in given:
        if isinstance(each, type):
            raise ConfigError(
                f"run.prepare was given the class {each.__name__}. Create an instance: {each.__name__}(...)."
            )
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            name = type(each).__name__
            remedy = "Give data sets to run.batches and run.evaluate."
            if any(isinstance(part, Optimizer) for part in getattr(each, "__dict__", {}).values()):
                remedy = f"Give it the optimizer that this steps, and make the {name} of the one that it returns."
            elif hasattr(each, "__next__"):
                remedy = "Make it of the DataLoader afterwards: batches = cycle(accelerator.prepare(loader))."
            raise ConfigError(
                "run.prepare takes a model, optimizers, schedulers, and modules to keep beside the model; a "
                f"{name} is none of them. {remedy}"
            )
        if foreign := _foreign_state(each):
            raise ConfigError(
                f"run.prepare was given a {type(each).__module__}.{type(each).__qualname__}, whose state_dict() "
                f"{foreign}. It takes optimizers of the class torch.optim.Optimizer, and schedulers and the like "
                "whose state_dict() is a dict that a checkpoint can hold: use torch's own optimizer, derive yours "
                "from it, or leave it out of run.prepare in a run that writes no checkpoints."
            )


def _foreign_state(each: Any) -> str:
    """Why no checkpoint could hold a scheduler, or an optimizer of another library, as fastai's; else empty."""
    state = each.state_dict()
    if not isinstance(state, Mapping):
        return f"is a {type(state).__name__}"
    kinds = [type(value).__name__ for value in state.values() if not isinstance(value, _STORED)]
    return f"holds a {kinds[0]}" if kinds and hasattr(each, "zero_grad") else ""


def _require_plain_model(model: Any) -> None:
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"The first argument of run.prepare is of type {type(model).__name__}, which is no model. Write: model, "
            "optimizer = run.prepare(model, optimizer)."
        )
    fsdp = getattr(sys.modules.get("torch.distributed.fsdp"), "FullyShardedDataParallel", DistributedDataParallel)
    for name, module in model.named_modules():
        if isinstance(module, DistributedDataParallel | fsdp) or (module is model and isinstance(model, DataParallel)):
            raise ConfigError(
                f"The model is wrapped in {type(module).__name__}{f' in its part {name!r}' if name else ''}, which "
                "would sum gradients again. Give run.prepare what DDP has as model.module; strategy='fsdp' shards it."
            )


def _require_own_memory(model: nn.Module, initial_values: InitialValues | None) -> None:
    """Raises ``ConfigError`` naming a parameter that has no shape or values yet, or whose elements share memory.

    Modules that torch.jit has compiled, and those that an earlier run has shared out, are refused too.
    """
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule):
            raise ConfigError(
                f"{prefix or 'The model'!r} was compiled by torch.jit, and takes no hooks by which its random numbers "
                "could be keyed. Give run.prepare the module that torch.jit.script or torch.jit.trace was given; "
                "compile=True of lockstep.init compiles it."
            )
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            name = f"{prefix}.{key}" if prefix else key
            if tensor is None:
                continue
            if isinstance(tensor, AbsentTensor):
                raise ConfigError(
                    f"{name!r} belongs to an earlier run, under whose strategy {tensor.absence.strategy!r} "
                    f"{tensor.absence.where}. Build the model anew for each run. To go on from its weights, take state "
                    "= run.state_dict() on all ranks before run.close(), load it into the new model if run.is_main, "
                    "and give run.prepare values_from_main=True."
                )
            if is_lazy(tensor):
                raise ConfigError(
                    f"{name!r} of {type(module).__name__} has no shape before the first forward pass, and run.prepare "
                    "compares shapes over the ranks. Run the model once before run.prepare: with torch.no_grad(): "
                    "model(example_input)."
                )
            if tensor.is_meta and not (initial_values is not None and initial_values.knows(tensor)):
                raise ConfigError(
                    f"{name!r} is on the device 'meta' and has no values. Build the model under `with "
                    "run.empty_model():` instead, which notes how each value is made; run.prepare then makes them."
                )
            if isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ())):
                raise ConfigError(
                    f"{name!r} is a DTensor. Leave out fully_shard: lockstep.init(strategy='fsdp') shards the model."
                )
            if tensor.layout is not torch.strided:
                raise ConfigError(
                    f"{name!r} has the layout {tensor.layout}, and only dense parameters and buffers are compared over "
                    "the ranks and stored in checkpoints. Keep a constant as a plain attribute, self.graph = ...; make "
                    "anything else in forward, of its indices and values."
                )
            is_shared = any(stride == 0 and size > 1 for size, stride in zip(tensor.shape, tensor.stride()))
            if isinstance(tensor, nn.Parameter) and is_shared:
                raise ConfigError(
                    f"The elements of the parameter {name!r} share memory, as expand() makes them, so no optimizer "
                    "can change them one by one. Make it of a copy: nn.Parameter(tensor.expand(...).clone())."
                )


def _require_own_parameters(optimizers: Sequence[Optimizer], parameters: Sequence[Tensor]) -> None:
    """Raises ``ConfigError`` where an optimizer would change a parameter that is not the model's."""
    own = {id(parameter) for parameter in parameters}
    for number, optimizer in enumerate(optimizers):
        if isinstance(optimizer, SparseAdam):
            raise ConfigError(
                f"Optimizer {number} (SparseAdam) steps from sparse gradients alone, and the gradients of a step are "
                "added up over micro-batches as dense ones. Use torch.optim.Adam, which then takes those of "
                "nn.Embedding(..., sparse=True) too, and moves rows that a step has not used by their moving averages."
            )
        if any(each.__module__.startswith("torch.distributed.") for each in type(optimizer).__mro__):
            raise ConfigError(
                f"Optimizer {number} ({type(optimizer).__name__}) exchanges values itself, and checkpoints would lack "
                "what it keeps in other processes. Give run.prepare the optimizer of which it is made, such as "
                "torch.optim.Adam; lockstep.init(strategy='fsdp') shards the state."
            )
        foreign = [p for group in optimizer.param_groups for p in group["params"] if id(p) not in own]
        if foreign:
            raise ConfigError(
                f"Optimizer {number} ({type(optimizer).__name__}) holds {plural(len(foreign), 'parameter')} that the "
                f"model does not have, the first of shape {tuple(foreign[0].shape)}; their gradients would not be "
                "summed over the ranks. Give run.prepare the model they belong to. Put several models into one "
                "nn.ModuleDict, and make a single parameter, such as a learned loss weight, an attribute of the model."
            )


def _require_own_optimizers(schedulers: Sequence[Any], optimizers: Sequence[Optimizer]) -> None:
    """Raises ``ConfigError`` where a scheduler sets the learning rate of another optimizer than those of the run."""
    for number, scheduler in enumerate(schedulers):
        other = getattr(scheduler, "optimizer", None)
        if optimizers and isinstance(other, Optimizer) and not any(other is each for each in optimizers):
            raise ConfigError(
                f"Scheduler {number} ({type(scheduler).__name__}) sets the learning rate of another "
                f"{type(other).__name__} than run.prepare was given, so it would change nothing. Make it of the "
                "optimizer that is trained with."
            )


def _stepped_by(scheduler: Any) -> list[Any]:
    """The optimizers whose learning rate a scheduler sets, its inner schedulers' included."""
    inner = [optimizer for each in getattr(scheduler, "_schedulers", []) for optimizer in _stepped_by(each)]
    return [getattr(scheduler, "optimizer", None), *inner]


def frozen_parameters(model: nn.Module) -> list[str]:
    """The names of the parameters that require no gradient now."""
    with torch._C.DisableTorchFunctionSubclass():  # asking a parameter without values takes longer
        return [name for name, each in model.named_parameters() if not each.requires_grad]


@dataclass(frozen=True)
class PreparedModel:
    """A model as its strategy trains it, and facts about the whole one from before."""

    module: nn.Module
    """The model that the user calls."""
    randomness: KeyedRandomness
    smallest_micro_batch: int
    """The fewest rows that the model can be trained on at once."""
    tensors: dict[str, Tensor]
    """Shape and type of each whole parameter and buffer, as tensors without values."""
    aliases: dict[str, str]
    """Further names of tied tensors."""
    members: list[list[list[str]]]
    """Names of the whole model's parameters in each group of each optimizer."""
    parameters: dict[str, nn.Parameter]
    """As the user sees them between steps, without values where this process has none."""
    averages: Mapping[int, PreparedAverage]
    """The stand-ins for the user's averages of a model that no process holds whole, by the id of each."""

    def require_own_parameters(self) -> None:
        """Raises ``ConfigError`` naming a parameter that was put into the model, or taken out, after ``prepare``."""
        found = dict(self.module.named_parameters())
        known, now = ({id(p): name for name, p in each.items()} for each in (self.parameters, found))
        if known.keys() == now.keys():  # they may have other names, as pruning and parametrizations give them
            return
        changed = [name for each, name in {**known, **now}.items() if each not in known or each not in now]
        raise ConfigError(
            f"The parameter {changed[0]!r} of the model was replaced, added or taken out after run.prepare, so "
            "its gradient would not be summed over the ranks. Change modules before run.prepare, and values in place "
            "(parameter.copy_ under torch.no_grad)."
        )

    def require_own_types(self) -> None:
        """Raises ``ConfigError`` naming a parameter that has another number type than at ``prepare``."""
        for name, parameter in self.parameters.items():
            if isinstance(parameter, AbsentTensor):
                continue  # while nobody computes, it has the type of the forward pass
            if name in self.tensors and (known := self.tensors[name].dtype) != parameter.dtype:
                raise ConfigError(
                    f"The parameter {name!r} was {known} at run.prepare and is {parameter.dtype} now, and gradients "
                    "are summed in memory of the first type. Convert the model before run.prepare."
                )

    def with_all_buffers(self, digests: dict[str, str]) -> dict[str, str]:
        """The digests of what a strategy gave of the model; ``ConfigError`` names a buffer that is missing there."""
        if late := sorted(saved_buffers(self.module).keys() - digests.keys()):
            raise ConfigError(
                f"The buffer {late[0]!r} was registered after run.prepare, where no process holds the whole model, so "
                "it would be missing in fingerprint and checkpoint. Register it before run.prepare, or with "
                "persistent=False."
            )
        return digests


class PreparedAverage(AveragedModel):
    """Stands for the user's ``AveragedModel`` where no process holds the model whole; it shares its tensors.

    Args:
        averaged: the user's, on its device.
        models: the model that the user calls, and the one of which it was made.
        aliases: further names of tied tensors.
        strategy: gives the whole values.
    """

    def __init__(
        self,
        averaged: AveragedModel,
        models: tuple[nn.Module, ...],
        aliases: Mapping[str, str],
        strategy: Strategy,
    ) -> None:
        nn.Module.__init__(self)
        self.wrapped = (averaged,)
        """The user's, in a tuple: its modules belong to this one already."""
        self.module, self.use_buffers = averaged.module, averaged.use_buffers
        self.register_buffer("n_averaged", averaged.n_averaged)
        self._models, self._aliases, self._strategy = models, aliases, strategy

    def update_parameters(self, model: nn.Module) -> None:
        """Updates the average from the whole values of the trained model, or of a part of it. Collective.

        Raises:
            ConfigError: the average is of another part of the model.
        """
        (averaged,) = self.wrapped
        values = {name: tensor.detach().clone() for name, tensor in self._strategy.state()}
        values |= {alias: values[name] for alias, name in self._aliases.items() if name in values}
        parts = [part for whole in self._models for part in whole.named_modules()]
        is_part = any(part is model for _, part in parts)  # else another copy of the whole model
        prefix = next((f"{name}." for name, part in parts if part is model and name), "")
        buffers = (*averaged.module.named_buffers(), *model.named_buffers())
        own = {**{prefix + name: buffer for name, buffer in buffers}, **values}
        names = [prefix + name for name, _ in averaged.module.named_parameters()]
        given = list((model if is_part else self._models[0]).parameters())
        if len(names) != len(given) or not all(name in own for name in names):
            raise ConfigError(
                "update_parameters of an AveragedModel was given another module than the one that it averages. Give it "
                "the model that run.prepare returned, or the submodule of it that is averaged."
            )
        buffer_names = [prefix + name for name, _ in averaged.module.named_buffers()]
        whole = SimpleNamespace(
            parameters=lambda: iter([own[name] for name in names]),
            buffers=lambda: iter([own[name] for name in buffer_names]),
        )
        averaged.update_parameters(whole)  # type: ignore[arg-type]  # as much of a module as torch reads


def prepare_model(parts: Parts, options: RunOptions, strategy: Strategy, precision: Precision) -> PreparedModel:
    """Sets up the model, and gives the optimizers what this process holds of its parameters. Collective.

    Raises:
        ConfigError: the strategy cannot train these parts, or not in the way that was asked for.
    """
    model = parts.model
    averaged = _averages_to_keep(parts, strategy)
    if options.directory is not None:
        require_storable(tensor_state(model))
    names = parameter_names(model)
    for optimizer in parts.optimizers:
        _try_optimizer(optimizer, names, strategy, options.micro_batches)
    if isinstance(strategy, IndependentStrategy):
        strategy.check_optimizers(parts.optimizers)
    if options.channels_last:
        if strategy.initial_values is not None:  # another order of the numbers in memory needs the numbers
            strategy.initial_values.fill(empty_tensors(model), torch.device("cpu"))
        for tensor in (each for each in (*model.parameters(), *model.buffers()) if each.dim() == 4):
            tensor.data = tensor.data.to(memory_format=torch.channels_last)
    smallest = smallest_micro_batch(model)
    in_training = options.shape.micro_batch_size < smallest and not options.sync_batch_norm
    explain_single_values(model, options.global_batch, options.micro_batches, in_training=in_training)
    encoded_extra_states(parts.named_modules, {})  # refuses what no checkpoint could hold
    whole, aliases = model_state(model)
    tensors = {name: without_values(tensor) for name, tensor in whole.items()}
    members = [
        [[names[p] for p in group["params"]] for group in optimizer.param_groups] for optimizer in parts.optimizers
    ]
    precision.prepare(model)
    if options.compile:
        compile_blocks(model)
    _require_trainable_layers(model, options, precision)
    device, apart = strategy.device, strategy.separates_units
    randomness = KeyedRandomness(model, options.seed, device, strategy.devices, apart)
    if draws_globally(model):
        randomness.key_global_generators()
    with returning_freed_memory(device) if parts.start else nullcontext():
        trained = strategy.setup_model(model)
    for module in parts.modules:
        module.to(device)
    for optimizer, own in zip(parts.optimizers, members):
        _set_parameters(optimizer, own, strategy)
    seen = dict(trained.named_parameters())
    averages = {id(each): PreparedAverage(each, (trained, model), aliases, strategy) for each in averaged}
    return PreparedModel(trained, randomness, smallest, tensors, aliases, members, seen, averages)


def _require_trainable_layers(model: nn.Module, options: RunOptions, precision: Precision) -> None:
    """Raises ``ConfigError`` naming a module that would compute otherwise than the options say."""
    for name, module in model.named_modules():
        if isinstance(module, nn.SyncBatchNorm | SyncBatchNorm) and not options.sync_batch_norm:
            raise ConfigError(
                f"{name or 'The model'!r} is a {type(module).__name__}, whose statistics would be those of as many "
                "parts of the batch as there are processes. Build the model with nn.BatchNorm, and give "
                "lockstep.init(sync_batch_norm=True) for statistics of the whole batch."
            )
        if isinstance(vars(module).get("forward"), CompiledForward) and not options.compile:
            raise ConfigError(
                f"{name or 'The model'!r} was compiled by an earlier run, and this one has compile=False. Build the "
                "model anew for each run, or give lockstep.init(compile=True)."
            )
        precision.require_repeatable(repr(name) if name else "The model", module)


def _averages_to_keep(parts: Parts, strategy: Strategy) -> list[AveragedModel]:
    """The averages beside a model that no process holds whole; ``ConfigError`` where another module is beside it."""
    if strategy.replicated:
        return []
    for module in parts.modules:
        if not isinstance(module, AveragedModel) or isinstance(strategy, IndependentStrategy):
            raise ConfigError(
                f"run.prepare was given a {type(module).__name__} beside the model, and strategy "
                f"{strategy.name!r} holds no whole model in one process from which it could be updated. Use "
                "torch.optim.swa_utils.AveragedModel, which fsdp, pipeline, tensor and the synchronous "
                "parameter_server keep whole on every process, or strategy 'ddp', or leave it out."
            )
    require_separate_memory(parts.model, strategy.name)
    return [module for module in parts.modules if isinstance(module, AveragedModel)]


def _try_optimizer(optimizer: Optimizer, names: Mapping[Tensor, str], strategy: Strategy, micro_batches: int) -> None:
    """Finds out what an optimizer needs of the strategy; ``ConfigError`` where it does not have that."""
    is_whole = micro_batches == 1 and strategy.replicated and len(strategy.devices) < 2
    methods = [each for kind in type(optimizer).__mro__ for each in vars(kind).values() if isfunction(each)]
    if not is_whole and any("grad_sample" in names_in(unwrap(each).__code__) for each in methods):
        raise ConfigError(
            f"{type(optimizer).__name__} computes gradients from those of single samples that hooks leave on the "
            "parameters (grad_sample), as Opacus does, and takes them for those of the whole batch, which here is "
            f"divided into {micro_batches} micro-batches under strategy {strategy.name!r}. Let forward= return clipped "
            "gradients and add noise in the loop, as docs/moving.md shows, or train on one device with micro_batches=1."
        )
    if needs_closure(optimizer):
        require_whole(optimizer, strategy)
    is_apart = not strategy.replicated and not isinstance(strategy, IndependentStrategy)
    if is_apart:
        require_gradients_only(optimizer, strategy.device, strategy.name)
    if strategy.largest_unit < Unit.MODEL:
        trial = try_optimizer(optimizer, strategy.device, dimensions=strategy.cut_dimensions)
        if trial.unit > strategy.largest_unit:
            if not strategy.keeps_whole or trial.unit is Unit.MODEL:
                raise refused_optimizer(optimizer, trial, strategy.name)
            strategy.whole_parameters |= {names[p] for group in optimizer.param_groups for p in group["params"]}
    elif is_apart:
        strategy.draws_in_step |= try_optimizer(optimizer, strategy.device).draws
    if strategy.replaces_parameters and knows_parameters(optimizer):
        raise ConfigError(
            f"Strategy {strategy.name!r} gives the optimizer parameters of its own in place of the model's, and "
            f"{type(optimizer).__name__} steps some of the model's in another way than others, by which object they "
            "are (id(p), a dict or list of parameters, or the model): it would not find them. Put what differs into "
            "parameter groups, or set it on the parameters, as in p.scale = 0.1; or use strategy 'ddp'."
        )


def _set_parameters(optimizer: Optimizer, members: list[list[str]], strategy: Strategy) -> None:
    """Replaces the parameters in each group of an optimizer by what the strategy holds of them in this process."""
    held = strategy.trainable()
    for group, group_names in zip(optimizer.param_groups, members):
        if strategy.replicated and all(held.get(name, p) is p for name, p in zip(group_names, group["params"])):
            continue
        for name, parameter in zip(group_names, group["params"]):
            state = optimizer.state.pop(parameter, {})
            if state and name in held:
                optimizer.state[held[name]] = {
                    key: _local_shard(name, value, held[name], parameter, strategy) for key, value in state.items()
                }
        group["params"] = [held[name] for name in group_names if name in held]


def _local_shard(name: str, value: Any, held: Tensor, parameter: Tensor, strategy: Strategy) -> Any:
    """This process's part of an optimizer's state from before ``prepare``; some optimizers begin with one."""
    if not isinstance(value, Tensor) or value.shape != parameter.shape or not value.dim():
        return value
    part = strategy.local_shard(name, value)
    return value if part is None else part.detach().to(held.device, copy=True).contiguous()


def stepped_before(parts: Parts) -> list[str]:
    """The optimizers and schedulers that have taken steps, as when the script continues a run by itself."""
    schedulers = [each for each in parts.schedulers if getattr(each, "last_epoch", 0) > 1]
    return [type(each).__name__ for each in (*filter(_has_stepped, parts.optimizers), *schedulers)]


def _has_stepped(optimizer: Optimizer) -> bool:
    """As far as its state says so; some optimizers begin with one."""
    for state in optimizer.state.values():
        steps = state.get("step", state.get("momentum_buffer") is not None) if isinstance(state, dict) else 0
        if isinstance(steps, bool | int | float) or (isinstance(steps, Tensor) and steps.numel() == 1):
            return bool(steps > 0)
    return False


def context_of_run(
    options: RunOptions, session: RunSession, optimizers: Sequence[Optimizer], *, portable: bool
) -> Context:
    """The conditions on which the bits of a run depend, as its checkpoints record them."""
    return Context(
        global_batch=options.global_batch,
        micro_batches=options.micro_batches,
        seed=options.seed,
        precision=options.precision,
        reduce=options.reduce,
        threads=session.threads,
        device=device_model(session.device, portable=portable),
        cpu="" if portable else cpu_of(session.device),
        torch=torch.__version__,
        compiled=options.compile,
        channels_last=options.channels_last,
        sync_batch_norm=options.sync_batch_norm,
        tensor_shards=options.tensor.shards,
        deterministic=is_gpu(session.device) and options.deterministic,
        optimizers=tuple(implementation(each) for each in optimizers),
    )


def hyperparameters(optimizers: Sequence[Optimizer]) -> dict[str, str]:
    """Every hyperparameter of every group of every optimizer as text, to compare over ranks."""
    return {
        f"{key} of optimizer {number}, group {position}": repr(plain_number(value))
        for number, optimizer in enumerate(optimizers)
        for position, group in enumerate(optimizer.param_groups)
        for key, value in group.items()
        if key not in ("params", "param_names")
    }


def plain_number(value: Any) -> Any:
    """The number in a tensor of one entry; any other value as it is."""
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def implementation(optimizer: Optimizer) -> str:
    """The class and how it computes a step (for-loop, foreach, fused), which decides bits."""
    group = optimizer.param_groups[0]
    how = next((name for name in ("fused", "foreach") if group.get(name)), "default")
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__} {how}"


def held_objects(parts: Parts, prepared: PreparedModel) -> dict[int, str]:
    """The names of the objects whose values are in checkpoints, by their ids."""
    models = [(0, parts.model), (0, prepared.module)]
    for number, each in enumerate(parts.modules, 1):
        models += [(number, each), (number, prepared.averages.get(id(each), each))]
    found: list[tuple[object, str]] = [
        (each, f"{name or 'the model'!r} of model {number}")
        for number, model in models
        for kind in ("modules", "parameters", "buffers")
        for name, each in getattr(model, f"named_{kind}")()
    ]
    optimizers = parts.optimizers
    wrapped = [each for one in optimizers for each in vars(one).values() if isinstance(each, Optimizer)]
    steppers = [*optimizers, *parts.schedulers, *wrapped]
    found += [(each, f"{type(each).__name__} {number}") for number, each in enumerate(steppers)]
    return {id(each): name for each, name in reversed(found)}
