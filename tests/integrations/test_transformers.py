"""Scripts for the Trainer of transformers, PEFT, and folders of the hub: one fingerprint on 1, 2, 3 processes."""

import os

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import run_ranks

import lockstep
from lockstep.errors import ConfigError
from lockstep.runtime import Callback
from lockstep.runtime.control import Stopped, StopReason

transformers = pytest.importorskip("transformers", exc_type=ImportError)
pytest.importorskip("accelerate", exc_type=ImportError)
VOCABULARY = 37


def causal_model():
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
    )
    return transformers.GPT2LMHeadModel(config)


def sentences(count=26):
    """Rows of equal length, of which different numbers of tokens count."""
    generator, rows = torch.Generator().manual_seed(1), []
    for number in range(count):
        tokens = torch.randint(0, VOCABULARY, (12,), generator=generator)
        labels = tokens.clone()
        labels[: number % 9] = -100
        rows.append({"input_ids": tokens, "labels": labels})
    return rows


def accuracy(prediction):
    return {"accuracy": (prediction.predictions.argmax(-1) == prediction.label_ids).mean()}


def trainer_of(run, folder, model, **settings):
    from lockstep.integrations.transformers import TransformersTrainer

    settings = {
        "num_train_epochs": 2,
        "learning_rate": 1e-2,
        "warmup_steps": 2,
        "logging_steps": 1,
        "save_strategy": "no",
    } | settings
    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, **settings
    )
    data = sentences()
    return TransformersTrainer(
        run, model=model, args=args, train_dataset=data, eval_dataset=data[:7], compute_metrics=accuracy
    )


def begin(micro_batches=4, **options):
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # as launchers set it; accelerate wants to read it
    run = lockstep.init(global_batch=8, micro_batches=micro_batches, seed=3, **options)
    torch.manual_seed(0)
    return run


def train(world, folder, micro_batches=4):
    run = begin(micro_batches)
    trainer = trainer_of(run, folder, causal_model(), eval_strategy="epoch")
    done = trainer.train()
    trainer.save_model()
    return run.fingerprint(), done.global_step, done.training_loss, trainer.state.log_history


def test_the_trainer_gives_one_fingerprint_and_a_folder_that_loads(tmp_path):
    answers = [answer for ranks in (1, 2, 3) for answer in run_ranks(train, ranks, tmp_path / f"w{ranks}")]
    assert all(answer == answers[0] for answer in answers)
    _, steps, loss, history = answers[0]
    assert steps == 8 and loss > 0
    assert [entry["step"] for entry in history if "loss" in entry] == list(range(1, 9))
    assert sum("eval_accuracy" in entry for entry in history) == 2
    texts = [transformers.AutoModelForCausalLM.from_pretrained(tmp_path / f"w{ranks}") for ranks in (1, 3)]
    for one, other in zip(texts[0].parameters(), texts[1].parameters()):
        assert torch.equal(one, other)


def saved(world, folder, strategy):
    run = begin(strategy=strategy)
    trainer = trainer_of(run, folder, causal_model(), max_steps=2)
    trainer.train()
    trainer.save_model()
    return run.fingerprint()


def test_a_model_in_parts_is_saved_as_the_same_folder(tmp_path):
    (whole, *_), (parts, *_) = (run_ranks(saved, 2, tmp_path / name, name) for name in ("ddp", "fsdp"))
    assert whole == parts
    one, other = (load_file(tmp_path / name / "model.safetensors") for name in ("ddp", "fsdp"))
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def counted(world, folder):
    trainer = trainer_of(begin(), folder, causal_model(), max_steps=5)  # of 8, 8, 8, 2 and 8 samples
    speeds = trainer.train().metrics
    return speeds["train_samples_per_second"] / speeds["train_steps_per_second"]


def test_samples_per_second_count_the_samples_of_the_steps_that_were_made(tmp_path):
    """They were a share of the data set: 32.5 samples in five of its steps."""
    (each,) = run_ranks(counted, 1, tmp_path)
    assert each == pytest.approx(34 / 5, rel=0.01)


