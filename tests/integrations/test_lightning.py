"""A LightningModule gives one fingerprint on 1, 2, 3 processes, and the bits of ``run.backward``."""

import pytest
import torch
from tests.ranks import run_ranks
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import lockstep
from lockstep.errors import ConfigError

lightning = pytest.importorskip("lightning", exc_type=ImportError)


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
        self.log_dict(
            {"loss": F.cross_entropy(output, y), "accuracy": (output.argmax(1) == y).float().mean()}
        )

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
    assert validated.items() <= trainer.callback_metrics.items()
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


def refused(world):
    from lockstep.integrations.lightning import LightningTrainer

    trainer = LightningTrainer(global_batch=12, micro_batches=4, max_epochs=1)
    for module, words in (
        (Manual(), "by itself"),
        (Hooked(), "on_before_optimizer_step"),
        (Pair(), "2 optimizers"),
    ):
        with pytest.raises(ConfigError, match=words):
            trainer.fit(module, *loaders())


def test_what_the_adapter_does_not_call_is_refused():
    run_ranks(refused, 1)
