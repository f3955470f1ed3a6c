"""Tensors that stand for values which this process does not have, and answer what needs no values.

p.shape, p.dtype, p.device    the answer
p.mul_(0.9)                   done to the part that is here, and counted, as every rank has to ask for it
p.sum(), torch.save(p)        ConfigError: what is not here, and what to write instead
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from inspect import get_annotations
from typing import Any, Self, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from lockstep.errors import ConfigError
from lockstep.numerics.initial_values import without_values
from lockstep.runtime.torch_internals import NO_VALUES_HERE

_T = TypeVar("_T", bound=Tensor)

_KNOWN = frozenset(
    {
        *("shape", "dtype", "layout", "requires_grad", "is_leaf", "ndim", "grad_fn", "nbytes", "itemsize"),
        *("_version", "names", "_backward_hooks", "_post_accumulate_grad_hooks", "_base", "is_sparse"),
        *("is_quantized", "is_nested", "is_mkldnn", "is_sparse_csr", "is_conj", "is_neg", "_is_view"),
        *("is_xpu", "is_mps", "is_xla", "is_hpu", "is_ipu", "is_maia", "is_vulkan", "is_mtia", "is_ort"),
        *("size", "dim", "numel", "nelement", "stride", "ndimension", "element_size", "storage_offset"),
        *("is_contiguous", "is_floating_point", "is_complex", "is_signed", "has_names"),
        *("requires_grad_", "__hash__", "__len__", "__repr__", "__format__", "is_shared", "is_inference"),
        *("register_hook", "register_post_accumulate_grad_hook"),
    }
)
"""The attributes and methods of a parameter that need no values, and are the same wherever these are."""

_WHERE: dict[str, Callable[[torch.device], Any]] = {
    "device": lambda device: device,
    "get_device": lambda device: -1 if device.index is None else device.index,
    "is_cpu": lambda device: device.type == "cpu",
    "is_cuda": lambda device: device.type == "cuda",
    "is_meta": lambda device: False,
}
"""The attributes that tell code where to put its own tensors."""

_FACTORS = frozenset({"mul_", "div_", "true_divide_", "__imul__", "__idiv__", "__itruediv__"})

_SCALED = _FACTORS | {
    *("copy_", "clamp_", "clip_", "clamp_min_", "clamp_max_", "neg_", "negative_", "zero_", "sign_", "sgn_"),
    *("nan_to_num_", "fill_"),
}
"""Changes of each number by itself, exact wherever it lies: what a process holds of an absent tensor gets them."""


@dataclass
class Absence:
    """Why a process has no values of some parameters, for messages."""

    strategy: str
    where: str
    """Who has them, as the end of "under strategy 'fsdp' ..."."""
    is_computing: bool = False
    """True within a step, where every process runs micro-batches of its own, so that changes would not agree."""
    is_set_by_run: bool = False
    """True while the run sets values, as in the step of an optimizer, and hooks may change them."""
    asked: dict[str, tuple[int, bool]] = field(default_factory=dict)
    """How often the loop has changed each tensor in place, and whether that surely was noticed where its values are."""

    def note_change(self, name: str, *, surely: bool = True) -> None:
        """Counts a change by the loop."""
        if name and not self.is_set_by_run:
            count, noticed = self.asked.get(name, (0, False))
            self.asked[name] = count + 1, noticed or surely

    def values(self, name: str, kind: str = "parameter") -> ConfigError:
        """The error of code that needs values."""
        return ConfigError(
            f"The {kind} {name!r} is used outside of the forward pass of its module, where under strategy "
            f"{self.strategy!r} {self.where}. Call the module, not module.forward(); return what is needed from that "
            "module's forward, write the weights with run.save(), take them with run.state_dict(), which all ranks "
            "call and the main process gets, set them with run.load_state_dict(), average them in a "
            "torch.optim.swa_utils.AveragedModel that run.prepare is given, or use strategy 'ddp'."
        )

    def gradient(self, name: str) -> ConfigError:
        """The error of code that needs gradients."""
        return ConfigError(
            f"The gradient of {name!r} was asked for, and under strategy {self.strategy!r} {self.where}. Clip with "
            "run.clip_gradients, scale it in place, clear it with optimizer.zero_grad(), or use strategy 'ddp'."
        )


class AbsentTensor(torch.Tensor):
    """A tensor whose values are not in this process: answers what its shape, type and place do, and refuses the rest.

    What is changed in place, by a factor, a bound or a whole tensor of its shape, is changed in the part that is held
    here.
    """

    parameter_name: str
    parameter_device: torch.device
    absence: Absence
    part_of: Callable[[Tensor], Tensor] = staticmethod(lambda whole: whole)
    """Gives the part that ``held_part`` has of a tensor of its shape."""

    @classmethod
    def make(cls, form: Tensor, name: str, device: torch.device, absence: Absence) -> Self:
        """Makes one of the shape, strides and type of ``form``; see the attributes."""
        made = torch.Tensor._make_subclass(cls, form, False)
        made.parameter_name, made.parameter_device, made.absence = name, device, absence
        return made

    @property
    def held_part(self) -> Tensor | None:
        """The part of it that this process has."""
        return None

    @property
    def counted_name(self) -> str:
        """The name under which changes are counted."""
        return self.parameter_name

    def refusal(self, name: str) -> ConfigError:
        """The error of code that needs values."""
        return self.absence.values(name)

    def shows_change(self, changed: str, args: Sequence[Any]) -> bool:
        """True if a change in place is surely noticed where the values are: its version counts it."""
        return True

    def answer(self, asked: str, args: Sequence[Any]) -> Any:
        """The answer where it takes more than the shape and type; ``NotImplemented`` for none."""
        return NotImplemented

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Answers what needs no values; raises ``ConfigError`` otherwise."""
        asked = key = getattr(func, "__name__", "")
        if asked in ("__get__", "__set__", "__delete__"):
            key = getattr(func, "__self__", func).__name__
            asked = f"{asked.strip('_')} {key}"
        if key in _KNOWN:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **(kwargs or {}))
        if func is torch.autograd.grad:
            with _as_parameters((args, dict(kwargs or {}))):
                return func(*args, **(kwargs or {}))
        if func is nn.init.constant_ and kwargs is not None:
            func, asked, args, kwargs = torch.Tensor.fill_, "fill_", (kwargs["tensor"], kwargs["val"]), {}
            key = asked
        absent = [each for each in _flat([*args, *(kwargs or {}).values()]) if isinstance(each, AbsentTensor)]
        first = absent[0]
        with torch._C.DisableTorchFunctionSubclass():
            if key in _WHERE:
                return _WHERE[key](first.parameter_device)
            found = first.answer(asked, args) if args and args[0] is first else NotImplemented
            if found is not NotImplemented:
                return found
            if asked == "set data" and getattr(args[1], "of", args[1]) is first:
                return None  # as p.data *= 0.5 and p.grad.data *= 0.5 do
            may_change = key in _SCALED and not first.absence.is_computing
            if may_change and len(absent) == 1 and args and args[0] is first and _fit(args[1:], first.shape):
                first.absence.note_change(first.counted_name, surely=first.shows_change(key, args))
                if first.held_part is not None:
                    with torch.no_grad():
                        func(first.held_part, *_rows(args[1:], first), **(kwargs or {}))
                return first
        raise first.refusal(first.parameter_name)

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]  # torch's has an argument of its own
        """Says what is known."""
        shape = list(self.shape)
        return f"{type(self).__name__}({self.parameter_name!r}, shape={shape}, dtype={self.dtype})"

    def __deepcopy__(self, memo: dict[int, Any]) -> AbsentTensor:
        """Refuses a copy, which would have no values."""
        raise self.refusal(self.parameter_name)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses to be pickled, without values."""
        raise self.refusal(self.parameter_name)


class AbsentParameter(AbsentTensor, nn.Parameter):
    """A parameter whose values this process does not have: its shape and type.

    No object is made of this class. The user's own parameter gets it with the words of ``describe``, while it has no
    memory, so that it is found wherever the user has put it.
    """

    parameter_rows: nn.Parameter | None
    has_gradient: bool | Tensor = False
    """True if the process that has it has its gradient, where no rows are here; a tensor is read when it is asked."""
    parameter_class: type[nn.Parameter]
    is_ever_whole: bool

    @classmethod
    def describe(
        cls,
        parameter: nn.Parameter,
        name: str,
        rows: nn.Parameter | None,
        absence: Absence,
        part_of: Callable[[Tensor], Tensor] = lambda whole: whole,
        *,
        is_ever_whole: bool = True,
    ) -> None:
        """Notes in a parameter what this class needs.

        Args:
            parameter: that will be of this class, always or at times.
            rows: those of this rank, which have the gradient; None where it never has values here.
            part_of: gives the part that ``rows`` has of a tensor of the whole's shape.
            is_ever_whole: False if the model computes with ``rows`` in its place.
        """
        known = {"parameter_name": name, "parameter_device": parameter.device, "parameter_rows": rows}
        known |= {"parameter_class": type(parameter), "is_ever_whole": is_ever_whole}
        vars(parameter).update(known, absence=absence, part_of=part_of)
        if rows is not None:
            rows.__dict__ = parameter.__dict__  # optimizers read there what the user has set on a parameter

    @property
    def held_part(self) -> Tensor | None:
        """See ``AbsentTensor``."""
        return self.parameter_rows

    def answer(self, asked: str, args: Sequence[Any]) -> Any:
        """See ``AbsentTensor``: the gradient, whose values are not here either, and ``.data``."""
        rows = self.parameter_rows
        is_of_micro_batch = self.is_ever_whole and self.absence.is_computing
        if asked in ("get grad", "set grad") and rows is not None and is_of_micro_batch:
            # Of the micro-batch, whose backward pass may come to it after it was freed.
            if asked == "get grad":
                return self.grad
            self.grad = args[1]
            return None
        if asked == "get data":
            return AbsentData(self)
        if asked == "get grad":
            has_one = self.has_gradient if rows is None else rows.grad is not None
            return AbsentGradient(self) if has_one else None
        if asked in ("set grad", "delete grad") and (len(args) < 2 or args[1] is None):
            # Of the run's own change nothing is noted, so that the host need not wait for the flag.
            if not self.absence.is_set_by_run and (self.has_gradient if rows is None else rows.grad is not None):
                self.absence.note_change(gradient_of(self.parameter_name))
            self.has_gradient = False
            if rows is not None:
                rows.grad = None
            return None
        if asked == "set grad" and args[1] is not None:
            if isinstance(args[1], AbsentGradient) and args[1].of is self:
                return None  # as p.grad *= 0.5 does
            raise self.absence.gradient(self.parameter_name)
        return NotImplemented


class _Belonging(AbsentTensor):
    """The gradient or the ``.data`` of an absent tensor."""

    of: AbsentTensor

    def __new__(cls, of: AbsentTensor) -> Self:
        """Makes one like ``of``, also for torch's functions that group tensors by their device."""
        with torch._C.DisableTorchFunctionSubclass():
            made = Tensor._make_wrapper_subclass(cls, of.shape, of.stride(), dtype=of.dtype, device=of.parameter_device)
        made.parameter_name, made.parameter_device, made.absence = of.parameter_name, of.parameter_device, of.absence
        made.of, made.part_of = of, of.part_of
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]  # torch's stub lacks the function
        """Refuses to be added to by a backward pass of the user's own, which asks ``__torch_function__`` nothing."""
        absent = next(each for each in _flat(args) if isinstance(each, cls))
        raise ConfigError(
            f"backward() adds to the gradient of {absent.parameter_name!r}, and under strategy "
            f"{absent.absence.strategy!r} {absent.absence.where}. Call optimizer.zero_grad() before it, without "
            "set_to_none=False, make it part of the loss of run.backward, or use strategy 'ddp'."
        )

    def answer(self, asked: str, args: Sequence[Any]) -> Any:
        """See ``AbsentTensor``: it needs no graph."""
        if asked == "get data":
            return AbsentData(self)
        return self if asked in ("detach", "detach_") else NotImplemented


