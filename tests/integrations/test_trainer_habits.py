"""Habits of scripts for the Trainer of transformers beside training: the numbers are those of the Trainer itself."""

import logging
import os

import numpy as np
import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F

import lockstep

transformers = pytest.importorskip("transformers", exc_type=ImportError)
pytest.importorskip("accelerate", exc_type=ImportError)
WORDS = 37


def begin(global_batch=8, **options):
    os.environ["MASTER_ADDR"] = "127.0.0.1"  # as launchers set it; accelerate wants to read it
    run = lockstep.init(global_batch=global_batch, micro_batches=4, seed=3, **options)
    torch.manual_seed(0)
    return run


def trainer_of(run, folder, kind=None, **named):
    """A Trainer of the adapter, or of transformers where there is no run."""
    from lockstep.integrations.transformers import TransformersTrainer

    settings = {
        "use_cpu": True,
        "report_to": [],
        "disable_tqdm": True,
        "logging_steps": 1,
        "save_strategy": "no",
        "per_device_train_batch_size": 8,
        "learning_rate": 1e-2,
        **named.pop("settings", {}),
    }
    args = transformers.TrainingArguments(output_dir=str(folder), **settings)
    kind = kind or (transformers.Trainer if run is None else TransformersTrainer)
    return kind(*([] if run is None else [run]), args=args, **named)


def without_times(history):
    times = ("_runtime", "_per_second", "_preparation_time", "total_flos")
    return [{name: value for name, value in each.items() if not name.endswith(times)} for each in history]


def compared(body, folder):
    """Asserts that the log of a body is that of the Trainer itself, on one process and on two."""
    (expected,) = run_ranks(body, 1, folder, None)
    for ranks in (1, 2):
        for found in run_ranks(body, ranks, folder, "ours"):
            for one, other in zip(found, expected, strict=True):
                assert one == pytest.approx(other, rel=1e-4, abs=1e-7)


def tokenizer():
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["[PAD]", "[UNK]", "[MASK]", *(f"w{number}" for number in range(WORDS - 3))]
    fast = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="[UNK]"))
    fast.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=fast, pad_token="[PAD]", unk_token="[UNK]", mask_token="[MASK]"
    )


def texts(count):
    random = np.random.default_rng(0)
    return [" ".join(f"w{word}" for word in random.integers(0, 30, random.integers(4, 12))) for _ in range(count)]


def translated(world, folder, whose):
    """T5 divides by the number of labels that it finds in its batch, whatever number it is given."""
    run = begin() if whose else None
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=16,
        d_kv=8,
        d_ff=32,
        num_layers=1,
        num_heads=2,
        dropout_rate=0.0,
        decoder_start_token_id=0,
    )
    model, words = transformers.T5ForConditionalGeneration(config), tokenizer()
    rows = [
        {
            "input_ids": words(text)["input_ids"],
            "labels": words(" ".join(text.split()[: 1 + number % 4]))["input_ids"],
        }
        for number, text in enumerate(texts(16))
    ]
    trainer = trainer_of(
        *(run, folder),
        model=model,
        train_dataset=rows[:8],
        eval_dataset=rows[8:],
        processing_class=words,
        data_collator=transformers.DataCollatorForSeq2Seq(words, model=model),
        settings={"num_train_epochs": 2, "eval_strategy": "epoch", "per_device_eval_batch_size": 8},
    )
    trainer.train()
    return without_times(trainer.state.log_history)


def test_a_mean_over_the_tokens_of_a_batch_is_that_over_those_of_the_global_batch(tmp_path):
    """It was taken as a mean over samples, with a warning that asked for a pair that a model cannot give."""
    compared(translated, tmp_path)