def one_step(world, folder, micro_batches):
    """The loss of the first step over eight rows; by the Trainer of transformers for None."""
    run = begin(micro_batches or 1)
    model = causal_model()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    settings = {"max_steps": 1, "per_device_train_batch_size": 8}
    trainer = trainer_of(run, folder, model, **settings)
    if micro_batches is None:
        trainer = transformers.Trainer(model=model, args=trainer.args, train_dataset=sentences()[:8])
    trainer.train_dataset = sentences()[:8]
    return trainer.train().training_loss


def test_the_loss_is_the_mean_over_all_tokens_of_the_global_batch(tmp_path):
    """Micro-batches have other numbers of tokens each, so that the mean of their means would be another number."""
    expected, one, four = (run_ranks(one_step, 1, tmp_path, pieces)[0] for pieces in (None, 1, 4))
    assert one == pytest.approx(expected, rel=1e-6) and four == pytest.approx(expected, rel=1e-6)


def lora(world, folder):
    import peft

    run = begin()
    config = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    model = peft.get_peft_model(causal_model(), config)
    trainer = trainer_of(run, folder, model)
    trainer.train()
    fingerprint = run.fingerprint()
    trainer.save_model()
    if run.is_main:
        torch.manual_seed(0)
        again = peft.PeftModel.from_pretrained(causal_model(), folder).state_dict()
        for name, value in model.state_dict().items():
            assert torch.equal(value, again[name]), name
    return fingerprint, sum(parameter.requires_grad for parameter in model.parameters())


def test_an_adapter_of_peft_trains_to_one_fingerprint_and_loads_again(tmp_path):
    pytest.importorskip("peft", exc_type=ImportError)
    answers = [answer for ranks in (1, 2, 3) for answer in run_ranks(lora, ranks, tmp_path / f"w{ranks}")]
    assert len(set(answers)) == 1 and answers[0][1] == 4


def own_loop(world, folder):
    run = begin()
    model = causal_model()
    model, optimizer = run.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    for batch in run.batches(sentences()):
        run.backward(batch, lambda output, data: (output.loss, (data["labels"][:, 1:] != -100).sum()))
        optimizer.step()
        optimizer.zero_grad()
    if run.is_main:
        model.save_pretrained(folder)
        again = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert all(torch.equal(one, other) for one, other in zip(model.parameters(), again.parameters()))
    return run.fingerprint()


def test_a_prepared_model_is_exported_as_a_folder_of_the_hub(tmp_path):
    answers = [answer for ranks in (1, 2) for answer in run_ranks(own_loop, ranks, tmp_path / f"w{ranks}")]
    assert len(set(answers)) == 1


def refused(world, folder):
    run = begin()
    with pytest.raises(ConfigError, match="gradient_accumulation_steps"):
        trainer_of(run, folder, causal_model(), gradient_accumulation_steps=2)
    trainer = trainer_of(run, folder, causal_model())
    with pytest.raises(ConfigError, match="resume='auto'"):
        trainer.train(resume_from_checkpoint=True)
    for settings in (
        {"train_sampling_strategy": "group_by_length"},
        {"activation_checkpointing": True},
        {"include_for_metrics": ["inputs"]},
    ):
        with pytest.raises(ConfigError, match=next(iter(settings))):
            trainer_of(run, folder, causal_model(), **settings)

    class Stepping(type(trainer)):
        def training_step(self, *given):
            return None

    with pytest.raises(ConfigError, match="overrides training_step"):
        Stepping(run, model=causal_model(), args=trainer.args, train_dataset=sentences())


def mean_of_its_own(world, folder, micro_batches):
    """The gradient norm and the loss of a step, with a compute_loss that does not divide by the tokens."""
    from lockstep.integrations.transformers import TransformersTrainer

    run = begin(micro_batches)
    torch.manual_seed(0)
    model, data = causal_model().eval(), [{**row, "labels": row["input_ids"]} for row in sentences()[:8]]

    class Own(TransformersTrainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits = model(input_ids=inputs["input_ids"]).logits[:, :-1]
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), inputs["labels"][:, 1:].flatten())

    args = trainer_of(run, folder, model, max_steps=1, learning_rate=0.0).args
    trainer = Own(run, model=model, args=args, train_dataset=data)
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    trainer.train()
    with torch.no_grad():
        rows = torch.stack([row["input_ids"] for row in data])
        expected = torch.nn.functional.cross_entropy(model(rows).logits[:, :-1].flatten(0, 1), rows[:, 1:].flatten())
    entry = trainer.state.log_history[0]
    padded = [
        {**row, "labels": torch.where(torch.arange(len(row["labels"])) < 2 + i, row["labels"], -100)}
        for i, row in enumerate(data)
    ]
    trainer.evaluate(padded)  # no mean over samples, which a compute_loss has no way to say
    return entry["loss"], float(expected), entry["grad_norm"]


