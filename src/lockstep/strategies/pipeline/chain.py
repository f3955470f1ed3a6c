"""A model as a chain of modules, each taking what the one before it gave: where a pipeline can be cut.

    ResNet     conv1 -> bn1 -> relu -> maxpool -> layer1.0 -> layer1.1 -> layer2.0 -> ... -> avgpool -> flatten() -> fc

A Sequential is opened into its children, and so is any other module whose forward only calls its children one after the
other, with nothing between them but reshaping and activations: torch.fx reads it. What cannot be opened stays whole, as
one link of the chain: a block with a shortcut; a forward that draws random numbers itself, or in a Dropout that is no
child of a Sequential, since those draws are keyed by the module, which would then lie in two processes; one that calls
its children under ``torch.no_grad``, ``torch.autocast`` or hooks on saved tensors, which they would lose; and one that
computes with a tensor of its own, such as ``if self.gate.item() > 0.5``, whose value may be another one later.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence, Sized
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from inspect import isfunction
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from lockstep.core.generators import encoded_states, generators_kept
from lockstep.core.users_code import names_in
from lockstep.numerics.blocks import CONTAINERS
from lockstep.numerics.compilation import is_compiled
from lockstep.numerics.hidden_state import Snapshot

_FUNCTIONS = (
    *(torch.relu, torch.tanh, torch.sigmoid),
    *(torch.flatten, torch.squeeze, torch.unsqueeze, torch.transpose),
)
_ACTIVATIONS = (F.relu, F.gelu, F.silu, F.softmax, F.log_softmax, F.adaptive_avg_pool2d, F.avg_pool2d)
_METHODS = (
    *("relu", "tanh", "mean", "flatten", "squeeze"),
    *("view", "reshape", "permute", "transpose", "contiguous"),
)

_DEVICES = ("cpu", "cuda")


@dataclass(frozen=True, eq=False)
class ChainLink:
    """One module of the chain."""

    name: str
    """In the whole model; what a forward does between its children is called ``flatten()``."""
    module: nn.Module


class FunctionLink(nn.Module):
    """A function between two children of a forward, such as ``torch.flatten(x, 1)``; holds no tensors."""

    def __init__(self, function: Callable[..., Any], arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
        super().__init__()
        self._function, self._arguments, self._named = function, arguments, named

    def forward(self, value: Any) -> Any:
        """Applies it."""
        return self._function(value, *self._arguments, **self._named)


def chain(model: nn.Module) -> list[ChainLink]:
    """The links of a model in the order in which they run; a model that cannot be opened is one link."""
    return _open(ChainLink("", model))


def _open(link: ChainLink) -> list[ChainLink]:
    inner = _inner(link.module)
    if inner is None:
        return [link]
    prefix = f"{link.name}." if link.name else ""
    return [leaf for each in inner for leaf in _open(ChainLink(prefix + each.name, each.module))]


def _inner(module: nn.Module) -> list[ChainLink] | None:
    """Returns the children that a module calls in turn; None if it does anything else."""
    if module._parameters or module._buffers or not module._modules or is_watched(module):
        return None
    if "forward" in vars(module) or type(module).__call__ is not nn.Module.__call__ or is_compiled(module):
        return None  # it runs something else than the forward of its class
    if type(module).forward is nn.Sequential.forward:
        return [ChainLink(name, child) for name, child in module._modules.items() if child is not None]
    if draws_without_key(module) or "type" in names_in(type(module).forward.__code__):
        return None
    links = _traced(module, training=True)
    other = _traced(module, training=False)
    if links is None or other is None or _calls(links) != _calls(other):
        return None
    called = {each.module for each in links}
    idle = [child for child in module.children() if child not in called]
    return None if any(True for child in idle for _ in (*child.parameters(), *child.buffers())) else links


_OF_EVERY_MODULE = frozenset(vars(nn.Module()))
_PLAIN = (bool, int, float, complex, str, bytes, type(None), list, tuple, dict)


def what_it_reads(module: nn.Module) -> dict[str, Any]:
    """The values a forward may look at: attributes of the module, its children, class and objects, and variables.

    What is not a plain value stands for itself, and for what a snapshot finds in it.
    """
    cls: Any = type(module)
    named, variables = _names_in(cls)
    found = {key: variables[key] for key in named & variables.keys() if isinstance(variables[key], _PLAIN)}
    for prefix, each in (("", module), *((f"{name}.", child) for name, child in module.named_children())):
        kind: Any = type(each)
        own, asked = vars(each), named | _names_in(kind)[0]
        found |= {f"{prefix}{key}": own[key] for key in asked & own.keys() - _OF_EVERY_MODULE}
    texts = {key: repr(value) if _has_short_text(value) else id(value) for key, value in found.items()}
    return texts | Snapshot({"": without_parts(module)}, restorable=False, gradients=False).texts


def _has_short_text(value: Any) -> bool:
    if not isinstance(value, _PLAIN) or (isinstance(value, Sized) and len(value) > 1000):
        return False
    return not any(isinstance(leaf, Tensor) for leaf in tree_leaves(value))


def without_parts(module: nn.Module) -> nn.Module:
    """A module with the class and the attributes of another, but without its children, tensors and hooks."""
    kept = {
        key: value
        for key, value in vars(module).items()
        if key in ("_parameters", "training") or not (isinstance(value, Tensor) or key in _OF_EVERY_MODULE)
    }
    alone = object.__new__(type(module))
    vars(alone).update({**vars(nn.Module()), **kept})
    return alone


@cache
def _names_in(cls: type) -> tuple[frozenset[str], dict[str, Any]]:
    """All names in the methods of a class of modules, and the variables of the file that has its forward."""
    own = cls.__mro__[: cls.__mro__.index(nn.Module)]
    methods = [each for base in own for each in vars(base).values() if isfunction(each)]
    names = frozenset(name for method in methods for name in names_in(method.__code__))
    return names, getattr(cls.forward, "__globals__", {})  # type: ignore[attr-defined]  # of a module


def what_it_calls(module: nn.Module) -> list[tuple[Any, ...]] | None:
    """The calls that the forward of an opened module makes now, in an order that can be compared."""
    links = _traced(module, training=module.training)
    return None if links is None else _calls(links)


def _calls(links: Sequence[ChainLink]) -> list[tuple[Any, ...]]:
    return [
        (each.name, *(vars(each.module)[key] for key in ("_function", "_arguments", "_named")))
        if isinstance(each.module, FunctionLink)
        else (each.name,)
        for each in links
    ]


def draws_without_key(module: nn.Module) -> str | None:
    """The name of a child with a Dropout whose draws are keyed by the module around it; None where there is none."""
    for name, child in module.named_children():
        parts = [*child.modules()]
        if not any(isinstance(each, CONTAINERS) for each in parts) and any(map(_drops, parts)):
            return name
    return None


def _drops(module: nn.Module) -> bool:
    return (isinstance(module, nn.modules.dropout._DropoutNd) and module.p > 0) or isinstance(module, nn.RReLU)


def is_watched(module: nn.Module) -> bool:
    """Returns whether somebody else's hooks wait for calls of this module, which would not come if it were opened."""
    hooks = (
        *module._forward_hooks.values(),
        *module._forward_pre_hooks.values(),
        *module._backward_hooks.values(),
        *module._backward_pre_hooks.values(),
    )
    return any(getattr(hook, "__module__", "") != "lockstep.numerics.randomness" for hook in hooks)


