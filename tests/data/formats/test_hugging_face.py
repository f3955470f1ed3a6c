import pickle
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.data import CenterCrop, HuggingFace, adopt, known_labels
from lockstep.data.reader import SampleReader
from lockstep.errors import ConfigError, DataError


@pytest.fixture(scope="module", autouse=True)
def imported():
    """datasets, which takes a second to import, for the tests of this file only."""
    global datasets
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")


def rows(count=12):
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    photos = [Image.new("RGB", (10, 12), (n, 2 * n, 3 * n)) for n in range(count)]
    features = datasets.Features(
        {
            "x": datasets.Sequence(datasets.Value("float32")),
            "photo": datasets.Image(),
            "label": datasets.ClassLabel(names=["a", "b", "c"]),
        }
    )
    content = {"x": [[n, -n] for n in range(count)], "photo": photos, "label": [n % 3 for n in range(count)]}
    return datasets.Dataset.from_dict(content, features=features)


def test_a_set_of_the_script_and_one_on_the_disk_are_the_same(tmp_path):
    datasets.DatasetDict({"train": rows()}).save_to_disk(str(tmp_path / "saved"))
    for source, split in ((rows(), None), (tmp_path / "saved", "train")):
        dataset = pickle.loads(pickle.dumps(HuggingFace(source, "x", "label", split=split)))
        inputs, labels = SampleReader(dataset, seed=0).read(0, np.array([7, 0, 5]))
        assert inputs.tolist() == [[7, -7], [0, 0], [5, -5]] and labels.tolist() == [1, 0, 2]
        assert tuple(dataset.classes) == ("a", "b", "c") and known_labels(dataset).tolist() == [
            n % 3 for n in range(12)
        ]


def test_pictures_reach_our_transforms_undecoded_and_others_as_pictures():
    pictures, labels = SampleReader(HuggingFace(rows(), "photo", "label", transform=CenterCrop(8)), seed=0).read(
        0, np.array([9, 2])
    )
    assert pictures[:, :, 4, 4].tolist() == [[9, 18, 27], [2, 4, 6]] and labels.tolist() == [0, 2]
    assert HuggingFace(rows(), "photo", "label", transform=lambda picture: picture.size)[0] == ((10, 12), 0)


def test_a_set_goes_to_a_run_as_it_is():
    given = rows().select_columns(["x", "label"]).with_format("torch")
    data = SampleReader(adopt(given).dataset, seed=0).read(0, np.array([4, 1]))
    assert data["x"].tolist() == [[4, -4], [1, -1]] and data["label"].tolist() == [1, 1]


def test_a_transform_of_the_set_is_not_left_out_in_silence():
    given = rows().with_transform(lambda batch: {**batch, "x": [[0.0] for _ in batch["x"]]})
    with pytest.raises(ConfigError, match=r"a transform of its own .* Give the function of the input as transform="):
        HuggingFace(given, "x", "label")


def test_what_does_not_fit_is_named(tmp_path):
    with pytest.raises(DataError, match=r"no column 'lable'\. Did you mean 'label'"):
        HuggingFace(rows(), "x", "lable")
    with pytest.raises(DataError, match="sample 2 has label 2"):
        HuggingFace(rows(), "x", "label", classes=2)
    with pytest.raises(DataError, match="has no split 'test'"):
        HuggingFace(datasets.DatasetDict({"train": rows()}), "x", "label", split="test")
    with pytest.raises(DataError, match="does not exist"):
        HuggingFace(tmp_path / "no", "x", "label")
    with pytest.raises(DataError, match="cannot be read as a saved data set"):
        HuggingFace(tmp_path, "x", "label")
    with pytest.raises(DataError, match="has no rows"):
        HuggingFace(rows().select([]), "x", "label")
    with pytest.raises(ConfigError, match="Load it without streaming"):
        HuggingFace(rows().to_iterable_dataset(), "x", "label")


def test_one_sentence_where_datasets_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"HuggingFace needs datasets, .* Install it: pip install datasets\."):
        HuggingFace(torch.zeros(3), "x", "label")