def held_of(tensor: _T) -> _T:
    """The tensor that this process has of a parameter or a buffer: its part, where the whole is absent."""
    return tensor.parameter_rows if isinstance(tensor, AbsentParameter) else tensor  # type: ignore[return-value]  # with a part


class AbsentGradient(_Belonging):
    """The gradient of a parameter whose values this process does not have."""

    of: AbsentParameter

    @property
    def held_part(self) -> Tensor | None:
        """See ``AbsentTensor``."""
        rows = self.of.parameter_rows
        return None if rows is None else rows.grad

    @property
    def counted_name(self) -> str:
        """See ``AbsentTensor``."""
        return gradient_of(self.parameter_name)

    def refusal(self, name: str) -> ConfigError:
        """See ``AbsentTensor``."""
        return self.absence.gradient(name)


class AbsentData(_Belonging):
    """``.data`` of a parameter or gradient: where the values are, no version counts what is written to that."""

    @property
    def held_part(self) -> Tensor | None:
        """See ``AbsentTensor``."""
        return self.of.held_part

    @property
    def counted_name(self) -> str:
        """See ``AbsentTensor``."""
        return self.of.counted_name

    def refusal(self, name: str) -> ConfigError:
        """See ``AbsentTensor``."""
        return self.of.refusal(name)

    def shows_change(self, changed: str, args: Sequence[Any]) -> bool:
        """See ``AbsentTensor``: a bound may have nothing to change, a factor has."""
        return changed in _FACTORS and isinstance(args[1], int | float) and args[1] != 1