class _Given(fx.Proxy):
    """Stands for a value that a forward is given or that a child returns, whose kind is not known."""

    tracer: _OneLevel

    @property
    def __class__(self) -> type:
        """Its own class for torch.fx; a forward that asks for it would do something else with the value."""
        if self.tracer.is_done or _asked_by_torch():
            return _Given
        raise fx.proxy.TraceError("this forward looks at the class of a value")

    @__class__.setter
    def __class__(self, kind: type) -> None:
        raise fx.proxy.TraceError("this forward changes the class of a value")

    def __getattr__(self, key: str) -> fx.proxy.Attribute:
        if key in _METHODS or self.tracer.is_done or _asked_by_torch():
            return super().__getattr__(key)
        raise fx.proxy.TraceError("this forward looks at an attribute of a value")


def _asked_by_torch() -> bool:
    """True where torch.fx asks the caller, or an assignment to an attribute of a module does."""
    asking = sys._getframe(2)
    while asking.f_code.co_name == "__instancecheck__" and asking.f_back is not None:
        asking = asking.f_back
    is_assignment = asking.f_code is nn.Module.__setattr__.__code__
    return is_assignment or asking.f_globals.get("__name__", "").startswith("torch.fx.")


_WITHOUT_VALUES = (Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.__len__)
"""Methods that a forward may call on a tensor, besides its properties: the answers do not change with its values."""


class _OwnTensors(TorchFunctionMode):
    """Ends the reading of a forward that computes with tensors other than those it is given, or asks for values."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        """1 inside a call that it lets through, when torch has taken it off the stack of modes; otherwise 0."""

    def __torch_function__(self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Makes a call on stand-ins, or one that looks at no values."""
        kwargs = kwargs or {}
        is_allowed = func in _WITHOUT_VALUES or getattr(func, "__name__", "") == "__get__"
        leaves = [] if is_allowed else [type(leaf) for leaf in tree_leaves((args, kwargs))]
        if any(issubclass(leaf, Tensor) for leaf in leaves) and _Given not in leaves:
            raise fx.proxy.TraceError("this forward looks at the values of a tensor")
        self.calls = 1
        try:
            return func(*args, **kwargs)
        finally:
            self.calls = 0


