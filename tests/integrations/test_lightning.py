"""A LightningModule gives one fingerprint on 1, 2, 3 processes, and the bits of ``run.backward``."""

import logging

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError
from lockstep.runtime import Callback

lightning = pytest.importorskip("lightning", exc_type=ImportError)
torchmetrics = pytest.importorskip("torchmetrics", exc_type=ImportError)


class Classifier(lightning.LightningModule):
    def __init__(self, scheduler=True):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.Dropout(0.3), nn.Linear(16, 3))
        self.scheduler = scheduler
        self.epochs = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        output = self.layers(x)
        self.log("train_accuracy", (output.argmax(1) == y).float().mean(), prog_bar=True)
        return F.cross_entropy(output, y)

    def validation_step(self, batch, batch_idx):
        x, y = batch
        output = self.layers(x)
        self.log_dict({"loss": F.cross_entropy(output, y), "accuracy": (output.argmax(1) == y).float().mean()})

    def on_validation_epoch_end(self):
        self.epochs.append((self.current_epoch, self.trainer.is_global_zero))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.05)
        if not self.scheduler:
            return optimizer
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def loaders():
    generator = torch.Generator().manual_seed(1)
    data = TensorDataset(torch.randn(26, 4, generator=generator), torch.arange(26) % 3)
    return DataLoader(data, batch_size=12, shuffle=True), DataLoader(data, batch_size=10)


def fit(world):
    from lockstep.integrations.lightning import LightningTrainer

    torch.manual_seed(0)
    module = Classifier()
    trainer = LightningTrainer(global_batch=12, micro_batches=4, max_epochs=3, gradient_clip_val=0.5)
    trainer.fit(module, *loaders())
    assert module.epochs == [(epoch, world.rank == 0) for epoch in range(3)]
    validated = trainer.validate(module, loaders()[1])
    assert validated == [{name: float(trainer.callback_metrics[name]) for name in ("loss", "accuracy")}]
    return trainer.run.fingerprint(), trainer.callback_metrics


