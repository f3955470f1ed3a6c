"""Events of a run, which call the methods of its callbacks.

In the order within a step:

    prepare_end
    step_begin                                                      one batch of run.batches
      backward_begin                                                run.backward
        micro_batch_begin  (micro_batch_resume)  micro_batch_end    for each micro-batch of this process
          output                                                    between its forward pass and its loss
        bucket_start                                                buckets of gradients, while backward continues
        exchange_begin  exchange_end                                waiting for the other ranks
      backward_end                                                  reduced gradients are set, still with the loss scale
      gradients_ready                                               they are ready to be clipped and stepped
    step_end
    evaluation  save_begin  save  close

An event without a callback costs one loop over an empty tuple.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from lockstep.errors import ConfigError, nearest

if TYPE_CHECKING:
    from lockstep.core.plan import Indices

_P = ParamSpec("_P")
_Options = TypeVar("_Options")


class Callback:
    """Base class of the observers of a run: override the methods of the events that you need; the others cost nothing.

    Every rank calls its own callbacks, in the order in which they were added and in the thread where the event happens:
    the main thread, except under strategy ``dp``, whose replicas run on threads of their own. A callback that
    communicates with other ranks must be added on every rank.
    """

    def on_prepare_end(self, run: Any) -> None:
        """Called with the ``Run`` at the end of ``Run.prepare``: the model is placed, and resumed if asked for."""

    def on_step_begin(self, batch: Any) -> None:
        """Called before ``Run.batches`` gives a ``Batch`` to the loop."""

    def on_backward_begin(self, batch: Any, scale: float) -> None:
        """Called before the forward and backward passes of a ``Batch``: this process's micro-batches of the step.

        ``scale`` is a factor on every gradient until ``on_gradients_ready``; 1 without a loss scaler.
        """

    def on_micro_batch_begin(self, micro_batch: Any) -> None:
        """Called before the forward pass of a ``MicroBatch``."""

    def on_micro_batch_resume(self, micro_batch: Any, phase: str) -> None:
        """Called where a strategy resumes a ``MicroBatch`` after others, as ``pipeline`` and ``dp`` do.

        It was begun earlier in this step; ``phase`` is ``forward`` or ``backward``.
        """

    def on_output(self, micro_batch: Any, output: Any, target: Any) -> None:
        """Called with what the model gave for a ``MicroBatch`` and the target, where its loss is computed next."""

    def on_micro_batch_end(self, micro_batch: Any) -> None:
        """Called after the backward pass of a ``MicroBatch`` in this process."""

    def on_bucket_start(self, bucket: int) -> None:
        """Called before a bucket of gradients is passed to the reducer, which does not wait for it."""

    def on_exchange_begin(self) -> None:
        """Called when all buckets are started and the rank is about to wait for the reducer."""

    def on_exchange_end(self) -> None:
        """Called when the reducer has all sums."""

    def on_backward_end(self, batch: Any, result: Any) -> None:
        """Called when the gradients of the global batch are set, before they are divided by the loss scale.

        ``result`` is the ``StepResult``; its losses are on the device.
        """

    def on_gradients_ready(self, batch: Any, loss: Any) -> None:
        """Called at the end of ``Run.backward``, before gradients are clipped and the optimizer steps.

        ``loss`` is what ``Run.backward`` returns, a 0-dim tensor on the device.
        """

    def on_step_end(self, batch: Any) -> None:
        """Called after the loop's body, when the loop asks for the next batch; not after a ``break``."""

    def on_evaluation(self, step: int, results: Any) -> None:
        """Called at the end of ``Run.evaluate``, with the number of steps done and the results that it returns."""

    def on_save_begin(self, step: int) -> None:
        """Called at the beginning of ``Run.save``, before ``run.extra`` is taken.

        Args:
            step: how many steps the checkpoint will hold.
        """

    def on_save(self, step: int, folder: Path | None) -> None:
        """Called at the end of ``Run.save``, with the number of steps that the checkpoint holds.

        ``folder`` is that of the checkpoint on the main process, maybe still being written; None on the others.
        """

    def on_close(self, run: Any) -> None:
        """Called with the ``Run`` at the beginning of ``Run.close``, while the process group is still open."""

    def on_span_begin(self, name: str) -> None:
        """Called where ``Run.span`` begins; evaluating, saving and taking a fingerprint are spans too."""

    def on_span_end(self, name: str) -> None:
        """Called where ``Run.span`` ends, also by an exception."""

    def on_copy_begin(self) -> None:
        """Called before a micro-batch's data is copied to the device; never on the CPU."""

    def on_copy_end(self) -> None:
        """Called when the copies are queued."""

    def on_phase(self, phase: str, epoch: int, step: int, micro_batch: int) -> None:
        """Called whenever the rank enters another of ``lockstep.runtime.heartbeat.PHASES``.

        ``epoch``, ``step`` and ``micro_batch`` are -1 outside of any.
        """

    def on_samples(self, indices: Indices) -> None:
        """Called after ``on_phase`` of a micro-batch with the indices of its samples."""


