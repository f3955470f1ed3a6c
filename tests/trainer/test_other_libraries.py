"""Jobs made of other libraries' parts, from the file to the trained model, in this process."""

import pytest

from lockstep.core.world import World
from lockstep.job import load_job
from lockstep.job.assemble import assemble
from lockstep.job.run_folder import choose_run_folder

JOB = """\
[model]
{model}
num_classes = 3

[data.train]
target = "torchvision.datasets:FakeData"
size = 10
image_size = [3, 40, 40]
num_classes = 3
[[data.train.transform]]
target = "torchvision.transforms.v2:RandomResizedCrop"
size = 32
[[data.train.transform]]
target = "torchvision.transforms.v2:RandomHorizontalFlip"
[[data.train.transform]]
target = "torchvision.transforms.v2:PILToTensor"
[[data.train.transform]]
target = "torchvision.transforms.v2:ToDtype"
dtype = {{object = "torch:float32"}}
scale = true

[optimizer]
target = "torch.optim:SGD"
lr = 0.01

[schedule]
target = "torch.optim.lr_scheduler:OneCycleLR"
max_lr = 0.01
total_steps = "{{steps}}"

[data]
workers = {workers}

[training]
epochs = 1
global_batch = 4
micro_batches = 2

[log]
tensorboard = false
"""


def train(folder, model, workers):
    folder.mkdir()
    (folder / "job.toml").write_text(JOB.format(model=model, workers=workers))
    config = choose_run_folder(load_job(str(folder / "job.toml")))
    return assemble(config, World()).fit().fingerprint


@pytest.mark.slow
@pytest.mark.parametrize(
    "model",
    [
        pytest.param('target = "torchvision.models:resnet18"', id="torchvision"),
        pytest.param('target = "timm:create_model"\nmodel_name = "resnet10t"', id="timm"),
    ],
)
def test_a_model_and_transforms_by_import_path_are_trained(model, tmp_path, monkeypatch, torchvision, timm):
    monkeypatch.chdir(tmp_path)
    fingerprints = {train(tmp_path / str(workers), model, workers) for workers in (0, 2)}
    assert len(fingerprints) == 1, "the number of loader workers changed the result"