def gradient_of(name: str) -> str:
    """The name of a parameter's gradient, in messages and counts."""
    return f"the gradient of {name}"


_OWN = frozenset({*get_annotations(AbsentTensor), *get_annotations(AbsentParameter)})


def users_attributes(parameter: Tensor) -> dict[str, Any]:
    """Attributes that the user has set on a parameter, such as ``p.lr_scale = 0.1``, which optimizers read."""
    return {name: value for name, value in vars(parameter).items() if name not in _OWN}


class AbsentBuffer(AbsentTensor):
    """A buffer whose values this process does not have."""

    counted_name = ""
    """None, for forward passes change buffers too."""

    def __new__(cls, whole: Tensor, name: str, absence: Absence) -> Self:
        """Makes one like ``whole``."""
        return cls.make(without_values(whole), name, whole.device, absence)

    def refusal(self, name: str) -> ConfigError:
        """See ``AbsentTensor``."""
        return self.absence.values(name, "buffer")


class GradientElsewhere(AbsentGradient):
    """Stands for the gradient of a parameter that a process has, where servers have the gradient."""

    holder: nn.Parameter | None

    def __new__(cls, whole: nn.Parameter, name: str, holder: nn.Parameter | None, absence: Absence) -> Self:
        """Makes one like ``whole``, without memory of its own; ``holder`` has this process's part, if any."""
        form = torch.zeros((), dtype=whole.dtype, device=whole.device).expand(whole.shape)
        made = cls.make(form, name, whole.device, absence)
        made.holder = holder
        return made

    @property
    def held_part(self) -> Tensor | None:
        """See ``AbsentTensor``."""
        return None if self.holder is None else self.holder.grad

    def answer(self, asked: str, args: Sequence[Any]) -> Any:
        """See ``AbsentTensor``: what torch.compile asks about the gradients of a module that it traces."""
        if asked == "get grad":
            return None
        if asked == "untyped_storage":
            return torch.UntypedStorage(self.nbytes, device="meta")  # type: ignore[no-untyped-call]  # torch's
        return super().answer(asked, args)