class KeepsExtra(Callback):
    """Puts a value that is asked for at each save into ``run.extra``."""

    def __init__(self, run: Any, name: str, value: Callable[[], Any]) -> None:
        self._run, self._name, self._value = run, name, value

    def on_save_begin(self, step: int) -> None:
        """Called before a checkpoint is written."""
        self._run.extra[self._name] = self._value()


class CallbackHandle:
    """Removes a callback, by ``remove`` or at the end of a ``with`` block, like torch's hook handles."""

    def __init__(self, events: StepEvents, callback: Callback) -> None:
        self._events, self._callback = events, callback

    def remove(self) -> None:
        """Removes the callback; further calls have no effect."""
        self._events.remove(self._callback)

    def __enter__(self) -> CallbackHandle:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()


_NewRuns = tuple[Callback, Callable[[Any], Any] | None]
"""A callback for every new run, and a change of the options that it was given."""
_new_runs: ContextVar[tuple[_NewRuns, ...]] = ContextVar("new_runs", default=())


class StepEvents:
    """The callbacks of one run, by event.

    Each attribute is a tuple of the methods to call for one event. Code that reports an event loops over it::

        for call in events.step_begin:
            call(batch)
    """

    def __init__(self) -> None:
        self.callbacks: tuple[Callback, ...] = ()
        """Those that were added, in their order."""
        self._collect()

    def add(self, callback: Callback) -> CallbackHandle:
        """Calls the methods of ``callback`` from the next event on.

        Raises:
            ConfigError: it is not a ``Callback``, was added before, or has a method of an unknown event.
        """
        _require_callback(callback)
        if any(each is callback for each in self.callbacks):
            raise ConfigError(
                f"run.add_callback was called twice with the same {type(callback).__qualname__}. Add it once, or "
                "create a second object."
            )
        self.callbacks = (*self.callbacks, callback)
        self._collect()
        return CallbackHandle(self, callback)

    def add_observers_of_new_runs(self) -> None:
        """Adds the callbacks of the enclosing ``observe_new_runs`` blocks."""
        for callback, _ in _new_runs.get():
            self.add(callback)

    def remove(self, callback: Callback) -> None:
        """Removes ``callback``; its methods are no longer called."""
        self.callbacks = tuple(each for each in self.callbacks if each is not callback)
        self._collect()

    @contextmanager
    def silenced(self) -> Iterator[None]:
        """Calls no callbacks inside the block."""
        given, self.callbacks = self.callbacks, ()
        self._collect()
        try:
            yield
        finally:
            self.callbacks = given
            self._collect()

    @contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Reports that a span begins, and at the end of the block that it ends."""
        for call in self.span_begin:
            call(name)
        try:
            yield
        finally:
            for call in self.span_end:
                call(name)

    def _collect(self) -> None:
        """Finds, for each event, the callbacks that override its method."""
        given = self.callbacks
        self.prepare_end = _overriding(given, Callback.on_prepare_end)
        self.step_begin = _overriding(given, Callback.on_step_begin)
        self.backward_begin = _overriding(given, Callback.on_backward_begin)
        self.micro_batch_begin = _overriding(given, Callback.on_micro_batch_begin)
        self.micro_batch_resume = _overriding(given, Callback.on_micro_batch_resume)
        self.output = _overriding(given, Callback.on_output)
        self.micro_batch_end = _overriding(given, Callback.on_micro_batch_end)
        self.bucket_start = _overriding(given, Callback.on_bucket_start)
        self.exchange_begin = _overriding(given, Callback.on_exchange_begin)
        self.exchange_end = _overriding(given, Callback.on_exchange_end)
        self.backward_end = _overriding(given, Callback.on_backward_end)
        self.gradients_ready = _overriding(given, Callback.on_gradients_ready)
        self.step_end = _overriding(given, Callback.on_step_end)
        self.evaluation = _overriding(given, Callback.on_evaluation)
        self.save_begin = _overriding(given, Callback.on_save_begin)
        self.save = _overriding(given, Callback.on_save)
        self.close = _overriding(given, Callback.on_close)
        self.span_begin = _overriding(given, Callback.on_span_begin)
        self.span_end = _overriding(given, Callback.on_span_end)
        self.copy_begin = _overriding(given, Callback.on_copy_begin)
        self.copy_end = _overriding(given, Callback.on_copy_end)
        self.phase = _overriding(given, Callback.on_phase)
        self.samples = _overriding(given, Callback.on_samples)


class _NoEvents(StepEvents):
    def add(self, callback: Callback) -> CallbackHandle:
        raise ConfigError("Cannot add a callback to an object that belongs to no run. Use run.add_callback(callback).")


@contextmanager
def observe_new_runs(callback: Callback, *, options: Callable[[_Options], _Options] | None = None) -> Iterator[None]:
    """Adds a callback to every run that is created inside the block, before the run does anything else.

    ``options`` changes the ``RunOptions`` of these runs.
    """
    _require_callback(callback)
    token = _new_runs.set((*_new_runs.get(), (callback, options)))
    try:
        yield
    finally:
        _new_runs.reset(token)


def options_of_new_run(options: _Options) -> _Options:
    """Returns the options of a run that is created here with ``options``; see ``observe_new_runs``."""
    for _, change in _new_runs.get():
        options = options if change is None else change(options)
    return options


def _overriding(
    callbacks: tuple[Callback, ...], method: Callable[Concatenate[Any, _P], None]
) -> tuple[Callable[_P, None], ...]:
    """Returns the bound methods of the callbacks whose class overrides ``method`` of ``Callback``."""
    name = method.__name__
    return tuple(
        _naming(callback, name, getattr(callback, name))
        for callback in callbacks
        if getattr(type(callback), name) is not method
    )


def _naming(callback: Callback, name: str, method: Callable[_P, None]) -> Callable[_P, None]:
    """Wraps a method so that its exceptions name the callback."""

    def call(*arguments: _P.args, **options: _P.kwargs) -> None:
        try:
            method(*arguments, **options)
        except Exception as error:
            error.add_note(f"raised by the callback {type(callback).__qualname__}.{name}")
            raise

    return call


def _require_callback(callback: object) -> None:
    if not isinstance(callback, Callback):
        raise ConfigError(
            f"run.add_callback was called with a {type(callback).__qualname__}, which is not a callback. Derive its "
            "class from lockstep.runtime.Callback, and pass an instance."
        )
    for name in dir(callback):
        if name.startswith("on_") and not hasattr(Callback, name):
            events = [each for each in dir(Callback) if each.startswith("on_")]
            found = f"{type(callback).__qualname__} has the method {name!r}, which is not an event."
            raise ConfigError(f"{found}{nearest(name, events)}")


NO_EVENTS = _NoEvents()
"""The events of objects that belong to no run; callbacks cannot be added."""
