"""The step of an optimizer: refuses gradients that were not reduced, applies the loss scale, steps, updates the model.

optimizer.step()      PreparedOptimizer.step -> GradientState.step -> the user's optimizer
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import OptState
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lockstep.errors import ConfigError, LockstepError, NonFiniteError
from lockstep.numerics.hooks import is_users
from lockstep.numerics.precision import Precision
from lockstep.run.checks.calls import gather_agreed
from lockstep.run.shared_groups import SharedGroups
from lockstep.runtime.lazy_compiler import apart_from_graphs
from lockstep.strategies import IndependentStrategy, Strategy
from lockstep.strategies.loop_writes import setting_values
from lockstep.strategies.optimizer_trial import needs_closure, require_whole
from lockstep.strategies.sharding import is_elementwise, thawed

logger = logging.getLogger(__name__)
_SMALLEST_SCALE = 2.0**-24
_MOST_LIMITS = 1_000
"""Norms for ``clip`` that are kept between two comparisons of the ranks."""


@dataclass(eq=False)
class _Progress:
    """How far the loop has come with one of the user's optimizers."""

    optimizer: Optimizer
    steps: int = 0
    has_gradients: bool = False
    """True from a backward pass that gave it some until its step, or until they are thrown away."""
    was_cleared: bool = False
    """True where they were thrown away since the last backward pass."""
    is_stepped: bool = True
    """True if it was stepped since the backward passes of this batch began."""
    was_stepped: bool = False
    """The same of the batch before."""

    def parameters(self) -> Iterator[Tensor]:
        """The parameters in its groups."""
        return (p for group in self.optimizer.param_groups for p in group["params"])


