"""The texts of a first job: the parts of the job file and of the script that are filled in by ``starter``.

Braces are doubled where the file that is written has single ones.
"""

from __future__ import annotations

_SPLIT_OF_SCRIPT = """
[model]
target = "{name}:model"

[data]
workers = 0                  # the data is in memory

[data.train]
target = "{name}:train_set"

[data.validation]
target = "{name}:validation_set"
"""

JOB_PARTS = {
    "images": """# Trains on the photos in a folder.

[model]
target = "lockstep.models:resnet18"
num_classes = {outputs}
small_images = {small}

[data]
root = {toml_data}
workers = "auto"

[data.train]
target = "lockstep.data:ImageFolder"
root = "{{data}}"
split = "train"
seed = "{{seed}}"
transform = {{ target = "lockstep.data:RandomResizedCrop", size = {size}, flip = 0.5 }}

[data.validation]
target = "lockstep.data:ImageFolder"
root = "{{data}}"
split = "validation"
seed = "{{seed}}"
transform = {{ target = "lockstep.data:CenterCrop", size = {size}, resize = {resize} }}

[loss]
target = "{loss}"
""",
    "text": "# Trains a model that predicts the next byte of a text; its parts are in {name}.py.\n"
    + _SPLIT_OF_SCRIPT
    + '\n[loss]\ntarget = "{name}:loss_fn"\n',
    **dict.fromkeys(
        ("table", "tensors"),
        "# Trains on {data_name}; the data sets and the model are in {name}.py.\n"
        + _SPLIT_OF_SCRIPT
        + '\n[loss]\ntarget = "{loss}"\n',
    ),
}
"""The first part of the job file of each kind of data."""

JOB_RECIPE = """
[optimizer]
target = "torch.optim:AdamW"
lr = 0.001                   # for the global batch, on any number of devices
weight_decay = 0.01

[schedule]
kind = "cosine"
warmup_epochs = 0.5
final_factor = 0.01

[training]
epochs = {epochs}
global_batch = {global_batch}            # samples of a step, over all devices together
micro_batches = 8            # the parts that a step is computed in, of which devices take shares
seed = 0

[run]
devices = "auto"
threads = 1
"""
"""The rest of every job file."""

SCRIPT_HEAD = '''"""Trains on {data_name}. Written by `lockstep new`: change it as you like.

    lockstep train {name}.toml               the job beside this file
    python {name}.py                         the loop at the end of this file
    lockstep run --devices 2 {name}.py       the same loop on two devices, with the same fingerprint
"""

from pathlib import Path

{imports}
import lockstep
'''

_DIVIDED = '''

def rows_of(count):
    """The numbers of the rows for training, and of those for validation: 20 %, the same ones each time."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(0))
    return order[count // 5 :], order[: count // 5]


def divided(inputs, targets):
    """The data set for training and that for validation."""
    return tuple(TensorDataset(inputs[rows], targets[rows]) for rows in rows_of(len(inputs)))


def scaled(columns):
    """Columns that have the mean 0 and the standard deviation 1 over the rows for training."""
    seen = columns[rows_of(len(columns))[0]].double()
    return ((columns.double() - seen.mean(0)) / seen.std(0).clamp_min(1e-6)).float()
'''

_BOTH = '''

def train_set():
    """The data set that is trained on."""
    return datasets()[0]


def validation_set():
    """The data set that is evaluated on."""
    return datasets()[1]
'''

_PERCEPTRON = '''

def model():
    """The model. Replace it by one of your own."""
    return nn.Sequential(
        nn.Flatten(),
        nn.Linear({in_features}, 128),
        nn.ReLU(),
        nn.Linear(128, 128),
        nn.ReLU(),
        nn.Linear(128, {outputs}),
    )


loss_fn = nn.{loss_name}()
'''

SCRIPT_CORRECT = '''

def correct(output, target):
    """True for each sample whose highest score is at its class."""
    return output.argmax(1) == target
'''

_TABLE = '''from lockstep.data import CSVTable

DATA = Path({data!r})


def datasets():
    """The rows of the table, divided."""
    table = CSVTable(DATA, {label!r}, columns={columns!r}, classes={classes!r}, delimiter={delimiter!r})
    train, validation = divided(scaled(table.inputs), {targets})
    train.classes = validation.classes = table.classes  # the names that reports and predictions show
    return train, validation
'''

_TENSORS = """
DATA = Path({data!r})


def datasets():
    \"\"\"The rows of x and y, divided.\"\"\"
    {read}
    x, y = torch.as_tensor(x), torch.as_tensor(y)
    return divided(scaled(x), {targets})
"""

SCRIPT_PARTS = {
    "images": '''from lockstep.data import CenterCrop, ImageFolder, RandomResizedCrop
from lockstep.models import resnet18

DATA = Path({data!r})


def train_set():
    """The data set that is trained on."""
    return ImageFolder(DATA, "train", transform=RandomResizedCrop({size}, flip=0.5))


def validation_set():
    """The data set that is evaluated on."""
    return ImageFolder(DATA, "validation", transform=CenterCrop({size}, resize={resize}))


def model():
    """The model. Replace it by one of your own."""
    return resnet18(num_classes={outputs}, small_images={small_python})


loss_fn = nn.{loss_name}()
''',
    "table": _TABLE + _DIVIDED + _BOTH + _PERCEPTRON,
    "text": '''from lockstep.models import transformer

DATA = Path({data!r})
WINDOW = {window}


def datasets():
    """Samples of WINDOW bytes, and the same one place on: the first 90 % of the text, and the rest."""
    below = (file for file in sorted(DATA.rglob("*")) if file.suffix.lower() in {suffixes!r})
    files = [file for file in below if file.is_file()] if DATA.is_dir() else [DATA]
    content = b"\\n".join(file.read_bytes() for file in files)
    text = torch.frombuffer(bytearray(content), dtype=torch.uint8).long()
    count = (len(text) - 1) // WINDOW
    inputs, targets = (text[start : start + count * WINDOW].view(count, WINDOW) for start in (0, 1))
    first = count - max(1, count // 10)
    return TensorDataset(inputs[:first], targets[:first]), TensorDataset(inputs[first:], targets[first:])
'''
    + _BOTH
    + '''

def model():
    """The model: scores of the 256 bytes, at every place. Replace it by one of your own."""
    return transformer(vocabulary_size=256, max_length=WINDOW)


def loss_fn(output, target):
    """The loss of each byte."""
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten(), reduction="none")
''',
    "tensors": _TENSORS + _DIVIDED + _BOTH + _PERCEPTRON,
}
"""The script of each kind of data after its head."""

SCRIPT_LOOP = '''

def main():
    """Trains, and prints the results of each epoch."""
    run = lockstep.init(global_batch={global_batch}, micro_batches=8, seed=0)
    torch.manual_seed(0)
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.001, weight_decay=0.01)
    train, validation = train_set(), validation_set()
    steps = {epochs} * run.steps_per_epoch(train, model=net)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    net, optimizer, scheduler = run.prepare(net, optimizer, scheduler)
    for epoch in run.epochs({epochs}):
        for batch in run.batches(train):
            run.backward(batch, loss_fn)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        run.print(f"epoch {{epoch + 1}}  validation {metric} {{run.evaluate(validation, {measure}):.4f}}")
    run.print(f"fingerprint {{run.fingerprint()}}")


if __name__ == "__main__":
    main()
'''
"""The loop at the end of every script."""
