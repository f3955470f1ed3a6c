"""A ``Trainer`` for scripts written for transformers, whose result does not depend on the number of processes.

    import lockstep
    from lockstep.integrations.transformers import TransformersTrainer   # instead of: from transformers import Trainer
    run = lockstep.init(global_batch=32)                       # before TrainingArguments
    trainer = TransformersTrainer(run, model=model, args=args, ...)

``train``, ``evaluate``, ``predict`` and ``save_model`` work as before, with callbacks, schedulers, collators,
``compute_metrics``; the loss of tokens is the mean over all that count in the global batch, or in the evaluated set.
``global_batch`` takes the place of ``per_device_train_batch_size``, and the run's own checkpoints, which hold what the
Trainer keeps, that of resuming from the Trainer's. What the Trainer does beside that (DeepSpeed, FSDP, hyperparameter
search) is refused.
"""

from __future__ import annotations

import inspect
import logging
import math
import time
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from transformers.trainer_callback import ExportableState, TrainerState
from transformers.trainer_utils import (
    EvalPrediction,
    PredictionOutput,
    TrainOutput,
    align_special_tokens,
    denumpify_detensorize,
    speed_metrics,
)

from lockstep.checkpoint.record import decode, encode
from lockstep.core.generators import generators_kept
from lockstep.core.values import is_users_object
from lockstep.data.batch import Batch
from lockstep.distributed.collectives import broadcast_tensors, gather_json
from lockstep.errors import ConfigError
from lockstep.numerics.hidden_state import Snapshot, evaluating
from lockstep.run import Run
from lockstep.run.checks.means import Deviation, deviation_over
from lockstep.run.checks.rows import own_rows
from lockstep.run.step import DeviceTransfer
from lockstep.runtime.events import KeepsExtra
from lockstep.text import shorten

logger = logging.getLogger(__name__)
_ROWS_TRIED = 8
_Trainer = transformers.Trainer
_NOT_CALLED = (
    *("training_step", "prediction_step", "evaluation_loop", "get_train_dataloader", "get_eval_dataloader"),
    *("get_test_dataloader", "get_batch_samples", "_get_train_sampler", "_get_eval_sampler"),
)
_NOT_HERE = (
    *("deepspeed", "fsdp", "include_for_metrics", "batch_eval_metrics", "fp16_full_eval", "bf16_full_eval"),
    "auto_find_batch_size",
)
_KEPT = ("log_history", "best_metric", "best_global_step", "best_model_checkpoint", "num_input_tokens_seen")
"""Of the Trainer's state, in checkpoints of the run."""


def compute_loss(output: Any, data: Any) -> Any:
    """The loss that the method of this name returned, which messages are to name."""
    return output