class GradientState:
    """The gradients between a backward pass and the step that uses them, and the loss scaler's part of both.

    torch's GradScaler does the scaling. It sees reduced gradients, which are equal on every rank, so every rank finds
    the same overflow and skips the same step.

    Args:
        optimizers: the user's own; a step of one that does not go through ``step`` is refused.
        strategy: knows who else holds a part of the gradients.
        precision: with the scaler of the loss.
        frozen: the names of those that required no gradient when the run was prepared.
    """

    def __init__(
        self,
        optimizers: Sequence[Optimizer],
        strategy: Strategy,
        precision: Precision,
        parameters: Mapping[str, Tensor],
        frozen: Collection[str],
    ) -> None:
        self._optimizers, self._strategy, self._precision = list(optimizers), strategy, precision
        self._scaler = precision.scaler
        self._frozen = [(name, each) for name, each in parameters.items() if name in frozen]
        self._trained = [each for name, each in parameters.items() if name not in frozen]
        is_watched = strategy.writes is not None or strategy.absences
        self.setting_values = partial(setting_values, strategy) if is_watched else nullcontext
        """A context in which the run itself sets values, not the loop."""
        self._progress = {id(each): _Progress(each) for each in optimizers}
        self._limits: list[float | Tensor] = []
        """Norms that gradients were clipped to since the last ``calls``."""
        self._batches = 0
        self._reduced = False
        """True where the gradients of this batch are reduced."""
        self._stepping = self._has_skipped = False
        """True while the run steps an optimizer; True where the scaler has skipped a step since the last update."""
        self.is_divided = False
        """True within a step whose micro-batches a loop computes itself: ranks have different numbers of them."""
        self._read_scale: tuple[Tensor | None, int, float] = (None, 0, 1.0)
        """The scale as it was read last: its tensor, the version of that, and the value."""
        for optimizer in optimizers:
            # Where its __init__ does not call that of Optimizer:
            if "_optimizer_step_pre_hooks" not in vars(optimizer):
                vars(optimizer).setdefault("defaults", {})
                Optimizer.__setstate__(optimizer, {})
            optimizer.register_step_pre_hook(self._refuse_direct_step)
            if self._scaler is not None and getattr(optimizer, "_step_supports_amp_scaling", False):
                # By itself the fused step looks for overflows, and counts as one where it found some. That of SGD
                # also leaves the first momentum as it found the memory. Now the scaler looks, as for other optimizers.
                optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]  # torch's, set in __init__

    def wrap(
        self, members: Sequence[list[list[str]]], parameters: Mapping[str, Tensor]
    ) -> dict[int, PreparedOptimizer]:
        """Wraps the optimizers, by the ids of the user's own, in their order. Collective.

        Args:
            members: the names of the parameters in each group of each.
        """
        is_independent = isinstance(self._strategy, IndependentStrategy)  # then each process shows its part
        wrapped = {}
        for optimizer, own in zip(self._optimizers, members):
            shared = None if is_independent else SharedGroups(optimizer, own, parameters, self._strategy)
            wrapped[id(optimizer)] = PreparedOptimizer(optimizer, self, shared)
        return wrapped

    def __bool__(self) -> bool:
        """True while some optimizer that was not stepped in this batch holds gradients.

        Gradients that another optimizer has used count only if both were stepped in the batch before.
        """
        return self._waits_for(used_too=True)

    def _waits_for(self, *, used_too: bool) -> bool:
        late = [each for each in self._holding if not each.is_stepped]
        used = {p for each in self._progress.values() if late and each.is_stepped for p in each.parameters()}
        return any(
            p.grad is not None and (p not in used or (used_too and each.was_stepped))
            for each in late
            for p in each.parameters()
        )

    def anywhere(self, in_body: bool = False) -> bool:
        """As ``bool``, for the optimizers of all ranks, which hold different parameters in a pipeline. Collective.

        With ``in_body``, gradients that another optimizer has used never count: after a save the body makes no steps.
        """
        self._strategy.require_no_calls()
        waits = self._waits_for(used_too=not in_body)
        return any(gather_agreed(waits, self._strategy.all_ranks, self._strategy.device))

    def require_stepped(self) -> None:
        """Raises ``ConfigError`` where a checkpoint would lose gradients, or no loop could resume there. Collective."""
        if self.anywhere(in_body=True):
            raise ConfigError(
                "run.save() between run.backward and optimizer.step() is refused: a resumed loop cannot begin between "
                "the two. Save where every optimizer with gradients has made its step, or clear the others' with "
                "zero_grad()."
            )
        # The second network of a GAN has such gradients, until its loop clears them before they are computed again.
        came_after = any(each.is_stepped and has_gradients(each.optimizer) for each in self._holding)
        if came_after and isinstance(self._strategy, IndependentStrategy):
            raise ConfigError(
                "run.save() would lose the gradients that came after the step of their optimizer: a parameter server "
                "of mode 'asynchronous' stores none. Call zero_grad() before."
            )

    @property
    def _holding(self) -> list[_Progress]:
        return [each for each in self._progress.values() if each.has_gradients]

    def resume(self) -> None:
        """Takes gradients that a checkpoint has restored: they came after the step of their optimizer."""
        for each in self._progress.values():
            nonzero = any(p.grad is not None and bool(p.grad.any()) for p in each.parameters())
            each.has_gradients = each.is_stepped = nonzero

    @property
    def scale(self) -> float:
        """The factor on the loss; 1 without a scaler."""
        if self._scaler is None:
            return 1.0
        if (held := self._scaler._scale) is None:
            return float(self._scaler.get_scale())
        if held is not self._read_scale[0] or held._version != self._read_scale[1]:
            self._read_scale = held, held._version, float(held)  # a wait for the device
        return self._read_scale[2]

    def begin_batch(self) -> None:
        """Requires another backward pass before the next step."""
        self._reduced = False

    def begin_backward(self) -> None:
        """Updates the scale before a backward pass.

        Raises:
            ConfigError: gradients of two scales would be added, or a parameter that was frozen requires a gradient,
                which would not be summed over the ranks.
        """
        if self._strategy.writes is not None:
            self._strategy.writes.look()
        for each in self._progress.values() if not self._reduced else ():
            each.was_stepped, each.is_stepped = each.is_stepped, False
        self._strategy.require_no_failure()
        with torch._C.DisableTorchFunctionSubclass():  # asking a parameter without values takes longer
            unfrozen = [name for name, parameter in self._frozen if parameter.requires_grad]
            trains = not self._trained or any(parameter.requires_grad for parameter in self._trained)
        if unfrozen:
            raise thawed(unfrozen[0])
        if not trains:
            raise ConfigError(
                "Every parameter of the model is frozen, so run.backward has nothing to compute gradients for. Leave "
                "some unfrozen, or call the model or run.evaluate instead."
            )
        if self._scaler is None:
            return
        if not self._optimizers:
            raise ConfigError("precision fp16 needs the optimizer: model, optimizer = run.prepare(model, optimizer).")
        if any(has_gradients(each.optimizer) for each in self._holding):
            raise ConfigError(
                "With precision fp16 a second run.backward before optimizer.step() would add gradients of two loss "
                "scales. To accumulate, give lockstep.init a larger global_batch and more micro_batches; to add "
                "losses, add them in one loss function; or use bf16 or fp32."
            )
        self.update_scale()

    def end_backward(self) -> None:
        """Takes reduced gradients, and divides them by the scale. Collective."""
        if self._scaler is not None:
            for optimizer in self._optimizers:
                if has_gradients(optimizer):
                    self._scaler.unscale_(optimizer)
            if not self._strategy.replicated:
                self._share_overflows(self._scaler)
        if self._strategy.writes is not None:
            self._strategy.writes.note(self._strategy.watched())
        self._batches += not self._reduced
        self._reduced = True
        # A process without parameters of an optimizer, such as a worker, cannot tell whether others have gradients.
        apart = not self._strategy.replicated
        for each in self._progress.values():
            each.was_cleared = False
            each.has_gradients = each.has_gradients or apart or has_gradients(each.optimizer)

    def _require_computed(self) -> None:
        """Raises ``ConfigError`` where there is no gradient that ``run.backward`` has computed."""
        if not self._reduced and not self._holding:
            others = any(has_gradients(each) for each in self._optimizers)
            why = "and gradients from loss.backward() do not count" if others else "so there is no gradient yet"
            raise ConfigError(
                f"run.clip_gradients was called before run.backward(batch, loss), {why}. Call it between run.backward "
                "and optimizer.step()."
            )

    @apart_from_graphs
    def clip(self, max_norm: float) -> Tensor:
        """Scales the gradients so that their total norm is at most ``max_norm``. Collective.

        Squares are summed in float64 over each row (index of dim 0), rows are folded in a tree, parameters in name
        order. torch's ``clip_grad_norm_`` sums float32 in an order that depends on how a parameter is stored.

        Returns:
            The norm before, float64, 0-dim.
        """
        self._require_computed()
        if len(self._limits) < _MOST_LIMITS:
            self._limits.append(max_norm)
        strategy = self._strategy
        with self.setting_values():
            strategy.before_step()
            norm = strategy.squares().cumsum(0)[-1].sqrt()
            factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
            factors: dict[tuple[torch.device, torch.dtype], Tensor] = {}
            for gradient in strategy.gradients():
                kind = gradient.device, gradient.dtype
                if kind not in factors:
                    factors[kind] = factor.to(*kind)
                gradient.mul_(factors[kind])
        return norm

    def calls(self) -> dict[str, str]:
        """The calls of the loop, as texts by name for a comparison: each rank steps and clips its own part.

        Norms are those since the last call of this.
        """
        if self.is_divided:
            raise ConfigError(
                "The processes compare their parameters in the middle of an optimizer step, of which they have "
                "different micro-batches. Do that after the last one, under 'if accelerator.sync_gradients:' and after "
                "accelerator.backward; and leave the loop there, and count its steps."
            )
        limits, self._limits = [float(each) for each in self._limits], []
        digest = hashlib.sha256(repr(limits).encode()).hexdigest()
        counts = enumerate(self._progress[id(each)].steps for each in self._optimizers)
        steps = {f"<calls of step of optimizer {number}>": str(count) for number, count in counts}
        return steps | ({"<max_norm of run.clip_gradients>": f"{limits[-1]:.4g} {digest}"} if limits else {})

    def tell_if_never_stepped(self) -> None:
        """Warns at the end of a run whose loop has computed gradients and made no step with them."""
        wraps = any(isinstance(each, Optimizer) for o in self._optimizers for each in vars(o).values())  # and steps it
        had = any(each.has_gradients or each.was_cleared for each in self._progress.values())
        is_stepped = wraps or any(each.steps for each in self._progress.values())
        if self._batches > 1 and had and not is_stepped:
            logger.warning(
                "optimizer.step() was never called after run.backward: unless the loop changes the parameters itself, "
                "they are what they were before it. Call optimizer.step() after run.backward, then zero_grad()."
            )

    def forget(self, optimizer: Optimizer) -> None:
        """Notes that the optimizer's gradients were thrown away."""
        progress = self._progress[id(optimizer)]
        progress.was_cleared, progress.has_gradients = progress.was_cleared or progress.has_gradients, False

    def step_by(self, optimizer: Optimizer, closure: Callable[[], Any]) -> Any:
        """Steps an optimizer that evaluates the loss itself, as LBFGS does, and returns what it returns. Collective.

        Raises:
            ConfigError: a process does not hold the whole model, or the loss is scaled.
        """
        if is_elementwise(optimizer):  # these call it once, before anything else
            found = closure()
            self.step(optimizer)
            return found
        require_whole(optimizer, self._strategy)
        if self._scaler is not None:
            raise ConfigError(
                f"{type(optimizer).__name__}.step(closure) may evaluate the loss several times, and precision fp16 "
                "scales it anew for every step. Use precision bf16 or fp32."
            )
        with self._in_step(optimizer):
            return optimizer.step(closure)

    def step(self, optimizer: Optimizer) -> bool:
        """Steps the optimizer, unless a scaled gradient was not finite; returns whether it did. Collective."""
        self._require_reduced(optimizer)
        with self._in_step(optimizer):
            self._strategy.before_step()
            with self.setting_values():
                taken = self._step_own(optimizer)
                self._strategy.after_step()
        return taken

    def _require_reduced(self, optimizer: Optimizer) -> None:
        """Refuses a step whose gradients were not reduced, or are stepped by no process; warns of one without any."""
        progress = self._progress[id(optimizer)]
        if not self._reduced and not progress.has_gradients:
            raise ConfigError(
                "optimizer.step() without run.backward(batch, loss) before it: gradients from loss.backward() are this "
                "rank's own and were not summed over the ranks. Call run.backward(batch, loss_fn) in place of the "
                "model, the loss and loss.backward()."
            )
        with torch._C.DisableTorchFunctionSubclass():
            frozen = () if self._strategy.replicated else self._frozen
            set_by_loop = next((name for name, parameter in frozen if parameter.grad is not None), None)
        if set_by_loop is not None:
            raise ConfigError(
                f"The loop has set the gradient of {set_by_loop!r}, which was frozen when the model was prepared: with "
                f"one process the optimizer would update it, but under strategy {self._strategy.name!r} no process "
                "holds it for that. Leave it unfrozen, clear its gradient, or use strategy 'ddp'."
            )
        if progress.was_cleared and not progress.steps:
            logger.warning(
                "The first step of the optimizer %s has no gradient: its zero_grad() was called after run.backward. "
                "Call zero_grad() before run.backward, or after optimizer.step().",
                type(optimizer).__name__,
            )

    def _step_own(self, optimizer: Optimizer) -> bool:
        """Steps the user's own optimizer; explains its error where other processes hold all of its parameters."""
        try:
            if self._scaler is not None:
                return self._step_scaled(optimizer, self._scaler)
            optimizer.step()
            return True
        except LockstepError:
            raise
        except Exception as error:
            if any(group["params"] for group in optimizer.param_groups):
                raise
            raise ConfigError(
                f"{type(optimizer).__name__} cannot step without parameters ({type(error).__name__}: {error}), and "
                f"under strategy {self._strategy.name!r} other processes hold all of them. Use strategy 'ddp'."
            ) from error

    @contextmanager
    def _in_step(self, optimizer: Optimizer) -> Iterator[None]:
        """Around the step of the user's own optimizer, which uses its gradients up."""
        self._stepping = True
        try:
            yield
        finally:
            self._stepping = False
            progress = self._progress[id(optimizer)]
            progress.steps, progress.is_stepped, progress.has_gradients = progress.steps + 1, True, False

    def update_scale(self) -> None:
        """Adapts the scale to what the last backward passes found, also where their gradients were thrown away.

        Nothing where there were none, or where gradients that have been divided by the scale wait for their step.
        """
        if self._scaler is None or self:
            return
        seen = self._scaler._per_optimizer_states.values()  # as in _share_overflows
        if not any(state["found_inf_per_device"] for state in seen):
            return
        self._scaler.update()
        self._has_skipped = False
        if self.scale < _SMALLEST_SCALE:
            raise NonFiniteError(
                f"The loss scale fell to {self.scale:g} after {self._precision.skipped_steps} skipped steps: gradients "
                "are NaN or infinite at any scale, so this is not an overflow. Look for a division by zero or a "
                "logarithm of zero, or try precision bf16 or fp32."
            )

    def _step_scaled(self, optimizer: Optimizer, scaler: torch.amp.GradScaler) -> bool:
        taken: list[bool] = []
        handle = optimizer.register_step_post_hook(lambda *_: taken.append(True))
        scaler.step(optimizer)
        handle.remove()
        if not (taken or self._has_skipped):  # once for several optimizers
            self._precision.skipped_steps += 1
            self._has_skipped = True
        optimizer._opt_called = True  # type: ignore[attr-defined]  # or a scheduler warns after a skipped first step
        return bool(taken)

    def _share_overflows(self, scaler: torch.amp.GradScaler) -> None:
        """Makes ranks that hold parts of the gradients skip together.

        torch keeps what it found for each optimizer and device in ``_per_optimizer_states``, and its own scaler for
        sharded parameters reduces it there too; there is no public way.
        """
        device = self._strategy.device
        flags = torch.zeros(len(self._optimizers), 2, device=device)
        for row, optimizer in zip(flags, self._optimizers):
            found = list(scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values())
            if found:
                row[0].fill_(1.0)  # assigned, it would be copied from the host, which waits for that
                row[1] = torch.stack([each.to(device) for each in found]).max()
        for (used, overflow), optimizer in zip(self._strategy.all_reduce_max(flags), self._optimizers):
            if used:
                state = scaler._per_optimizer_states[id(optimizer)]
                state["stage"] = OptState.UNSCALED
                state["found_inf_per_device"] = {device: overflow}

    def _refuse_direct_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self._stepping:
            raise ConfigError(
                f"step() was called on the {type(optimizer).__name__} that was given to run.prepare. Step the one it "
                "returned: model, optimizer = run.prepare(model, optimizer)."
            )