def test_a_loss_that_is_not_divided_by_the_tokens_is_taken_as_the_mean_that_it_is(tmp_path):
    answers = [run_ranks(mean_of_its_own, 1, tmp_path, pieces)[0] for pieces in (1, 4)]
    for loss, expected, _ in answers:
        assert loss == pytest.approx(expected, rel=1e-5)
    assert answers[0][2] == pytest.approx(answers[1][2], rel=1e-4)


def test_what_the_trainer_does_not_have_ends_in_a_sentence(tmp_path):
    run_ranks(refused, 1, tmp_path)


def numbers(history):
    """The entries of a log, without durations."""
    times = ("_runtime", "_per_second", "_preparation_time", "total_flos")
    return [{name: value for name, value in each.items() if not name.endswith(times)} for each in history]


def of_both(world, folder, is_ours, settings):
    """Trains on one batch per epoch, so that the order of samples is no matter; by the Trainer itself if not ours.

    Returns:
        The log, the steps, the best checkpoint, the checkpoints that are left, what it predicts in the end.
    """
    run = begin() if is_ours else None
    torch.manual_seed(0)
    model, rows = causal_model(), sentences()
    for module in model.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    given = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 7,
        "learning_rate": 1e-2,
        **settings,
    }
    args = transformers.TrainingArguments(output_dir=str(folder), **given)
    named = {
        "model": model,
        "args": args,
        "train_dataset": rows[:8],
        "eval_dataset": {"a": rows[8:15], "b": rows[1:8]},
        "compute_metrics": lambda given: {"accuracy": (given.predictions == given.label_ids).mean()},
        "preprocess_logits_for_metrics": lambda logits, labels: logits.argmax(-1),
        "callbacks": [transformers.EarlyStoppingCallback(2)] if args.metric_for_best_model else [],
    }
    if is_ours:
        from lockstep.integrations.transformers import TransformersTrainer

        trainer = TransformersTrainer(run, **named)
    else:
        trainer = transformers.Trainer(**named)
    done = trainer.train()
    predicted = trainer.predict(rows[8:15])
    found = numbers(trainer.state.log_history), done.global_step, trainer.state.best_global_step
    left = sorted(each.name for each in folder.glob("checkpoint-*"))
    return *found, left, predicted.predictions.tolist(), predicted.label_ids.tolist()


BEST = {
    "num_train_epochs": 8,
    "warmup_steps": 2,
    "eval_strategy": "epoch",
    "save_strategy": "epoch",
    "save_total_limit": 2,
    "load_best_model_at_end": True,
    "metric_for_best_model": "a_accuracy",
    "greater_is_better": True,
    "label_smoothing_factor": 0.1,
    "max_grad_norm": 0.0,
    "eval_on_start": True,
}
PLATEAU = {
    "num_train_epochs": 4,
    "eval_strategy": "epoch",
    "lr_scheduler_type": "reduce_lr_on_plateau",
    "metric_for_best_model": "a_accuracy",
    "greater_is_better": False,
    "max_grad_norm": 0.5,
    "include_num_input_tokens_seen": True,
    "lr_scheduler_kwargs": {"patience": 0},
    "save_strategy": "best",
}


@pytest.mark.parametrize("settings", [BEST, PLATEAU], ids=["best", "plateau"])
def test_logs_stops_and_checkpoints_are_those_of_the_trainer_itself(tmp_path, settings):
    """Learning rates, norms, losses of named sets, early stopping, the best model, the checkpoints that are left."""
    (expected,) = run_ranks(of_both, 1, tmp_path / "plain", False, settings)
    answers = [
        *run_ranks(of_both, 1, tmp_path / "one", True, settings),
        *run_ranks(of_both, 2, tmp_path / "two", True, settings),
    ]
    for answer in answers:
        assert answer[0] == answers[0][0]
        assert answer[1:] == expected[1:]
    for one, other in zip(answers[0][0], expected[0], strict=True):
        assert one == pytest.approx(other, rel=1e-3, abs=1e-8)