def reference(world):
    torch.manual_seed(0)
    model = Classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    run = lockstep.init(global_batch=12, micro_batches=4)
    model, optimizer, scheduler = run.prepare(model, optimizer, scheduler)
    for _ in run.epochs(3):
        for batch in run.batches(loaders()[0]):
            run.backward(
                batch,
                lambda output, y: F.cross_entropy(output, y[1]),
                forward=lambda data: model.layers(data[0]),
            )
            run.clip_gradients(0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    return run.fingerprint()


def test_a_lightning_module_gives_the_bits_of_run_backward():
    answers = [answer for ranks in (1, 2, 3) for answer in run_ranks(fit, ranks)]
    assert all(answer == answers[0] for answer in answers)
    assert answers[0][0] == run_ranks(reference, 1)[0]
    assert answers[0][1].keys() == {"train_accuracy", "loss", "accuracy"}


class Logging(lightning.LightningModule):
    """Logs in every way; the rates are 0, so that each number follows from the data alone."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)
        self.seen, self.rates, self.at_end, self.hooks = [], [], {}, []

    def loss(self, batch):
        return F.cross_entropy(self.layer(batch[0]), batch[1])

    def training_step(self, batch, batch_idx):
        assert self.trainer.training and self.trainer.estimated_stepping_batches == 6
        loss = self.loss(batch)
        self.log("step", loss)
        self.log("epoch", loss, on_step=False, on_epoch=True)
        self.log("both", loss, on_epoch=True, prog_bar=True)
        self.log_dict({"index": float(batch_idx), "global": float(self.global_step)}, on_epoch=True)
        self.log("x", batch[0].mean(), on_epoch=True, batch_size=batch[0].numel())
        return {"loss": loss}

    def validation_step(self, batch, batch_idx):
        self.log("val", self.loss(batch))
        self.log("val_index", float(batch_idx))

    def test_step(self, batch):
        self.log("test", self.loss(batch))

    def on_validation_epoch_start(self):
        self.log("hook", 7.0)
        assert not self.layer.training and not torch.is_grad_enabled()

    def on_train_epoch_end(self):
        self.at_end = {name: value.item() for name, value in self.trainer.callback_metrics.items()}
        self.rates.append(self.optimizers().param_groups[0]["lr"])
        self.log("from_hook", 2 * self.trainer.callback_metrics["epoch"])
        self.trainer.should_stop = self.current_epoch == 1

    def setup(self, stage):
        self.hooks.append(stage)

    def teardown(self, stage):
        self.hooks.append(f"end of {stage}")

    def configure_optimizers(self):
        optimizer = torch.optim.SGD(self.parameters(), lr=0.0)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 * step)
        return [
            {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 2},
            }
        ]


def log_everything(world, micro_batches=4):
    from lockstep.integrations.lightning import LightningTrainer

    torch.manual_seed(0)
    module = Logging()
    train, validation = loaders()
    batches = []
    trainer = LightningTrainer(global_batch=12, micro_batches=micro_batches, max_epochs=2)
    trainer.run.add_callback(Reading(batches))
    trainer.fit(module, train, validation)
    tested = trainer.test(module, validation)
    (scheduler,) = trainer.lr_scheduler_configs
    numbers = {name: float(value) for name, value in trainer.callback_metrics.items()}
    assert module.hooks == ["fit", "end of fit"] and trainer.global_step == 6
    return numbers, module.at_end, tested, batches, scheduler.scheduler.last_epoch


class Reading(Callback):
    """Notes the samples of each step."""

    def __init__(self, batches):
        self.batches = batches

    def on_backward_begin(self, batch, scale):
        self.batches.append([list(each) for each in batch.plan.indices])


def test_every_logged_number_is_the_one_computed_by_hand():
    """26 samples in steps of 12, 12 and 2, evaluated in batches of 10, 10 and 6."""
    answers = [answer for ranks in (1, 2, 3) for answer in run_ranks(log_everything, ranks)]
    numbers, at_end, tested, batches, steps = answers[0]
    assert all(answer == answers[0] for answer in answers)
    torch.manual_seed(0)
    module, (x, y) = Logging(), loaders()[0].dataset.tensors
    with torch.no_grad():
        losses = F.cross_entropy(module.layer(x), y, reduction="none").double()
    last = [i for row in batches[-1] for i in row]
    assert len(last) == 2 and len(batches) == 6
    whole, of_last = losses.mean().item(), losses[last].mean().item()
    expected = {
        "step": of_last,
        "epoch": whole,
        "both": whole,
        "both_step": of_last,
        "both_epoch": whole,
        "index_step": 2.0,
        "index": (12 * 0 + 12 * 1 + 2 * 2) / 26,
        "index_epoch": 16 / 26,
        "global_step": 5.0,
        "global": (12 * 3 + 12 * 4 + 2 * 5) / 26,
        "global_epoch": 94 / 26,
        "x": x.mean().item(),
        "x_epoch": x.mean().item(),
        "x_step": x[last].mean().item(),
        "val": whole,
        "val_index": (10 * 0 + 10 * 1 + 6 * 2) / 26,
        "hook": 7.0,
    }
    expected["from_hook"] = 2 * whole  # of the epoch before, too
    assert at_end == pytest.approx(expected, rel=1e-5)
    assert numbers == pytest.approx({**expected, "test": whole}, rel=1e-5)
    assert tested == [pytest.approx({"test": whole}, rel=1e-5)]
    assert steps == 2  # the second step of each epoch alone


class Logs(Classifier):
    """Logs one thing that is not a mean over samples."""

    def __init__(self, log):
        super().__init__()
        self.say = log

    def training_step(self, batch, batch_idx):
        output = self.layers(batch[0])
        self.say(self, output, batch[1])
        return F.cross_entropy(output, batch[1])


def late(module, value):
    """Logs a value in the second step of training, not before."""
    if module.trainer.global_step == 1:
        module.log("late", value)


def odd_logs(world):
    import torchmetrics

    from lockstep.integrations.lightning import LightningTrainer

    for words, log in (
        ("'total'.* sum over the samples", lambda m, out, y: m.log("total", (y + 1).sum())),
        ("'most'.* not a mean over samples", lambda m, out, y: m.log("most", out.max())),
        ("'late'.* sum over the samples", lambda m, out, y: late(m, (y + 1).sum())),
        ("leave out a batch_size", lambda m, out, y: m.log("loss", out.mean(), batch_size=12, on_epoch=True)),
        ("reduce_fx='sum'", lambda m, out, y: m.log("s", out.mean(), on_epoch=True, reduce_fx="sum")),
        ("MeanMetric", lambda m, out, y: m.log("m", torchmetrics.MeanMetric(), metric_attribute="m")),
        ("'a' twice", lambda m, out, y: [m.log("a", 1.0), m.log("a", 2.0)]),
        ("set trainer.should_stop", lambda m, out, y: setattr(m.trainer, "should_stop", True)),
        ("no 'checkpoint_callback'", lambda m, out, y: m.trainer.checkpoint_callback),
    ):
        trainer = LightningTrainer(global_batch=12, micro_batches=4, max_epochs=1)
        with pytest.raises((ConfigError, AttributeError), match=words):
            trainer.fit(Logs(log), *loaders())
        trainer.run.close()


def test_what_is_logged_and_no_mean_over_samples_is_refused():
    run_ranks(odd_logs, 1)


class Started(Logging):
    """Logs what no step and no validation of the rest of an epoch logs again."""

    def on_train_epoch_start(self):
        self.log("started", float(self.current_epoch))


def stopped(world, folder, stop_at):
    from lockstep.integrations.lightning import LightningTrainer

    torch.manual_seed(0)
    module = Started()
    trainer = LightningTrainer(
        global_batch=12,
        micro_batches=4,
        max_epochs=2,
        directory=folder,
        resume="auto",
        save_in_background=False,
    )
    if stop_at:
        trainer.run.add_callback(StopAt(trainer.run, stop_at))
        with pytest.raises(Leaving):
            trainer.fit(module, *loaders())
        return None
    said, handler = [], logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(handler)
    trainer.fit(module, *loaders())
    assert not [each for each in said if "_current_fx_name" in each], "a name of Lightning's own is no loss"
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


class Leaving(Exception):
    pass


class StopAt(Callback):
    """Saves after a step, and ends the training."""

    def __init__(self, run, step):
        self.run, self.left = run, step

    def on_step_end(self, batch):
        self.left -= 1
        if not self.left:
            self.run.save(wait=True)
            raise Leaving


def test_the_mean_of_an_epoch_is_that_of_the_whole_epoch_where_a_run_was_resumed_in_it(tmp_path):
    (expected,) = run_ranks(stopped, 1, tmp_path / "whole", 0)
    run_ranks(stopped, 2, tmp_path / "parts", 5)
    assert run_ranks(stopped, 1, tmp_path / "parts", 0) == [expected]


class Manual(Classifier):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False


class Hooked(Classifier):
    def on_before_optimizer_step(self, optimizer):
        pass


class Pair(Classifier):
    def configure_optimizers(self):
        return [
            torch.optim.SGD(self.layers[0].parameters(), 0.1),
            torch.optim.SGD(self.layers[3].parameters(), 0.1),
        ]


class Stored(Classifier):
    def on_save_checkpoint(self, checkpoint):
        checkpoint["mine"] = 1


class Gathering(Classifier):
    def training_step(self, batch, batch_idx):
        return self.all_gather(super().training_step(batch, batch_idx)).mean()


class Calling(Classifier):
    def configure_callbacks(self):
        return []


def refused(world):
    from lockstep.integrations.lightning import LightningTrainer

    trainer = LightningTrainer(global_batch=12, micro_batches=4, max_epochs=1)
    for module, words in (
        (Manual(), "by itself"),
        (Hooked(), "on_before_optimizer_step"),
        (Pair(), "2 optimizers"),
        (Stored(), "on_save_checkpoint"),
        (Calling(), "configure_callbacks"),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer.fit(module, *loaders())
    with pytest.raises(ConfigError, match=r"all_gather.* would gather the micro-batches"):
        LightningTrainer(global_batch=12, micro_batches=4, max_epochs=1).fit(Gathering(), *loaders())
    with pytest.raises(ConfigError, match="one DataLoader"):
        trainer.fit(Classifier(), loaders()[0], [loaders()[1]])
    with pytest.raises(ConfigError, match=r"come after trainer\.fit"):
        trainer.validate(Classifier(), loaders()[1])
    for option, words in (("callbacks", "should_stop"), ("accumulate_grad_batches", "micro_batches")):
        with pytest.raises(ConfigError, match=words):
            LightningTrainer(global_batch=12, max_epochs=1, **{option: 2})


def test_what_the_adapter_does_not_call_is_refused():
    run_ranks(refused, 1)


class Noting(lightning.LightningModule):
    """Notes at the end of each epoch what Lightning knows there; the first of two layers may have no optimizer."""

    def __init__(self, is_partly=False):
        super().__init__()
        self.layer, self.noted, self.is_partly = nn.Linear(4, 3), [], is_partly
        if is_partly:
            self.layer = nn.Sequential(nn.Linear(4, 4), self.layer)

    def training_step(self, batch, batch_idx):
        output = self.layer(batch[0])
        self.log("accuracy", (output.argmax(1) == batch[1]).float().mean(), on_step=False, on_epoch=True)
        self.log("index", float(batch_idx))
        loss = F.cross_entropy(output, batch[1])
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch, batch_idx):
        self.log("val_loss", F.cross_entropy(self.layer(batch[0]), batch[1]))

    def on_train_epoch_end(self):
        numbers = {name: float(value) for name, value in self.trainer.callback_metrics.items()}
        rate = self.trainer.optimizers[0].param_groups[0]["lr"]
        self.noted.append(numbers | {"rate": rate, "step": self.trainer.global_step, "at": self.trainer.current_epoch})

    def configure_optimizers(self):
        trained = self.layer[1] if self.is_partly else self
        optimizer = torch.optim.SGD(trained.parameters(), 0.1, momentum=0.9)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def noted(world, strategy, is_partly):
    from lockstep.integrations.lightning import LightningTrainer

    torch.manual_seed(0)
    module = Noting(is_partly)
    train, validation = (
        DataLoader(TensorDataset(torch.randn(count, 4), torch.arange(count) % 3), batch_size=size)
        for count, size in ((24, 8), (17, 5))
    )
    settings = {"max_epochs": 3, "gradient_clip_val": 0.3}
    if strategy:
        trainer = LightningTrainer(global_batch=8, micro_batches=4, strategy=strategy, **settings)
    else:
        quiet = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
        trainer = lightning.Trainer(accelerator="cpu", **dict.fromkeys(quiet, False), **settings)
    trainer.fit(module, train, validation)
    return module.noted


@pytest.mark.parametrize("is_partly", [False, True])
def test_what_a_hook_knows_at_the_end_of_an_epoch_is_what_it_knows_under_lightning(is_partly):
    """The learning rate was that of the epoch before, where Lightning's is that of the next.

    Gradients were clipped by a norm with those that no optimizer has.
    """
    (expected,) = run_ranks(noted, 1, None, is_partly)
    for found in (
        *run_ranks(noted, 1, "ddp", is_partly),
        *run_ranks(noted, 2, "ddp", is_partly),
        *run_ranks(noted, 2, "fsdp", is_partly),
    ):
        assert len(found) == 3
        for one, other in zip(found, expected):
            assert one == pytest.approx(other, rel=1e-5)


class Collecting(Noting):
    """Computes a number in a hook, of what its validation has left; its object of torchmetrics sees all of it."""

    def __init__(self, collects):
        super().__init__()
        self.found, self.collects = [], collects
        self.metric = torchmetrics.Accuracy("multiclass", num_classes=3)

    def validation_step(self, batch, batch_idx):
        output = self.layer(batch[0])
        self.metric.update(output, batch[1])
        if self.collects:
            self.found.append((output.argmax(1) == batch[1]).float())

    def on_validation_epoch_end(self):
        self.log("by_metric", self.metric.compute())
        self.metric.reset()
        if self.collects:
            self.log("by_hand", torch.cat(self.found).mean())
            self.found.clear()


def collected(world, collects):
    from lockstep.integrations.lightning import LightningTrainer

    warnings = logged_by("lockstep.integrations.lightning")
    torch.manual_seed(0)
    trainer = LightningTrainer(global_batch=12, micro_batches=4, max_epochs=2)
    trainer.fit(Collecting(collects), *loaders())
    return [each.getMessage() for each in warnings], float(trainer.callback_metrics["by_metric"])


def logged_by(name):
    """The records that a logger gets from now on."""
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logging.getLogger(name).addHandler(handler)
    return records


def test_what_a_validation_leaves_in_the_module_is_told_to_be_of_this_process():
    """A hook that computed a number of it had one of a part of the data, which was logged as that of all."""
    answers = {ranks: run_ranks(collected, ranks, True) for ranks in (1, 2)}
    assert answers[1][0][0] == [] and answers[2][1][0] == []
    (warning,) = answers[2][0][0]
    assert warning.startswith("validation_step changes the attribute 'found' of the model. Each process evaluates a")
    assert "Log means in the step" in warning
    assert len({number for found in answers.values() for _, number in found}) == 1
    assert run_ranks(collected, 2, False)[0][0] == []