class _OneLevel(fx.Tracer):
    """Reads one forward; its children stay calls, which must be made as the forward itself is called."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.is_done = False
        self._own_tensors = _OwnTensors()
        self._children = dict(module.named_children())
        self._kept, self._tensors = Snapshot(self._children, restorable=False), self._tensors_now()
        self._draws = encoded_states()

    def _tensors_now(self) -> list[tuple[int, bool]]:
        """The parameters and buffers of the children, and which require gradients."""
        return [
            (id(each), each.requires_grad)
            for child in self._children.values()
            for each in (*child.parameters(), *child.buffers())
        ]

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Given(node, self)

    def nodes(self, module: nn.Module) -> list[fx.Node]:
        """The calls of the forward; afterwards its stand-ins may be looked at."""
        try:
            with self._own_tensors:
                self._conditions = self._conditions_now()
                return list(self.trace(module).nodes)
        finally:
            self.is_done = True

    def _conditions_now(self) -> tuple[object, ...]:
        return torch._C._len_torch_function_stack() + self._own_tensors.calls, *_conditions()

    def create_proxy(self, kind: str, *args: Any, **kwargs: Any) -> fx.Proxy:
        is_call = kind in ("call_module", "call_function", "call_method")
        if is_call and self._conditions_now() != self._conditions:
            raise fx.proxy.TraceError("a context manager is around a part of this forward")
        if kind == "call_module":
            with torch._C.DisableTorchFunction():  # these look at values, but the forward does not
                kept, tensors, draws = Snapshot(self._children, restorable=False), self._tensors_now(), encoded_states()
            if draws != self._draws:
                raise fx.proxy.TraceError("this forward draws or seeds before it calls a child")
            if tensors != self._tensors or self._kept.changed(kept):
                raise fx.proxy.TraceError("this forward changes a child before it calls one")
        return super().create_proxy(kind, *args, **kwargs)


def autocasts() -> tuple[object, ...]:
    """The state of autocast."""
    return tuple((torch.is_autocast_enabled(each), torch.get_autocast_dtype(each)) for each in _DEVICES)


def _conditions() -> tuple[object, ...]:
    """The modes that context managers of torch set for the operations within them."""
    backends = torch.backends
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        *autocasts(),
        torch._C._autograd._top_saved_tensors_default_hooks(False),
        torch._C._autograd._saved_tensors_hooks_get_disabled_error_message(),
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
        torch.get_num_threads(),
        parametrize._cache_enabled,
        torch._C._len_torch_dispatch_stack(),
        backends.mkldnn.enabled,
        backends.cudnn.enabled,
        backends.cudnn.benchmark,
        backends.cudnn.deterministic,
        backends.cudnn.allow_tf32,
        backends.cuda.matmul.allow_tf32,
        backends.cuda.flash_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch's stub
        backends.cuda.mem_efficient_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch's stub
        backends.cuda.math_sdp_enabled(),  # type: ignore[no-untyped-call]  # torch's stub
    )


def _traced(module: nn.Module, *, training: bool) -> list[ChainLink] | None:
    """The chain that a forward is in this mode; None if it is none, or if it draws while it is read."""
    with reading(module, training=training) as links:
        return links


@contextmanager
def reading(module: nn.Module, *, training: bool) -> Iterator[list[ChainLink] | None]:
    """Reads a forward in this mode: gives its chain; None if it is none, or if it draws while it is read.

    Evaluation is read without gradients and with autocast, so that a forward that looks at these is none. Inside the
    context is as it is what the forward has set; afterwards that is as before.
    """
    before, draws = Snapshot({"": module}), encoded_states()
    module.training = training
    try:
        with generators_kept():
            try:
                with torch.set_grad_enabled(training), _autocast(not training):
                    nodes = _OneLevel(module).nodes(module)
            except Exception:
                # The user's forward may fail in any way when it is read with stand-ins; it is then no chain.
                nodes = []
            yield None if encoded_states() != draws or not nodes else _as_chain(module, nodes)
    finally:
        before.restore()


@contextmanager
def _autocast(enabled: bool) -> Iterator[None]:
    """Autocast switched on or off, as far as a forward can see, on every kind of device."""
    before = {device: torch.is_autocast_enabled(device) for device in _DEVICES}
    try:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, enabled)
        yield
    finally:
        for device in _DEVICES:
            torch.set_autocast_enabled(device, before[device])


def _as_chain(module: nn.Module, nodes: list[fx.Node]) -> list[ChainLink] | None:
    """The links of a graph ``input -> node -> node -> ... -> output``; None for any other graph."""
    first, *inner, last = nodes
    before, links = first, []
    for node in inner:
        if node.all_input_nodes != [before] or not node.args or node.args[0] is not before:
            return None
        link = _link(module, node)
        if link is None:
            return None
        links.append(link)
        before = node
    return links if first.op == "placeholder" and last.args == (before,) else None


def _link(module: nn.Module, node: fx.Node) -> ChainLink | None:
    if node.op == "call_module" and len(node.args) == 1 and not node.kwargs:
        return ChainLink(str(node.target), module.get_submodule(str(node.target)))
    arguments, named = node.args[1:], dict(node.kwargs)
    if node.op == "call_function" and node.target in (*_FUNCTIONS, *_ACTIVATIONS):
        return ChainLink(f"{node.name}()", FunctionLink(node.target, arguments, named))
    if node.op == "call_method" and node.target in _METHODS:
        return ChainLink(f"{node.name}()", FunctionLink(getattr(Tensor, str(node.target)), arguments, named))
    return None