def stopped(world, folder, steps, stop):
    """The fingerprint and the log of a training that saves every two steps, up to ``stop`` of ``steps`` steps."""

    class Stop(transformers.TrainerCallback):
        def on_save(self, args, state, control, **named):
            control.should_training_stop = state.global_step >= stop

    os.environ["MASTER_ADDR"] = "127.0.0.1"
    run = lockstep.init(global_batch=8, micro_batches=4, seed=3, directory=folder / "run", resume="auto")
    torch.manual_seed(0)
    trainer = trainer_of(
        *(run, folder / "out", causal_model()),
        max_steps=steps,
        logging_steps=3,
        save_strategy="steps",
        save_steps=2,
        eval_strategy="steps",
        eval_steps=2,
        metric_for_best_model="loss",
    )
    trainer.add_callback(transformers.EarlyStoppingCallback(5))
    trainer.add_callback(Stop())
    trainer.train()
    early = trainer.callback_handler.callbacks[-2].early_stopping_patience_counter
    return run.fingerprint(), trainer.state.log_history, trainer.state.best_metric, early


def test_a_stopped_training_ends_with_the_bits_and_the_log_of_one_that_was_not(tmp_path):
    """Stopped between two logs, in an epoch, and resumed on other numbers of processes; a log is a mean over three."""
    (expected,) = run_ranks(stopped, 1, tmp_path / "whole", 8, 100)
    run_ranks(stopped, 2, tmp_path / "parts", 8, 2)
    run_ranks(stopped, 1, tmp_path / "parts", 8, 4)
    assert run_ranks(stopped, 3, tmp_path / "parts", 8, 100) == [expected] * 3
    assert [entry["step"] for entry in expected[1] if "loss" in entry] == [3, 6]


class StopsAt(Callback):
    """Asks the run to stop, as SIGTERM does, while it computes a step."""

    def __init__(self, run, step):
        self.run, self.step = run, step

    def on_step_begin(self, batch):
        if batch.plan.step == self.step:
            self.run._session.heartbeat.control.request_stop(StopReason.PREEMPTED)


def logged_by_epoch(world, folder, stop):
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    run = lockstep.init(global_batch=8, micro_batches=4, seed=3, directory=folder / "run", resume="auto")
    torch.manual_seed(0)
    trainer = trainer_of(run, folder / "out", causal_model(), logging_strategy="epoch", eval_strategy="epoch")
    run.add_callback(StopsAt(run, stop))
    try:
        trainer.train()
    except Stopped:
        run.close()
        return None
    return run.fingerprint(), trainer.state.log_history[:-1]


def test_the_log_of_an_epoch_that_was_stopped_at_its_last_step_has_the_rate_and_the_norm_of_that_step(
    tmp_path,
):
    """It had the learning rate of the next one, and no norm."""
    (expected,) = run_ranks(logged_by_epoch, 1, tmp_path / "whole", None)
    assert run_ranks(logged_by_epoch, 1, tmp_path / "parts", 3) == [None]
    assert run_ranks(logged_by_epoch, 2, tmp_path / "parts", None) == [expected] * 2
    assert [entry["step"] for entry in expected[1] if "grad_norm" in entry] == [4, 8]


class TwoOutputs(torch.nn.Module):
    """Two outputs beside the loss, and two kinds of labels, as for the answers to questions."""

    def __init__(self):
        super().__init__()
        self.start, self.end = torch.nn.Linear(4, 3), torch.nn.Linear(4, 3)

    def forward(self, x, first=None, second=None):
        start, end = self.start(x), self.end(x)
        loss = None
        if first is not None:
            loss = torch.nn.functional.cross_entropy(start, first)
            loss = loss + torch.nn.functional.cross_entropy(end, second)
        return {"loss": loss, "start": start, "end": end} if loss is not None else {"start": start, "end": end}