def masked(world, folder, counts):
    """The fingerprint after two steps of all rows, of which so many tokens count; the first loss is that by hand."""
    run = begin(len(counts))
    config = transformers.BertConfig(
        vocab_size=WORDS,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model, rows = transformers.BertForMaskedLM(config), []
    for number, count in enumerate(counts):
        tokens = torch.arange(6) + number
        counted = torch.arange(6) < count
        rows.append({"input_ids": tokens, "labels": torch.where(counted, tokens, -100)})
    batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
    expected = model.train()(**batch).loss.item()
    trainer = trainer_of(run, folder, model=model, train_dataset=rows, settings={"max_steps": 2})
    trainer.train()
    losses = [each["loss"] for each in trainer.state.log_history if "loss" in each]
    assert losses[0] == pytest.approx(expected, rel=1e-6) and losses[1] < losses[0]
    return run.fingerprint()


@pytest.mark.parametrize("counts", [(0, 0, 1, 3, 2, 0, 6, 1), (*[0] * 8, 0, 1, 3, 2, 0, 6, 1, 2)])
def test_micro_batches_without_a_counted_token_count_as_nothing(tmp_path, counts):
    """Where the first rows count nothing, later ones tell what the loss is a mean over."""
    answers = [answer for ranks in (1, 2) for answer in run_ranks(masked, ranks, tmp_path, counts)]
    assert len(set(answers)) == 1


def partly(world, folder, whose):
    """An optimizer of some parameters, where others have gradients that nobody uses."""
    run = begin() if whose else None
    torch.manual_seed(0)
    model = Labelled()
    model.first = nn.Linear(5, 5)
    draws = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(5, generator=draws), "labels": torch.tensor(n % 3)} for n in range(8)]
    optimizer = torch.optim.SGD(model.layer.parameters(), 0.1)
    trainer = trainer_of(
        *(run, folder),
        model=model,
        train_dataset=rows,
        optimizers=(optimizer, None),
        settings={"num_train_epochs": 3, "max_grad_norm": 0.1, "label_names": ["labels"]},
    )
    trainer.train()
    return without_times(trainer.state.log_history)


def test_gradients_that_the_optimizer_does_not_use_are_cleared_with_the_others(tmp_path):
    """They were added up over the steps, and with them the norm by which the others are clipped."""
    compared(partly, tmp_path)


class Plain(nn.Module):
    """Knows nothing of labels."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x)


def own_loss(world, folder, whose):
    from lockstep.integrations.transformers import TransformersTrainer

    run = begin() if whose else None

    class Weighted(TransformersTrainer if whose else transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            labels = inputs.pop("labels")
            logits = model(**inputs) / 2
            loss = F.cross_entropy(logits, labels)
            return (loss, {"logits": logits}) if return_outputs else loss

    torch.manual_seed(0)
    draws = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(5, generator=draws), "labels": torch.tensor(n % 3)} for n in range(24)]
    trainer = trainer_of(
        *(run, folder, Weighted),
        model=Plain(),
        train_dataset=rows[:8],
        eval_dataset=rows[8:],
        compute_metrics=lambda found: {"largest": found.predictions.max()},
        settings={"num_train_epochs": 2, "eval_strategy": "epoch", "label_names": ["labels"]},
    )
    trainer.train()
    returned = without_times([trainer.evaluate()])
    return [*without_times(trainer.state.log_history), *returned]


def test_metrics_are_computed_of_the_outputs_that_compute_loss_returns(tmp_path):
    """The model was called with the labels instead. What evaluate returns has the epoch, as the Trainer's."""
    compared(own_loss, tmp_path)


def classified(world, folder, whose):
    run = begin() if whose else None
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=WORDS,
        n_positions=16,
        n_embd=16,
        n_layer=1,
        n_head=2,
        num_labels=3,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model, words = transformers.GPT2ForSequenceClassification(config), tokenizer()
    rows = [{"input_ids": words(text)["input_ids"], "labels": number % 3} for number, text in enumerate(texts(8))]
    trainer = trainer_of(
        *(run, folder),
        model=model,
        train_dataset=rows,
        processing_class=words,
        settings={"num_train_epochs": 2},
    )
    trainer.train()
    assert model.config.pad_token_id == 0
    return without_times(trainer.state.log_history)


def test_the_model_has_the_tokens_of_the_tokenizer(tmp_path):
    """transformers said 'Cannot handle batch sizes > 1 if no padding token is defined'."""
    compared(classified, tmp_path)


