"""A ``Trainer`` for scripts written for transformers, whose result does not depend on the number of processes.

    import lockstep
    from lockstep.integrations.transformers import TransformersTrainer   # instead of: from transformers import Trainer
    run = lockstep.init(global_batch=32)                       # before TrainingArguments
    trainer = TransformersTrainer(run, model=model, args=args, ...)

``train``, ``evaluate`` and ``save_model`` work as before, with callbacks, schedulers, collators, ``compute_metrics``;
the loss of tokens is the mean over all that count in the global batch. ``global_batch`` takes the place of
``per_device_train_batch_size``, ``run.save`` and ``resume`` that of the Trainer's checkpoints. What the Trainer does
beside that (DeepSpeed, FSDP, hyperparameter search, ``predict``) is refused.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalPrediction, TrainOutput

from lockstep.data.keyed import generators_kept
from lockstep.distributed.collectives import gather_json
from lockstep.errors import ConfigError
from lockstep.run import Run
from lockstep.run.step import DeviceTransfer, evaluating

_ROWS_TRIED = 4
_Trainer = transformers.Trainer
_NOT_CALLED = (
    *("training_step", "prediction_step", "evaluation_loop", "get_train_dataloader", "get_eval_dataloader"),
    *("get_batch_samples", "_get_train_sampler", "_get_eval_sampler"),
)


def _other_orders(args: Any) -> list[str]:
    """Arguments that ask for another order of the samples than a shuffled one; their names differ with versions."""
    orders = {
        "train_sampling_strategy": getattr(args, "train_sampling_strategy", "random") != "random",
        "group_by_length": bool(getattr(args, "group_by_length", False)),
    }
    return [name for name, is_asked in orders.items() if is_asked]


def _as_it_is(output: Any, data: Any) -> Any:
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
            "deepspeed": bool(args.deepspeed),
            "fsdp": bool(args.fsdp),
            "fp16, bf16 (use lockstep.init(precision=...))": args.fp16 or args.bf16,
            "torch_compile (use lockstep.init(compile=True))": args.torch_compile,
            "load_best_model_at_end": args.load_best_model_at_end,
            "gradient_checkpointing (call model.gradient_checkpointing_enable() first)": args.gradient_checkpointing,
            "neftune_noise_alpha": args.neftune_noise_alpha is not None,
            "auto_find_batch_size": args.auto_find_batch_size,
            "eval_on_start (call trainer.evaluate() before trainer.train())": args.eval_on_start,
            "lr_scheduler_type='reduce_lr_on_plateau'": args.lr_scheduler_type == "reduce_lr_on_plateau",
            **{f"{name} (run.batches orders the samples)": True for name in _other_orders(args)},
        }
        if found := [name for name, is_asked in asked.items() if is_asked]:
            raise ConfigError(
                f"TrainingArguments asks for what Lockstep's Trainer does not have: {'; '.join(found)}. Leave it out; "
                "global_batch and micro_batches of lockstep.init say how a step is computed."
            )
        overridden = [
            name for name in _NOT_CALLED if getattr(type(self), name) is not getattr(_Trainer, name)
        ]
        if overridden:
            raise ConfigError(
                f"{type(self).__name__} overrides {', '.join(overridden)}, which Lockstep's Trainer does not call. "
                "Override compute_loss, or write the loop with lockstep.init."
            )
        args.average_tokens_across_devices = False  # the weights of the losses do it
        torch.set_num_threads(
            run._session.threads
        )  # accelerate sets another number where none is in the environment
        self._losses: list[Tensor] = []
        self._divides_by_items: bool | None = None
        """Whether the loss is a sum divided by the number of tokens that it is given; None before it was tried."""

    def train(self, resume_from_checkpoint: Any = None, **named: Any) -> Any:
        """Trains up to ``num_train_epochs`` or ``max_steps``; goes on where the run was resumed. Collective.

        Returns:
            The steps done, and the mean loss of those of this call.
        """
        if resume_from_checkpoint or named:
            raise ConfigError(
                "Lockstep's Trainer resumes with lockstep.init(directory='runs/a', resume='auto'); train() takes no "
                "arguments."
            )
        run, args, state, events = self.run, self.args, self.state, self.callback_handler
        loader = self._loader_of(self.train_dataset, run.options.global_batch, shuffle=True)
        steps = run.steps_per_epoch(loader, model=self.model)
        total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * steps)
        self.create_optimizer_and_scheduler(total)
        self.model, self.optimizer, self.lr_scheduler = run.prepare(
            self.model, self.optimizer, self.lr_scheduler
        )
        events.optimizer, events.lr_scheduler = self.optimizer, self.lr_scheduler
        events.train_dataloader = loader
        self._try_items(loader)
        state.max_steps, state.num_train_epochs = total, math.ceil(total / steps)
        state.global_step, first = run.position.step, run.position.step
        state.compute_steps(args, total)
        mean = torch.zeros((), dtype=torch.float64)
        self.control = events.on_train_begin(args, state, self.control)
        for _ in run.epochs(state.num_train_epochs):
            self.model.train()
            self.control = events.on_epoch_begin(args, state, self.control)
            for batch in run.batches(loader):
                self.control = events.on_step_begin(args, state, self.control)
                loss = run.backward(batch, _as_it_is, forward=self._loss_of)
                norm = run.clip_gradients(args.max_grad_norm) if args.max_grad_norm else None
                self.optimizer.step()
                self.lr_scheduler.step()
                self.optimizer.zero_grad()
                self._losses.append(loss)
                mean += loss.cpu()
                state.global_step += 1
                state.epoch = state.global_step / steps
                self.control = events.on_step_end(args, state, self.control)
                self._log_evaluate_save(norm)
                if self.control.should_training_stop or state.global_step >= total:
                    break
            self.control = events.on_epoch_end(args, state, self.control)
            self._log_evaluate_save(None)
            if self.control.should_training_stop or state.global_step >= total:
                break
        self.control = events.on_train_end(args, state, self.control)
        return TrainOutput(state.global_step, float(mean) / max(1, state.global_step - first), {})

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """The loss over the data set, and ``compute_metrics`` of all logits and labels. Collective.

        Returns:
            Numbers by name, the same on every rank.
        """
        data = self.eval_dataset if eval_dataset is None else eval_dataset
        loader, run = self._loader_of(data, self.args.per_device_eval_batch_size, shuffle=False), self.run
        self._try_items(loader)
        metrics = {"loss": run.evaluate(loader, _as_it_is, forward=self._loss_of)}
        if self.compute_metrics is not None:
            logits = run.predict(loader, forward=lambda inputs: self.model(**inputs).logits)
            labels = run.predict(loader, forward=lambda inputs: inputs[self.label_names[0]])
            found: dict[str, float] = {}
            if logits is not None and labels is not None:
                found = self.compute_metrics(EvalPrediction(logits.numpy(), labels.numpy()))
                found = {name: float(value) for name, value in found.items()}
            group = run._session.group
            metrics |= found if group is None else gather_json(found, group, run.device)[0]
        prefixed = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        self.log(dict(prefixed))
        self.control = self.callback_handler.on_evaluate(self.args, self.state, self.control, prefixed)
        return prefixed

    def predict(self, *given: Any, **named: Any) -> Any:
        """Refused."""
        raise ConfigError(
            "Lockstep's Trainer has no predict(). Use trainer.run.predict(loader, forward=lambda inputs: "
            "model(**inputs).logits), which returns the outputs in the order of the data set."
        )

    def _loader_of(self, data: Any, size: int, *, shuffle: bool) -> DataLoader[Any]:
        collate = self._get_collator_with_removed_columns(self.data_collator)
        return DataLoader(
            data,
            batch_size=size,
            shuffle=shuffle,
            collate_fn=collate,
            num_workers=self.args.dataloader_num_workers,
            drop_last=shuffle and self.args.dataloader_drop_last,
        )

    def _loss_of(self, inputs: Any) -> Any:
        """The mean over samples, or the pair (sum, tokens) for a model or loss function that counts tokens."""
        items = self._get_num_items_in_batch([inputs], self.run.device)
        if items is None:
            return self.compute_loss(self.model, dict(inputs))
        if self._divides_by_items is False:
            return self.compute_loss(self.model, dict(inputs), num_items_in_batch=items)
        return self.compute_loss(self.model, dict(inputs), num_items_in_batch=torch.ones_like(items)), items

    def _try_items(self, loader: DataLoader[Any]) -> None:
        """Finds out whether the loss depends on the number of tokens that it is given, as the Trainer expects.

        Raises:
            ConfigError: it does so in another way than being divided by it.
        """
        if self._divides_by_items is not None:
            return
        self.run.require_prepared()
        few = DataLoader(loader.dataset, batch_size=_ROWS_TRIED, collate_fn=loader.collate_fn)
        with evaluating(self.model), generators_kept():
            inputs = DeviceTransfer(self.run.device)(next(iter(few)))
            items = self._get_num_items_in_batch([inputs], self.run.device)
            if not isinstance(items, Tensor):
                self._divides_by_items = False
                return
            one, two = (
                float(
                    self.compute_loss(
                        self.model, dict(inputs), num_items_in_batch=torch.full_like(items, count)
                    )
                )
                for count in (1, 2)
            )
        if not math.isfinite(one):
            return  # nothing of these rows counts
        divides, ignores = (math.isclose(one, other, rel_tol=1e-3) for other in (2 * two, two))
        if not divides and not ignores:
            raise ConfigError(
                f"The loss of the first batch is {one:.6g} with num_items_in_batch=1 and {two:.6g} with 2. It must be "
                "a sum divided by num_items_in_batch, or a mean over samples that does not depend on it."
            )
        self._divides_by_items = divides

    def _log_evaluate_save(self, norm: Tensor | None) -> None:
        control = self.control
        if control.should_log and self._losses:
            loss = torch.stack(self._losses).mean()
            logs = {"loss": float(loss), "learning_rate": self.lr_scheduler.get_last_lr()[0]}
            self._losses.clear()
            self.log(logs if norm is None else logs | {"grad_norm": float(norm)})
        if control.should_evaluate:
            self.evaluate()
        if control.should_save:
            if self.run.options.directory is not None:
                self.run.save()
            self.save_model(
                f"{self.args.output_dir}/checkpoint-{self.state.global_step}", _internal_call=True
            )
            self.control = self.callback_handler.on_save(self.args, self.state, control)