def several(world, folder):
    """Predictions of two outputs with and without labels, without training; and whether they are those by hand."""
    from lockstep.integrations.transformers import TransformersTrainer

    run = begin()
    torch.manual_seed(0)
    model, xs = TwoOutputs(), torch.randn(13, 4)
    rows = [{"x": x, "first": number % 3, "second": (number + 1) % 3} for number, x in enumerate(xs)]
    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], disable_tqdm=True, label_names=["first", "second"]
    )
    trainer = TransformersTrainer(run, model=model, args=args)
    start, end = (each.detach() for each in (model.start(xs), model.end(xs)))
    both, alone = trainer.predict(rows), trainer.predict([{"x": x} for x in xs])
    for found in (both, alone):
        for one, other in zip(found.predictions, (start, end), strict=True):
            assert torch.allclose(torch.from_numpy(one), other, atol=1e-6)
    assert alone.label_ids is None and alone.metrics == {}
    assert [each.tolist() for each in both.label_ids] == [[row[n] for row in rows] for n in ("first", "second")]
    first, second = (torch.from_numpy(each) for each in both.label_ids)
    by_hand = sum(torch.nn.functional.cross_entropy(a, b) for a, b in ((start, first), (end, second)))
    assert both.metrics["test_loss"] == pytest.approx(float(by_hand), rel=1e-6)
    return both.metrics


def test_several_outputs_and_labels_are_predicted_on_every_rank(tmp_path):
    answers = run_ranks(several, 1, tmp_path) + run_ranks(several, 2, tmp_path)
    assert all(answer == answers[0] for answer in answers)


class Sentences(torch.utils.data.IterableDataset):
    def __iter__(self):
        return iter(sentences())

    def __len__(self):
        return 26


def streamed(world, folder):
    run = begin()
    trainer = trainer_of(run, folder, causal_model(), max_steps=5)
    trainer.train_dataset = Sentences()
    trainer.train()
    return run.fingerprint(), trainer.state.epoch


def test_a_stream_with_a_length_is_trained_on(tmp_path):
    """torch's error was raised, that a stream cannot be shuffled."""
    answers = run_ranks(streamed, 1, tmp_path) + run_ranks(streamed, 3, tmp_path)
    assert len(set(answers)) == 1 and answers[0][1] == 1.25


def ragged(world, folder):
    rows = [{"x": torch.randn(4), "first": 0, "second": 1} for _ in range(8)]
    run, model = begin(), TwoOutputs()

    def widths(logits, labels):
        calls.append(labels)
        return torch.zeros(len(logits[0]), len(calls))

    calls = []
    args = transformers.TrainingArguments(
        output_dir=str(folder), use_cpu=True, report_to=[], label_names=["first", "second"]
    )
    from lockstep.integrations.transformers import TransformersTrainer

    args.per_device_eval_batch_size = 4
    trainer = TransformersTrainer(run, model=model, args=args, preprocess_logits_for_metrics=widths)
    with pytest.raises(ConfigError, match=r"padding='max_length'"):
        trainer.predict(rows)


def test_outputs_of_several_shapes_are_refused(tmp_path):
    run_ranks(ragged, 1, tmp_path)


class LeavesEpochs(transformers.TrainerCallback):
    """Ends each epoch after its second step, of four."""

    steps = optimized = 0

    def on_epoch_begin(self, args, state, control, **named):
        self.steps = 0

    def on_optimizer_step(self, args, state, control, **named):
        self.optimized += 1

    def on_step_end(self, args, state, control, **named):
        self.steps += 1
        control.should_epoch_stop = self.steps == 2


def leaving(world, folder, is_ours):
    run, callback = begin(), LeavesEpochs()
    trainer = trainer_of(run, folder, causal_model())
    if not is_ours:
        trainer = transformers.Trainer(model=trainer.model, args=trainer.args, train_dataset=sentences())
    trainer.add_callback(callback)
    steps = trainer.train().global_step
    rates = [each["learning_rate"] for each in trainer.state.log_history if "learning_rate" in each]
    epochs = [each["epoch"] for each in trainer.state.log_history if "learning_rate" in each]
    return steps, callback.optimized, rates, epochs


def test_a_callback_may_end_an_epoch(tmp_path):
    (expected,) = run_ranks(leaving, 1, tmp_path, False)
    assert expected[:2] == (4, 4)
    assert run_ranks(leaving, 1, tmp_path, True) + run_ranks(leaving, 2, tmp_path, True) == [expected] * 3
