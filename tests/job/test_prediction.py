"""The table of ``lockstep predict``: its columns, its two formats, and the weights that it is made with."""

import csv
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, SubsetRandomSampler, TensorDataset, WeightedRandomSampler

from lockstep import checkpoint
from lockstep.data.labels import known_classes
from lockstep.errors import CheckpointError, CheckpointMismatch, ConfigError
from lockstep.job.prediction import class_names, load_run, report, table, write_table
from lockstep.models.weights import metadata_of
from lockstep.run.attributes import Attributes
from lockstep.run.prepare import Parts


class Named:
    """Samples in files, with classes."""

    classes = ["rose, red", "tulip"]

    def __len__(self):
        return 3

    def sample_path(self, index):
        return f"photos/{index}.jpg"


SCORES = torch.tensor([[1.0, 3.0], [0.25, -0.5], [2.0, 2.0]])


def test_scores_become_a_class_and_probabilities():
    columns = table(SCORES, Named(), nn.CrossEntropyLoss(), known_classes(Named()))
    assert list(columns) == ["index", "sample", "class", "probability_rose, red", "probability_tulip"]
    assert columns["class"] == ["tulip", "rose, red", "rose, red"]
    wanted = [[np.exp(a) / (np.exp(a) + np.exp(b)) for a, b in ((x, y), (y, x))] for x, y in SCORES.tolist()]
    found = np.stack([columns["probability_rose, red"], columns["probability_tulip"]], 1)
    assert found.dtype == np.float32 and np.array_equal(found, np.array(wanted, dtype=np.float32))


def test_scores_that_are_nan_have_no_class():
    found = table(torch.tensor([[float("nan"), 1.0], [0.0, 1.0]]), [0, 1], nn.CrossEntropyLoss(), ["a", "b"])
    assert found["class"] == ["NaN", "b"]


def test_logarithms_of_probabilities_are_not_normalised_again():
    columns = table(SCORES.log_softmax(1), [0, 0, 0], nn.NLLLoss())
    assert list(columns) == ["index", "class", "probability_0", "probability_1"]
    assert np.allclose(columns["probability_1"], SCORES.softmax(1)[:, 1], rtol=1e-6)


def test_other_outputs_stay_as_they_are():
    columns = table(SCORES, [0, 0, 0], nn.MSELoss(), ("a",))
    assert list(columns) == ["index", "output_0", "output_1"]
    assert np.array_equal(columns["output_1"], SCORES[:, 1])
    single = table(SCORES[:, 0].bfloat16(), [0, 0, 0], nn.MSELoss())
    assert list(single) == ["index", "output_0"] and single["output_0"].dtype == np.float32


def test_what_is_no_table_is_refused():
    with pytest.raises(ConfigError, match=r"\[1, 1\] for each sample"):
        table(torch.zeros(3, 1, 1), [0, 0, 0], nn.MSELoss())
    with pytest.raises(ConfigError, match=r"gives 2 scores for each sample, and the 3 names .* are a, b, c"):
        table(SCORES, Named(), nn.CrossEntropyLoss(), ("a", "b", "c"))


@pytest.mark.parametrize(
    ("sampler", "is_refused"),
    [(SubsetRandomSampler([1, 3, 5]), True), (WeightedRandomSampler([1.0] * 6, 3), True), (None, False)],
)
def test_samples_that_a_sampler_picks_are_not_numbered_as_if_they_were_the_first(sampler, is_refused):
    loader = DataLoader(TensorDataset(torch.zeros(6, 2)), sampler=sampler, shuffle=sampler is None)
    if is_refused:
        with pytest.raises(ConfigError, match="have other samples' numbers"):
            table(torch.zeros(3, 2), loader, nn.MSELoss())
    else:
        assert len(table(torch.zeros(6, 2), loader, nn.MSELoss())["index"]) == 6


def test_numbers_in_csv_give_the_same_bits_when_they_are_read(tmp_path):
    torch.manual_seed(0)
    numbers = torch.randn(50, 2).numpy() * np.float32(10.0) ** np.arange(-20, 30, dtype=np.float32)[:, None]
    columns = {"index": np.arange(50), "sample": ['ä, "b"\n'] * 50, "x": numbers[:, 0], "y": numbers[:, 1]}
    write_table(tmp_path / "a.csv", columns)
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8") as file:
        head, *rows = csv.reader(file)
    assert head == ["index", "sample", "x", "y"] and rows[7][:2] == ["7", 'ä, "b"\n']
    assert np.array_equal(np.array([row[2:] for row in rows], dtype=np.float32), numbers)
    with pytest.raises(ConfigError, match=r"cannot be written to .*absent"):
        write_table(tmp_path / "absent" / "a.csv", columns)