class PreparedOptimizer(Optimizer):
    """Stands for the user's optimizer; groups, state and hyperparameters are the very same objects.

    Args:
        shared: the groups as the user sees them; None where each process shows its own.
    """

    def __init__(self, optimizer: Optimizer, gradients: GradientState, shared: SharedGroups | None = None) -> None:
        self.wrapped = optimizer
        self._gradients, self._shared = gradients, shared
        self._in_parts = None if shared is None or shared.is_whole else shared
        """The same where the optimizer itself holds parts of the parameters that the user sees; else None."""
        self._needs_closure = needs_closure(optimizer)
        self._late: list[Callable[[], Any]] = []
        if self._in_parts is not None:
            before, after = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
            before.update({key: self._shown(hook) for key, hook in before.items() if is_users(hook)})
            after.update({key: self._shown_after(hook) for key, hook in after.items() if is_users(hook)})

    step_was_skipped = False
    """True if the last step was left out, since the scaled gradients overflowed."""

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The user's groups; their parameters are those of the prepared model."""
        return self.wrapped.param_groups if self._in_parts is None else self._in_parts.groups()

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self._in_parts is None:
            self.wrapped.param_groups = groups
        else:
            self.param_groups.extend(groups)  # which refuses in its own words

    @property
    def state(self) -> Any:
        """The user's state, by parameters of the prepared model; of each this process's part."""
        return self.wrapped.state if self._in_parts is None else self._in_parts.state()

    @state.setter
    def state(self, contents: Any) -> None:
        if self._in_parts is None:
            self.wrapped.state = contents
            return
        if contents:
            raise ConfigError(
                "optimizer.state was replaced after run.prepare, where no process holds the whole state. "
                "Clear it with optimizer.state.clear(), change its tensors in place, or use strategy 'ddp'."
            )
        self.state.clear()

    def __setattr__(self, name: str, value: Any) -> None:
        """An attribute of the user's optimizer goes to that one, whose step reads it."""
        is_own = name.startswith("_") or name in _OWN or hasattr(type(self), name)
        object.__setattr__(self if is_own else self.wrapped, name, value)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Takes groups, state and defaults, as some loops give them to forget the state."""
        for key, value in state.items():
            setattr(self, key, value)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuses ``copy.deepcopy`` and pickling, which would make an optimizer of no run."""
        raise ConfigError(
            "The optimizer that run.prepare returned was copied or pickled, and belongs to this run. Copy "
            "optimizer.state_dict(), write it with run.save(), or make another optimizer before run.prepare."
        )

    def register_step_pre_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a hook that is called before each step, with this optimizer."""
        return self.wrapped.register_step_pre_hook(self._shown(hook))

    def register_step_post_hook(self, hook: Callable[..., Any]) -> RemovableHandle:
        """Registers a hook that is called after each step, with this optimizer."""
        return self.wrapped.register_step_post_hook(self._shown_after(hook))

    def _shown(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The hook, called with this optimizer where the wrapped one holds parts of what the user knows."""
        return hook if self._in_parts is None else lambda _, args, kwargs: hook(self, args, kwargs)

    def _shown_after(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """The same for a hook after the step; where values are whole, it waits for those that others have stepped."""
        if self._in_parts is None or not self._in_parts.has_values:
            return self._shown(hook)
        return lambda _, args, kwargs: self._late.append(partial(hook, self, args, kwargs))

    _step_supports_amp_scaling = True
    """Has a GradScaler leave the gradients as they are, and set ``grad_scale`` while it calls ``step``."""

    @apart_from_graphs
    def step(self, closure: Callable[[], Any] | None = None, *others: Any, **named: Any) -> Any:
        """Takes one step from the reduced gradients. Every rank must call this.

        Args:
            closure: for optimizers that evaluate the loss themselves, such as LBFGS: clears gradients, and returns what
                ``run.backward(batch, loss)`` gives. Where every process holds the whole model.

        Returns:
            What the optimizer returns of the closure; None without one.
        """
        if others or named or not (closure is None or callable(closure)):
            raise ConfigError(
                f"step() of {type(self.wrapped).__name__} was given more than a closure. Set such a value before the "
                "step, as an attribute of the optimizer or of its parameter groups, and let its step() read it there."
            )
        if hasattr(self, "grad_scale"):
            raise ConfigError(
                "A GradScaler of the script's own steps the optimizer, and would divide the gradients of run.backward "
                "by a scale that they do not have. Leave it out, or write lockstep.init(precision='fp16'), which "
                "scales the loss."
            )
        if closure is not None:
            return self._gradients.step_by(self.wrapped, closure)
        if self._needs_closure:
            raise ConfigError(
                f"{type(self.wrapped).__name__} evaluates the loss itself. Write optimizer.step(closure), with def "
                "closure(): optimizer.zero_grad(); return run.backward(batch, loss)."
            )
        self.step_was_skipped = not self._gradients.step(self.wrapped)
        late, self._late = self._late, []
        for call in late:
            call()
        return None

    @apart_from_graphs
    def zero_grad(self, set_to_none: bool | None = None) -> None:
        """Forgets the gradients; without ``set_to_none`` as the optimizer's own default says."""
        with self._gradients.setting_values():
            self.wrapped.zero_grad(*(() if set_to_none is None else (set_to_none,)))
            if set_to_none is not False and self._in_parts is not None:
                self._in_parts.forget_gradients()
        self._gradients.forget(self.wrapped)

    def state_dict(self) -> dict[str, Any]:
        """The user's optimizer's state; ``ConfigError`` where no process holds it all."""
        self._require_whole("state_dict")
        return self.wrapped.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Gives the user's optimizer its state; ``ConfigError`` where no process holds it all."""
        self._require_whole("load_state_dict")
        self.wrapped.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Adds a group of the prepared model's parameters. Every rank must call this.

        Raises:
            ConfigError: they were frozen at ``run.prepare``, or the optimizer would have to see more of them than a
                process holds.
        """
        if self._shared is None:
            self.wrapped.add_param_group(param_group)
        else:
            self._shared.add(param_group)

    def _require_whole(self, method: str) -> None:
        if self._in_parts is not None:
            raise ConfigError(
                f"optimizer.{method}() was called after run.prepare, and no process holds the whole state of the "
                "optimizer. Write and load it with run.save() and resume='auto', load it before run.prepare, or use "
                "strategy 'ddp'."
            )

    def __repr__(self) -> str:
        return f"Prepared{self.wrapped!r}"

    def __getattr__(self, name: str) -> Any:
        if name == "wrapped":
            raise AttributeError(name)
        if self._in_parts is None or hasattr(Optimizer, name):
            return getattr(self.wrapped, name)
        return self._in_parts.attribute(name)


_OWN = ("wrapped", "grad_scale", "found_inf")
"""Public attributes of a ``PreparedOptimizer``; torch's GradScaler sets the last two."""


def has_gradients(optimizer: Optimizer) -> bool:
    """True where any parameter of the optimizer has a gradient."""
    return any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
