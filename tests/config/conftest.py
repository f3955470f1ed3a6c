"""A job file that a test can change."""

import pytest

from lockstep.config.job_file import load_job, parse_set

PLAIN = """\
[model]
target = "torch.nn:Linear"
in_features = 4
out_features = 2

[data.train]
target = "torch.utils.data:TensorDataset"

[optimizer]
target = "torch.optim:SGD"
lr = 0.1

[training]
epochs = 3
"""


@pytest.fixture
def job_file(tmp_path):
    """Writes a job file; without a text, a plain sound one."""

    def write(text=PLAIN, name="work.toml"):
        path = tmp_path / name
        path.write_text(text)
        return path

    return write


@pytest.fixture
def load(job_file):
    """Loads the plain job (or ``text``) with ``--set`` options on top."""

    def load_with(*sets, text=PLAIN, imports=False):
        return load_job(str(job_file(text)), [parse_set(option) for option in sets], imports=imports)

    return load_with