@contextmanager
def _as_parameters(values: Any) -> Iterator[None]:
    """A context in which absent parameters among the values are ordinary ones, though without memory.

    Raises:
        ConfigError: one never has values here.
    """
    absent = [each for each in tree_leaves(values) if isinstance(each, AbsentParameter)]
    for each in absent:
        if each.parameter_rows is None or not each.is_ever_whole:
            raise each.refusal(each.parameter_name)
    try:
        for each in absent:
            each.__class__ = each.parameter_class  # type: ignore[assignment]  # as torch's lazy parameters do
        yield
    finally:
        for each in absent:  # those that are not so again, as after a backward pass in the loop
            if not isinstance(each, AbsentParameter) and not each.untyped_storage().size():
                each.__class__ = AbsentParameter


def _fit(values: Sequence[Any], shape: torch.Size) -> bool:
    """Returns whether all tensors among the values are single numbers or of this shape, so that rows can be taken."""
    return all(each.numel() == 1 or each.shape == shape for each in values if isinstance(each, Tensor))


def _rows(values: Sequence[Any], absent: AbsentTensor) -> list[Any]:
    """The values for the rows of a tensor that are held here."""
    fits = [isinstance(each, Tensor) and each.shape == absent.shape and each.dim() > 0 for each in values]
    return [absent.part_of(each) if fit else each for each, fit in zip(values, fits)]


def _flat(values: Any) -> Iterator[Any]:
    for each in values:
        if isinstance(each, (list, tuple)):
            yield from _flat(each)
        else:
            yield each


@contextmanager
def computing(absences: Sequence[Absence]) -> Iterator[None]:
    """A context within a step, where every process is at another place of it."""
    for absence in absences:
        absence.is_computing = True
    try:
        yield
    finally:
        for absence in absences:
            absence.is_computing = False


def explain_missing_parameters(strategy: str) -> AbstractContextManager[None]:
    """A context for the user's forward or loss, which may use parameters that this process does not hold.

    Raises:
        ConfigError: instead of torch's error about tensors without values, or in parts.
    """
    return NO_VALUES_HERE.explained(
        f"The loss, or a module's forward, uses a parameter of another module, and under strategy {strategy!r} this "
        "process does not hold it whole. Return what is needed from the forward of the module that the parameter "
        "belongs to, or use strategy 'ddp'."
    )