def overflowed(world, folder):
    run = begin(precision="fp16", loss_scale=2.0**40, loss_scale_backoff_factor=2.0**-28)
    draws = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(5, generator=draws), "labels": torch.tensor(n % 3)} for n in range(8)]
    settings = {"max_steps": 4, "label_names": ["labels"]}
    trainer = trainer_of(run, folder, model=Labelled(), train_dataset=rows, settings=settings)
    trainer.train()
    rates = [each["learning_rate"] for each in trainer.state.log_history if "loss" in each]
    return run.skipped_steps, rates


class Labelled(Plain):
    first = staticmethod(lambda x: x)

    def forward(self, x, labels):
        logits = super().forward(self.first(x))
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def test_a_step_that_was_skipped_leaves_the_learning_rate(tmp_path):
    """As under the Trainer; the schedule went on."""
    assert run_ranks(overflowed, 1, tmp_path) == [(1, pytest.approx([1e-2, 1e-2, 0.75e-2, 0.5e-2]))]


class Counts(transformers.TrainerCallback):
    """Changes the training by a count of its own, and keeps averages of the weights in tensors, if asked to."""

    def __init__(self, averages):
        self.steps, self.seen, self.averages, self.trainer = 0, [], {} if averages else None, None

    def on_train_begin(self, args, state, control, **named):
        self.started = True

    def on_step_end(self, args, state, control, model=None, optimizer=None, **named):
        self.steps += 1
        self.seen.append({"step": state.global_step})
        if self.averages is not None:
            self.averages = {name: each.detach().clone() for name, each in model.named_parameters()}
        if self.steps == 5:
            optimizer.param_groups[0]["weight_decay"] = 0.5


class Stops(transformers.TrainerCallback):
    def __init__(self, stop):
        self.stop = stop

    def on_save(self, args, state, control, **named):
        control.should_training_stop = state.global_step >= self.stop


def counted(world, folder, stop, averages):
    from lockstep.integrations.transformers import TransformersTrainer

    class Decaying(TransformersTrainer):
        def __init__(self, *given, **named):
            super().__init__(*given, **named)
            self.factor = 1.0

        def compute_loss(self, model, inputs, return_outputs=False, **named):
            found = super().compute_loss(model, inputs, return_outputs=return_outputs)
            return found if return_outputs else found * self.factor

        def log(self, logs, *given):
            self.factor *= 0.9
            super().log({**logs, "factor": self.factor}, *given)

    warnings = []
    handler = logging.Handler()
    handler.emit = warnings.append
    logging.getLogger("lockstep").addHandler(handler)
    run = begin(directory=folder / "run", resume="auto")
    draws = torch.Generator().manual_seed(1)
    rows = [{"x": torch.randn(5, generator=draws), "labels": torch.tensor(n % 3)} for n in range(24)]
    counts = Counts(averages)
    trainer = trainer_of(
        *(run, folder / "out", Decaying),
        model=Labelled(),
        train_dataset=rows,
        callbacks=[counts, Stops(stop)],
        settings={"max_steps": 8, "save_strategy": "steps", "save_steps": 3, "label_names": ["labels"]},
    )
    counts.trainer = trainer
    trainer.train()
    history = [each for each in trainer.state.log_history if "loss" in each]
    return run.fingerprint(), history, counts.seen, [each.getMessage() for each in warnings]


def test_callbacks_and_a_trainer_of_the_users_own_go_on_with_what_they_counted(tmp_path):
    """They began anew in a resumed run, which ended in other bits, with exit status 0."""
    (whole,) = run_ranks(counted, 1, tmp_path / "whole", 100, False)
    run_ranks(counted, 2, tmp_path / "parts", 3, False)
    assert run_ranks(counted, 1, tmp_path / "parts", 100, False) == [whole]
    assert len(whole[2]) == 8 and whole[3] == []


def test_a_resumed_run_tells_what_callbacks_have_lost(tmp_path):
    run_ranks(counted, 2, tmp_path, 3, True)
    (_, _, _, warnings), _ = run_ranks(counted, 2, tmp_path, 100, True)
    (warning,) = [each for each in warnings if "lost" in each]
    assert "lost what they kept: Counts 0.averages" in warning and "on_save and on_train_begin" in warning