def test_parquet_holds_the_same_columns(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = table(SCORES, Named(), nn.CrossEntropyLoss(), Named.classes)
    write_table(tmp_path / "a.parquet", columns)
    found = parquet.read_table(tmp_path / "a.parquet")
    assert found.column_names == list(columns)
    assert found["class"].to_pylist() == columns["class"]
    assert np.array_equal(found["probability_tulip"].to_numpy(), columns["probability_tulip"])


def test_names_that_are_not_in_utf_8_are_escaped_in_parquet_and_as_they_are_in_csv(tmp_path):
    parquet = pytest.importorskip("pyarrow.parquet")
    columns = {"sample": ["\udcff.jpg", ""], "class": ["a", "\udcfe"], "probability_\udcfe": np.zeros(2)}
    for file in ("a.parquet", "a.csv"):
        write_table(tmp_path / file, columns)
    found = parquet.read_table(tmp_path / "a.parquet")
    assert found.column_names[2] == "probability_\\udcfe"
    assert found["sample"].to_pylist() == ["\\udcff.jpg", ""] and found["class"][1].as_py() == "\\udcfe"
    assert b"\xff.jpg,a," in (tmp_path / "a.csv").read_bytes()


def test_the_report_counts_the_classes():
    columns = table(SCORES, Named(), nn.CrossEntropyLoss(), Named.classes)
    assert report(columns, "a.csv") == "3 samples -> a.csv\n  rose, red  2\n  tulip      1"


def test_names_are_in_the_weights_in_bytes_that_are_always_the_same(tmp_path):
    model, names = nn.Linear(2, 2), '["\\u00e4", "\\udc80"]'
    contents = set()
    for _ in range(20):  # safetensors itself would give them in one of six orders
        path = checkpoint.export(tmp_path / "model.safetensors", model.state_dict(), {"step": "4", "classes": names})
        contents.add(path.read_bytes())
    assert len(contents) == 1 and metadata_of(path) == {"format": "pt", "step": "4", "classes": names}
    assert class_names(tmp_path, SimpleNamespace()) == ("ä", "\udc80")
    path.write_bytes(b"x")
    with pytest.raises(CheckpointError, match="cannot be read as weights"):
        class_names(tmp_path, Named())


def test_what_a_run_learned_last_is_loaded_or_its_best(tmp_path):
    models = {step: nn.Linear(2, 2) for step in (3, 6, 8)}
    for step in (3, 6):
        tensors, aliases = checkpoint.model_state(models[step])
        state = checkpoint.CheckpointState(tensors, {}, {}, aliases, {})
        checkpoint.write(tmp_path, state, step=step)
    loaded = nn.Linear(2, 2)
    for metadata, wanted in ((None, 6), ({"step": "4"}, 6), ({"step": "8"}, 8)):
        checkpoint.export(tmp_path / "model.safetensors", models[8].state_dict(), metadata)
        load_run(loaded, tmp_path, best=False)
        assert torch.equal(loaded.weight, models[wanted].weight)
    with pytest.raises(CheckpointError, match="has no best checkpoint"):
        load_run(loaded, tmp_path, best=True)
    checkpoint.write_best(tmp_path, checkpoint.Best(3, "validation_loss", 0.5))
    load_run(loaded, tmp_path, best=True)
    assert torch.equal(loaded.weight, models[3].weight)
    with pytest.raises(CheckpointMismatch):
        load_run(nn.Linear(3, 2), tmp_path, best=True)
    with pytest.raises(CheckpointError, match="has no weights and no checkpoint"):
        load_run(loaded, tmp_path / "absent", best=False)


class Shifted(nn.Linear):
    """Adds a number that it keeps as extra state."""

    shift = 0.0

    def get_extra_state(self):
        return {"shift": self.shift}

    def set_extra_state(self, state):
        self.shift = state["shift"]


def test_extra_state_comes_from_the_checkpoint_of_the_step_that_the_weights_are_of(tmp_path):
    model = Shifted(2, 2)
    for model.shift, step in ((3.0, 3), (6.0, 6)):
        extra = checkpoint.encoded_extra_states({"": model}, {})
        tensors, aliases = checkpoint.model_state(model)
        state = checkpoint.CheckpointState(tensors, {}, {"extra_states": extra}, aliases, {})
        checkpoint.write(tmp_path, state, step=step)
    checkpoint.write_best(tmp_path, checkpoint.Best(3, "validation_loss", 0.5))
    checkpoint.export(tmp_path / "model.safetensors", tensors, {"step": "6"})
    for best, wanted in ((False, 6.0), (True, 3.0)):
        loaded = Shifted(2, 2)
        load_run(loaded, tmp_path, best=best)
        assert torch.equal(loaded.weight, model.weight) and loaded.shift == wanted
    checkpoint.export(tmp_path / "model.safetensors", tensors, {"step": "7"})
    with pytest.raises(CheckpointError, match="has no checkpoint of its last step, for extra state"):
        load_run(loaded, tmp_path, best=False)


class Table(nn.Linear):
    """Keeps a number and a large table in attributes, which a loop changes."""

    def __init__(self, *sizes):
        super().__init__(*sizes)
        self.shift, self.tables = 0.0, [torch.zeros(100, 100)]


def test_what_a_run_has_changed_in_modules_comes_from_the_checkpoint(tmp_path):
    model = Table(2, 2)
    attributes = Attributes(Parts(model))
    for model.shift, step in ((3.0, 3), (6.0, 6)):
        model.tables[0].fill_(step)
        beside = {}
        progress = attributes.capture(SimpleNamespace(replicated=True), beside)
        tensors, aliases = checkpoint.model_state(model)
        checkpoint.write(tmp_path, checkpoint.CheckpointState(tensors, beside, progress, aliases, {}), step=step)
    checkpoint.export(tmp_path / "model.safetensors", tensors, {"step": "6"})
    checkpoint.write_best(tmp_path, checkpoint.Best(3, "validation_loss", 0.5))
    for best, wanted in ((False, 6.0), (True, 3.0)):
        loaded = Table(2, 2)
        load_run(loaded, tmp_path, best=best)
        assert torch.equal(loaded.weight, model.weight) and loaded.shift == wanted
        assert loaded.tables[0].unique().tolist() == [wanted]