class TransformersTrainer(transformers.Trainer):  # type: ignore[misc]  # transformers is optional
    """``transformers.Trainer`` with the loop of a run. Every process must make the same calls.

    Args:
        run: from ``lockstep.init``, which must have been called before ``TrainingArguments``.
        *given: of ``transformers.Trainer``.
        **named: of ``transformers.Trainer``.

    Raises:
        ConfigError: an argument asks for what this class does not have.
    """

    model: Any
    optimizer: Any
    lr_scheduler: Any
    control: Any

    def __init__(self, run: Run, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self.run, args = run, self.args
        asked = {
            "gradient_accumulation_steps": args.gradient_accumulation_steps > 1,
            **{name: bool(getattr(args, name)) for name in _NOT_HERE},
            "fp16, bf16 (use lockstep.init(precision=...))": args.fp16 or args.bf16,
            "torch_compile (use lockstep.init(compile=True))": args.torch_compile,
            "load_best_model_at_end where no process holds the whole model": args.load_best_model_at_end
            and not run.strategy.replicated,
            "activation_checkpointing (call model.gradient_checkpointing_enable() first)": args.gradient_checkpointing
            or getattr(args, "activation_checkpointing", False),
            "neftune_noise_alpha": args.neftune_noise_alpha is not None,
            "group_by_length (run.batches orders the samples)": getattr(args, "group_by_length", False),
        }
        if (order := getattr(args, "train_sampling_strategy", "random")) != "random":
            asked[f"train_sampling_strategy={order!r} (run.batches orders the samples)"] = True
        if found := [name for name, is_asked in asked.items() if is_asked]:
            raise ConfigError(
                f"TrainingArguments asks for what Lockstep's Trainer does not have: {'; '.join(found)}. Leave it out; "
                "global_batch and micro_batches of lockstep.init say how a step is computed."
            )
        cls = type(self)
        if overridden := [
            each for each in _NOT_CALLED if getattr(cls, each, None) is not getattr(_Trainer, each, None)
        ]:
            raise ConfigError(
                f"{cls.__name__} overrides {', '.join(overridden)}, which Lockstep's Trainer does not call. "
                "Override compute_loss, or write the loop with lockstep.init."
            )
        args.average_tokens_across_devices = False  # the weights of the losses do it
        args.save_only_model = True  # the run's checkpoints hold the rest
        # Accelerate sets another number where none is in the environment
        torch.set_num_threads(run._session.threads)
        self._losses: list[Tensor] = []
        """Of the steps since the last log."""
        self._sum = 0.0
        """Of the losses of all steps."""
        self._norm: float | None = None
        """Of the gradients of the epoch's last step; None before its first."""
        self._rate: float | None = None
        """The learning rate of that step."""
        self._loader: DataLoader[Any] | None = None
        self._has_trained = False
        self._divides_by_items: bool | None = None
        """True if the loss is a sum divided by the number of tokens that it is given; None before it was tried."""
        self._is_mean_of_items = False
        """True if it is their mean without being given their number."""
        self._first = Snapshot({})
        self._holders = {"the Trainer": self}
        self._of_library = {f"the Trainer.{name}" for name in (*vars(self), "_of_library")}

    def train(self, resume_from_checkpoint: Any = None, **named: Any) -> Any:
        """Trains up to ``num_train_epochs`` or ``max_steps``; a resumed run continues. Collective.

        Returns:
            The steps done and their mean loss, and with it how long those of this call took.
        """
        if resume_from_checkpoint or named:
            raise ConfigError(
                "Lockstep's Trainer resumes with lockstep.init(directory='runs/a', resume='auto'); train() takes no "
                "arguments."
            )
        if self._has_trained:
            raise ConfigError(
                "trainer.train() was called twice, and a run trains once. Raise num_train_epochs or max_steps; to go "
                "on later, use lockstep.init(directory='runs/a', resume='auto')."
            )
        self._has_trained = True
        self._prepare()
        run, args, events, loader = self.run, self.args, self.callback_handler, self._loader
        assert loader is not None, "the Trainer has refused to train without a data set"
        steps, started, first = run.steps_per_epoch(loader), time.time(), run.position.step
        state = self._begin(steps)
        samples = 0
        self.control = events.on_train_begin(args, state, self.control)
        self._give_back(run.extra.get("transformers", {}))
        if args.eval_on_start and not first:
            self._evaluate(None, None, skip_scheduler=True)
        # True where the scheduler steps after an evaluation, as ReduceLROnPlateau does.
        steps_by_metric = "metrics" in inspect.signature(self.lr_scheduler.step).parameters
        for epoch in run.epochs(state.num_train_epochs):
            self.model.train()
            self.control = events.on_epoch_begin(args, state, self.control)
            if not run.position.done:
                self._norm = self._rate = None
            for batch in run.batches(loader):
                loss = self._train_step(batch, steps_by_metric)
                self._losses.append(loss)
                self._sum += float(loss)
                samples += batch.plan.samples
                state.global_step += 1
                state.epoch = epoch + (batch.plan.position + 1) / steps
                self.control = events.on_step_end(args, state, self.control)
                self._log_evaluate_save()
                if self.control.should_epoch_stop or self._is_over:
                    break
            self.control = events.on_epoch_end(args, state, self.control)
            self._log_evaluate_save()
            if self._is_over:
                break
        metrics = {"train_loss": self._sum / max(1, state.global_step)}
        self.log(dict(metrics))
        if args.load_best_model_at_end and state.best_model_checkpoint is not None:
            self._load_best()
        self.control = events.on_train_end(args, state, self.control)
        speed = speed_metrics("train", started, num_samples=samples, num_steps=state.global_step - first)
        return TrainOutput(state.global_step, metrics["train_loss"], {**speed, **metrics, "epoch": state.epoch})

    def _train_step(self, batch: Batch, steps_by_metric: bool) -> Tensor:
        """Updates the model with one batch, and returns its loss."""
        run, args, events, state = self.run, self.args, self.callback_handler, self.state
        self.control = events.on_step_begin(args, state, self.control)
        loss = self._backward(batch)
        self._norm = float(run.clip_gradients(args.max_grad_norm or math.inf))
        self.control = events.on_pre_optimizer_step(args, state, self.control)
        skipped = run.skipped_steps
        self.optimizer.step()
        self.control = events.on_optimizer_step(args, state, self.control)
        self._rate = self._get_learning_rate()  # that of this step
        if not steps_by_metric and run.skipped_steps == skipped:
            self.lr_scheduler.step()
        self.optimizer.zero_grad()
        self.model.zero_grad()  # of parameters that the optimizer does not have, too
        return loss

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The loss over the data set, and ``compute_metrics`` of all outputs and labels. Collective.

        The loss of tokens is the mean over all that count in the set, whatever the size of a batch.

        Returns:
            Numbers by name, the same on every rank.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        if isinstance(data, Mapping) and not isinstance(data, torch.utils.data.Dataset):
            found: dict[str, float] = {}
            for name, each in data.items():
                found |= self.evaluate(each, ignore_keys, f"{metric_key_prefix}_{name}")
            return found
        needs_outputs = self.compute_metrics is not None and not self.args.prediction_loss_only
        metrics = self._predicted(data, ignore_keys, metric_key_prefix, needs_outputs=needs_outputs).metrics
        self.log(metrics)  # which adds the epoch
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, metrics)
        return dict(metrics)

    def predict(self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test") -> PredictionOutput:
        """The outputs for all samples in their order, their labels, and metrics as those of ``evaluate``. Collective.

        Returns:
            The same on every rank.
        """
        output = self._predicted(test_dataset, ignore_keys, metric_key_prefix, needs_outputs=True)
        self.control = self.callback_handler.on_predict(self.args, self.state, self.control, output.metrics)
        return output

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model as a folder of transformers, on the main process. Collective."""
        if self.run._prepared is None or self.run.strategy.replicated:
            super().save_model(output_dir, _internal_call)
            return
        further = self.run.require_prepared().state.model.aliases  # further names of tied parameters
        state = {name: each for name, each in self.run.state_dict().items() if name not in further}
        if self.args.should_save:
            self._save(output_dir, state_dict=state)

    def _prepare(self) -> None:
        """Prepares model, optimizer and scheduler, once. Collective."""
        run, events = self.run, self.callback_handler
        if run._prepared is not None:
            return
        run.add_callback(KeepsExtra(run, "transformers", self._kept))
        if self.train_dataset is None:
            self.model = run.prepare(self.model)
            return
        self._loader = loader = self._loader_of(self.train_dataset, run.options.global_batch, shuffle=True)
        if isinstance(self.processing_class, transformers.PreTrainedTokenizerBase):
            align_special_tokens(self.model, self.processing_class)
        steps = run.steps_per_epoch(loader, model=self.model)
        self.create_optimizer_and_scheduler(self._total_steps(steps))
        self.model, self.optimizer, self.lr_scheduler = run.prepare(self.model, self.optimizer, self.lr_scheduler)
        events.model, events.optimizer, events.lr_scheduler = self.model, self.optimizer, self.lr_scheduler
        events.train_dataloader = loader
        self._try_items(loader)

    def _total_steps(self, steps: int) -> int:
        """The optimizer steps of the whole training, where an epoch has so many ``steps``."""
        return int(self.args.max_steps) if self.args.max_steps > 0 else math.ceil(self.args.num_train_epochs * steps)

    def _begin(self, steps: int) -> TrainerState:
        """Makes the state of the training, new or as the run was resumed with."""
        run, args = self.run, self.args
        stateful = [each for each in self.callback_handler.callbacks if isinstance(each, ExportableState)]
        total = self._total_steps(steps)
        self.state = state = TrainerState(stateful_callbacks=[*stateful, self.control])
        state.max_steps, state.num_train_epochs = total, math.ceil(total / steps)
        state.train_batch_size, state.global_step = run.options.global_batch, run.position.step
        state.epoch = run.position.epoch + run.position.done / steps
        state.is_local_process_zero = self.is_local_process_zero()
        state.is_world_process_zero = self.is_world_process_zero()
        state.compute_steps(args, total)
        if kept := run.extra.get("transformers"):
            for name in _KEPT:
                setattr(state, name, kept["state"][name])
            self._losses = [torch.tensor(each, dtype=torch.float64) for each in kept["losses"]]
            self._norm, self._rate = kept.get("last", [None, None])
            self._sum = kept["sum"]
        return state

    @property
    def _is_over(self) -> bool:
        return bool(self.control.should_training_stop) or self.state.global_step >= self.state.max_steps

    def _backward(self, batch: Batch) -> Tensor:
        """The gradients and the loss of a step; counts its tokens, where that is asked for."""
        if self.args.include_num_input_tokens_seen in (False, "no"):
            return self.run.backward(batch, compute_loss, forward=self._loss_of)  # type: ignore[no-any-return]
        also = {"tokens": self._tokens}
        loss, more = self.run.backward(batch, compute_loss, forward=self._loss_of, also=also)
        self.state.num_input_tokens_seen += round(float(more["tokens"]) * len(batch))
        return loss  # type: ignore[no-any-return]

    def _tokens(self, output: Any, inputs: Any) -> tuple[Tensor, int]:
        """How many tokens a micro-batch has, and how many rows."""
        values = inputs[getattr(self.model, "main_input_name", "input_ids")]
        pad = getattr(self.processing_class, "pad_token_id", None)
        if self.args.include_num_input_tokens_seen != "non_padding":
            return torch.tensor(values.numel()), len(values)
        if "attention_mask" in inputs:
            return inputs["attention_mask"].sum(), len(values)
        if pad is None:
            raise ConfigError(
                "include_num_input_tokens_seen='non_padding' needs an attention_mask in the batches, or a "
                "processing_class with a pad_token_id."
            )
        return (values != pad).sum(), len(values)

    def _own(self) -> dict[str, Any]:
        """The values that the user's code keeps in attributes of this object and of callbacks, by path."""
        return {
            path: value.state_dict() if isinstance(value, nn.Module) else value
            for name, each in self._holders.items()
            for key, value in vars(each).items()
            if (path := f"{name}.{key}") not in self._of_library
            if value is not self.model and not isinstance(value, _Trainer)
        }

    def _give_back(self, kept: Mapping[str, Any]) -> None:
        """Sets what a checkpoint holds of them, and warns of what it does not."""
        every = self.callback_handler.callbacks
        own = [each for each in every if is_users_object(each) or isinstance(each, ExportableState)]
        self._holders |= {f"{type(each).__name__} {place}": each for place, each in enumerate(own)}
        self._first = Snapshot(self._own(), restorable=False)
        for path, value in kept.get("own", {}).items():
            name, _, key = path.rpartition(".")
            vars(self._holders.get(name, SimpleNamespace()))[key] = decode(value)
        now, changed = Snapshot(self._own(), restorable=False).texts, kept.get("changed", {}).items()
        if lost := [path for path, text in changed if now.get(path) != text]:
            logger.warning(
                "Callbacks of the resumed run have lost what they kept: %s. What depends on it is other than without "
                "the stop. Checkpoints hold attributes that are numbers, texts, or lists or dicts of these; save and "
                "load others in on_save and on_train_begin.",
                shorten(lost, 3),
            )

    def _kept(self) -> dict[str, Any]:
        """The part of a checkpoint of the run that is for the Trainer, as JSON."""
        own, held = self._own(), dict[str, Any]()
        changed = self._first.changed(Snapshot(own, restorable=False))
        for path in own:
            with suppress(ConfigError):  # of what is no such value
                held |= {path: encode(own[path], path)} if any(path in place for place in changed) else {}
        return {
            "own": held,
            "changed": {place: text for place, (_, text) in changed.items()},
            "state": {name: getattr(self.state, name) for name in _KEPT},
            "losses": [float(each) for each in self._losses],
            "last": [self._norm, self._rate],
            "sum": self._sum,
        }

    def _load_best(self) -> None:
        """Loads the parameters of the best checkpoint of the Trainer. Collective."""
        self.run.fingerprint()  # the others wait here until the main process has written it
        if not Path(self.state.best_model_checkpoint).is_dir():
            raise ConfigError(
                f"load_best_model_at_end: this process does not see {self.state.best_model_checkpoint}. Give an "
                "output_dir that all hosts share."
            )
        self._load_best_model()
        self.run.fingerprint()

    def _predicted(self, data: Any, ignore_keys: Any, prefix: str, *, needs_outputs: bool) -> PredictionOutput:
        """The metrics of a data set; outputs and labels, where they are needed. Collective."""
        self._prepare()
        run, group = self.run, self.run._session.group
        loader = self._loader_of(data, self.args.per_device_eval_batch_size, shuffle=False)
        sample = next(iter(DataLoader(loader.dataset, batch_size=1, collate_fn=loader.collate_fn)))
        has_labels = bool(self.label_names) and all(sample.get(name) is not None for name in self.label_names)
        metrics: dict[str, Any] = {}
        if has_labels or (not self.label_names and self.can_return_loss):
            self._try_items(loader)
            # It is not to be: a compute_loss has no way to give a pair.
            run.rehearsals.note_checked([compute_loss], evaluated=True)
            metrics["loss"] = run.evaluate(loader, compute_loss, forward=self._loss_of)
        outputs, labels = None, None
        if needs_outputs:
            rows = _Rows(self.model, self.label_names if has_labels else [], ignore_keys)
            rows.preprocess = self.preprocess_logits_for_metrics
            rows.forward = self._outputs_of if has_labels else self.model
            packed = run.predict(loader, forward=rows.packed)
            outputs, labels = rows.unpacked(packed, len(data), group, run.device)
        if self.compute_metrics is not None and outputs is not None and labels is not None:
            found = denumpify_detensorize(self.compute_metrics(EvalPrediction(outputs, labels)))
            metrics |= gather_json(found, group, run.device)[0]
        begin = f"{prefix}_"
        named = {name if name.startswith(begin) else begin + name: value for name, value in metrics.items()}
        return PredictionOutput(outputs, labels, named)

    def _loader_of(self, data: Any, size: int, *, shuffle: bool) -> DataLoader[Any]:
        collate = self._get_collator_with_removed_columns(self.data_collator)
        return DataLoader(
            data,
            batch_size=size,
            shuffle=None if isinstance(data, IterableDataset) else shuffle,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            drop_last=shuffle and self.args.dataloader_drop_last,
        )

    def _loss_of(self, inputs: Any) -> Any:
        """The mean over samples, or the pair (sum, tokens) for a model or loss function that counts tokens."""
        items = self._items_of(inputs)
        if items is not None and self._divides_by_items is not False:
            return self._computed(inputs, torch.ones_like(items)), items
        if self._is_mean_of_items and not items:  # a mean of none is not a number
            inputs = {**inputs, "labels": torch.zeros_like(inputs["labels"])}
        loss = self._computed(inputs, items)
        return (loss * items, items) if self._is_mean_of_items else loss

    def _computed(self, inputs: Any, items: Any, **named: Any) -> Any:
        named |= {} if items is None else {"num_items_in_batch": items}
        return self.compute_loss(self.model, dict(inputs), **named)

    def _outputs_of(self, **inputs: Any) -> Any:
        """The outputs for inputs with labels: those of ``compute_loss``."""
        found = self._computed(inputs, self._items_of(inputs), return_outputs=True)
        return found[1] if isinstance(found, tuple) else self.model(**inputs)

    def _items_of(self, inputs: Any) -> Any:
        return self._get_num_items_in_batch([inputs], self.run.device)

    def _try_items(self, loader: DataLoader[Any]) -> None:
        """Finds out whether the loss depends on the number of tokens that it is given, as the Trainer expects.

        Raises:
            ConfigError: it uses the number for more than dividing by it.
        """
        if self._divides_by_items is not None:
            return
        self.run.require_prepared()
        few = DataLoader(loader.dataset, batch_size=_ROWS_TRIED, collate_fn=loader.collate_fn)
        with evaluating(self.model), generators_kept():
            torch.manual_seed(0)  # a collator may draw
            for inputs in map(DeviceTransfer(self.run.device), few):
                items = self._items_of(inputs)
                if not isinstance(items, Tensor):
                    self._divides_by_items = False
                    return
                one, two = (float(self._computed(inputs, torch.full_like(items, count))) for count in (1, 2))
                if math.isfinite(one) and items:  # otherwise nothing of these rows counts
                    break
            else:
                return

            def sums(rows: slice, are_counted: bool = False) -> tuple[float, float]:
                part = own_rows(inputs, rows)
                items = self._items_of(part)
                weight = len(part["labels"]) if are_counted else int(items)
                return float(self._computed(part, items)) * weight if weight else 0.0, weight

            size = len(inputs["labels"])
            by_items = deviation_over(sums, size, 1e-4)
            by_rows = deviation_over(partial(sums, are_counted=True), size, 1e-4)
        divides, ignores = (math.isclose(one, other, rel_tol=1e-3) for other in (2 * two, two))
        if not divides and not ignores:
            raise ConfigError(
                f"The loss of the first batch is {one:.6g} with num_items_in_batch=1 and {two:.6g} with 2. It must be "
                "a sum divided by num_items_in_batch, or a mean over samples that does not depend on it."
            )
        self._divides_by_items = divides
        self._is_mean_of_items = not divides and by_items is Deviation.NONE is not by_rows

    def _log_evaluate_save(self) -> None:
        """Does what the callbacks have asked for. Collective."""
        control = self.control
        if control.should_log and self._losses:
            loss = torch.stack(self._losses).mean()
            logs = {"loss": float(loss)} | ({} if self._norm is None else {"grad_norm": self._norm})
            self._losses.clear()
            rate = self._get_learning_rate() if self._rate is None else self._rate
            self.log(logs | {"learning_rate": rate})
        if control.should_evaluate:
            metrics = self._evaluate(None, None)
            is_best = self._determine_best_metric(metrics=metrics, trial=None)
            if self.args.save_strategy == "best":
                control.should_save = is_best
        if control.should_save:
            self._save_checkpoint(self.model, trial=None)
            # Done, for a resumed run, too.
            control.should_log = control.should_evaluate = control.should_save = False
            if self.run.options.directory is not None:
                self.run.save()
            self.control = self.callback_handler.on_save(self.args, self.state, control)


class _Rows:
    """The outputs of a model, and the named labels, as rows of one tensor, and back.

    Outputs of the ``ignored`` names are left out; by default those that the model's configuration names.
    """

    def __init__(self, model: Any, labels: list[str], ignored: list[str] | None) -> None:
        self.forward, self._labels = model, labels
        config = getattr(model, "config", None)
        known = getattr(config, "keys_to_ignore_at_inference", ["past_key_values"])
        self._ignored = {"loss", *(known if ignored is None else ignored)}
        self.preprocess: Any = None
        """Makes of outputs and labels what is kept of the outputs."""
        self._forms: list[tuple[torch.Size, torch.dtype]] = []

    def packed(self, inputs: Any) -> Tensor:
        """The outputs and labels of a micro-batch, one after the other in each row, as float64."""
        output = self.forward(**inputs)
        if isinstance(output, Mapping):
            values = [value for name, value in output.items() if name not in self._ignored]
        else:
            values = list(output[1:] if self._labels else output)
        labels = [inputs[name] for name in self._labels]
        if self.preprocess is not None:
            made = self.preprocess(_one_or_all(values), _one_or_all(labels))
            values = list(made) if isinstance(made, tuple | list) else [made]
        tensors = [*values, *labels]
        if wrong := [type(each).__name__ for each in tensors if not isinstance(each, Tensor)]:
            raise ConfigError(
                f"The model gives a {wrong[0]} beside tensors. Name it in ignore_keys, or leave it out in "
                "preprocess_logits_for_metrics."
            )
        forms = [(each.shape[1:], each.dtype) for each in tensors]
        if self._forms and [list(shape) for shape, _ in self._forms] != [list(shape) for shape, _ in forms]:
            raise ConfigError(
                f"The model gives rows of the shapes {[list(shape) for shape, _ in forms]} for one batch and "
                f"{[list(shape) for shape, _ in self._forms]} for another. For compute_metrics and predict, pad to a "
                "fixed length, as with padding='max_length', or keep numbers of one shape with "
                "preprocess_logits_for_metrics."
            )
        self._forms = forms
        return torch.cat([each.reshape(len(each), -1).double() for each in tensors], 1)

    def unpacked(
        self, packed: Tensor | None, rows: int, group: dist.ProcessGroup | None, device: torch.device
    ) -> tuple[Any, Any]:
        """Outputs and labels of all samples as arrays, on every rank; None where there are none. Collective."""
        forms: list[Any] = [[list(shape), str(dtype).removeprefix("torch.")] for shape, dtype in self._forms]
        if group is not None:
            forms = gather_json(forms, group, device)[0]
            columns = sum(math.prod(shape) for shape, _ in forms)
            whole = torch.empty(rows, columns, dtype=torch.float64) if packed is None else packed
            moved = whole.to(device)
            broadcast_tensors([moved], 0, group)
            packed = moved.cpu()
        assert packed is not None
        arrays, place = [], 0
        for shape, dtype in forms:
            kept = torch.float32 if dtype == "bfloat16" else getattr(torch, dtype)  # NumPy has no bfloat16
            width = math.prod(shape)
            arrays.append(packed[:, place : place + width].reshape(rows, *shape).to(kept).numpy())
            place += width
        count = len(arrays) - len(self._labels)
        return _one_or_all(arrays[:count]), _one_or_all(arrays[count:])


def _one_or_all(values: list[Any]) -> Any:
    """The value of a list of one, a tuple of several, None of an empty one."""
    return None if not values else values[0] if len(values) == 1 else tuple(values)
