"""The output of ``lockstep data``, on small data sets."""

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset, Subset, TensorDataset, WeightedRandomSampler

from lockstep.config.job_file import Override, load_job
from lockstep.data import Bucketed, CenterCrop, Digits, ImageFolder, StepLoader, Stream, Weighted
from lockstep.errors import ConfigError
from lockstep.job import data_report
from lockstep.job.assemble import sample_plan


@pytest.fixture
def flowers(tmp_path):
    for label, name in enumerate(("daisy", "rose")):
        (tmp_path / name).mkdir()
        for number in range(3 + label):
            Image.new("RGB", (20, 20), (90 * label, 20 * number, 50)).save(tmp_path / name / f"{number}.png")
    return tmp_path


def job(devices="auto", **training):
    overrides = [Override(path=("training", key), value=value, origin="") for key, value in training.items()]
    return load_job("digits", [*overrides, Override(path=("run", "devices"), value=devices, origin="")])


def test_classes_are_counted_by_name(flowers):
    facts = data_report.look_at_set("data.train", ImageFolder(flowers), workers=0, reads=False)
    assert facts.classes == {"daisy": 3, "rose": 4} and facts.unreadable is None and facts.samples == 7
    assert facts.text == repr(ImageFolder(flowers))
    part = Subset(ImageFolder(flowers), [0, 6])
    assert data_report.look_at_set("x", part, workers=0, reads=False).classes == {"daisy": 1, "rose": 1}
    numbers = TensorDataset(torch.zeros(3, 2), torch.tensor([2, 0, -1]))
    counted = data_report.look_at_set("x", numbers, workers=0, reads=False).classes
    assert counted == {"0": 1, "1": 0, "2": 1, "below 0": 1}
    assert data_report.look_at_set("x", [1.5, 2.5], workers=0, reads=False).classes is None
    numbers.classes = ["1", "2"]  # one of two classes of a name was left out
    numbers.tensors = torch.zeros(3, 2), torch.tensor([2, 0, 1])
    counted = data_report.look_at_set("x", numbers, workers=0, reads=False).classes
    assert counted == {"1": 1, "2 (class 1)": 1, "2 (class 2)": 1}


@pytest.mark.parametrize("workers", [0, 2])
def test_every_sample_that_cannot_be_read_is_named(flowers, workers):
    (flowers / "rose" / "1.png").write_bytes(b"no picture")
    (flowers / "daisy" / "2.png").write_bytes((flowers / "daisy" / "2.png").read_bytes()[:50])
    found = data_report.unreadable(ImageFolder(flowers, transform=CenterCrop(8)), workers)
    assert [sentence.partition(" cannot")[0] for sentence in found] == [
        "Sample 2 (daisy/2.png)",
        "Sample 4 (rose/1.png)",
    ]
    assert "UnidentifiedImageError" in found[1]
    around = Bucketed(ImageFolder(flowers, transform=CenterCrop(8)), [1] * 7, 2)
    assert data_report.unreadable(around, workers) == found


class Lines(IterableDataset):
    """A stream that breaks at one of its samples."""

    def __init__(self, broken=-1):
        self.broken = broken

    def __len__(self):
        return 9

    def __iter__(self):
        for number in range(len(self)):
            if number == self.broken:
                raise ValueError("torn line")
            yield torch.zeros(2), number % 3


@pytest.mark.parametrize("stream", [Lines, lambda *broken: Stream(Lines(*broken), samples=9)])
def test_a_stream_is_read_in_its_order(stream):
    """Each of its samples was said to be unreadable."""
    facts = data_report.look_at_set("data.train", stream(), workers=0, reads=True)
    assert (facts.samples, facts.read, facts.unreadable) == (9, 9, [])
    found = data_report.look_at_set("data.train", stream(4), workers=0, reads=True).unreadable
    assert found == ["Sample 4 cannot be read: ValueError: torn line. What follows was not read."]


def test_of_a_data_loader_what_it_reads_is_shown(flowers):
    """It was refused, by an error about SkipBroken."""
    draws = WeightedRandomSampler([1.0] * 7, 20, generator=torch.Generator())
    photos = ImageFolder(flowers, transform=CenterCrop(8))
    loader = DataLoader(photos, batch_size=4, sampler=draws)
    facts = data_report.look_at_set("data.train", loader, workers=0, reads=True)
    assert (facts.samples, facts.read, facts.unreadable) == (20, 7, [])
    config = job(global_batch=8, micro_batches=2)
    step = data_report.look_at_step(config, loader, 1, epoch=0, position=0)
    assert step.steps_per_epoch == 3 and "(" in step.reads[0][0][0]
    assert [len(labels) for _, labels in data_report.batch_of(config, loader, 0, 0)] == [4, 4]


def test_samples_have_their_files_and_a_step_that_is_none_is_refused(flowers):
    config = job(global_batch=8, micro_batches=2)
    facts = data_report.look_at_step(config, ImageFolder(flowers), 1, epoch=0, position=0)
    names = sorted(name for names in facts.reads[0].values() for name in names)
    assert names[0] == "0 (daisy/0.png)" and len(names) == 7
    with pytest.raises(ConfigError, match=r"--step 1 does not exist: the steps of an epoch are 0 to 0"):
        data_report.look_at_step(config, ImageFolder(flowers), 1, epoch=0, position=1)


def test_the_batch_is_that_of_the_step_with_its_augmentation():
    config, data_set = job(), Digits("train")
    found = data_report.batch_of(config, data_set, 1, 3)
    loader = StepLoader(data_set, sample_plan(config, data_set), seed=config.training.seed)
    wanted = next(loader.batches(1, 3)).micro_batches
    assert len(found) == len(wanted) == 8
    assert all(torch.equal(mine[0], part.data[0]) for mine, part in zip(found, wanted))


def test_the_sheet_has_a_tile_for_each_picture(flowers):
    pictures = torch.zeros(3, 3, 40, 40, dtype=torch.uint8)
    pictures[1, 0] = 200
    page = data_report.sheet([(pictures[:2], torch.tensor([0, 1])), (pictures[2:], torch.tensor([7]))], ["a", "b"])
    tile = 40 * 2
    assert page.size == (2 * (tile + 4) + 4, 2 * (tile + 14 + 4) + 4)
    assert page.getpixel((4, 4)) == (0, 0, 0) and page.getpixel((4 + tile + 4 + 5, 9)) == (200, 0, 0)
    assert page.getpixel((page.width - 10, page.height - 30)) == (255, 255, 255)
    grey = torch.linspace(-3, 5, 64).reshape(1, 1, 8, 8)
    page = data_report.sheet([(grey, torch.tensor([[0.5, 0.5]]))], [])
    assert page.getpixel((4, 4)) == (0, 0, 0) and page.getpixel((4 + 63, 4 + 63)) == (255, 255, 255)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (torch.zeros(2, 3), "no sheet"),
        ((torch.zeros(2, 3), torch.zeros(2)), "no sheet"),
        ((torch.zeros(2, 5, 4, 4), torch.zeros(2)), "5 channels"),
    ],
)
def test_samples_without_pictures_have_no_sheet(data, message):
    with pytest.raises(ConfigError, match=message):
        data_report.sheet([data], [])


def test_the_text_is_a_histogram_and_a_list_of_readers():
    many = data_report.SetFacts(
        "data.train", "Photos", 1200, {"daisy": 1000, "a": 200}, [f"S{n}" for n in range(22)], 1200
    )
    plain = data_report.SetFacts("data.validation", "Rows", 1, None, None, 1)
    names = [f"{n} (x/{n}.jpg)" for n in range(4)]
    first = {0: names, 1: ["5"] * 20}
    step = data_report.StepFacts(1, 2, 9, 2, [first, first, {}, {1: ["7"], 2: ["8"]}])
    text = data_report.describe([many, plain], step).splitlines()
    assert text[:3] == [
        "data.train: Photos (1,200 samples)",
        f"  daisy     1,000  {'#' * 40}",
        f"  a           200  {'#' * 8}",
    ]
    assert text[3:5] == ["  unreadable: 22 of 1,200", "    S0"] and text[24] == "    and 2 more"
    unlabelled = "  no class labels found: the data set has no labels or targets with a whole number for each sample"
    assert text[26:28] == ["data.validation: Rows (1 sample)", unlabelled]
    assert text[29:] == [
        "step 2 of 9 in epoch 1, both counted from 0",
        "  ranks 0, 1   k0   0 (x/0.jpg), 1 (x/1.jpg) and 2 more",
        f"               k1   {', '.join(['5'] * 12)} and 8 more",
        "  rank 2       nothing",
        "  rank 3       k1   7",
        "               k2   spare: 8",
    ]
    table = data_report.as_table([many], step)
    assert table["step"]["reads"][0][0] == names and table["sets"][0]["classes"]["a"] == 200


def test_a_set_without_a_text_of_its_own_is_named_by_its_class():
    rows = torch.utils.data.TensorDataset(torch.zeros(2, 3))
    assert data_report.look_at_set("data.train", rows, workers=0, reads=False).text == "TensorDataset"
    drawn = data_report.look_at_set("data.train", Weighted(rows, [1, 1], 5), workers=0, reads=False)
    assert drawn.text == "Weighted: 5 draws from TensorDataset"


def test_what_cannot_be_read_is_counted_among_the_samples_that_are_read(flowers):
    (flowers / "rose" / "1.png").write_bytes(b"no picture")
    drawn = Weighted(ImageFolder(flowers, transform=CenterCrop(8)), samples=1)
    facts = data_report.look_at_set("data.train", drawn, workers=0, reads=True)
    text = data_report.describe([facts], data_report.StepFacts(0, 0, 1, 1, [{0: ["0"]}]))
    assert facts.samples == 1 and "unreadable: 1 of 7" in text


def test_pictures_of_floats_fill_the_range():
    found = data_report._as_bytes(torch.stack([torch.full((3, 2, 2), 0.25), torch.full((3, 2, 2), 0.75)]))
    assert np.unique(found).tolist() == [0, 255]
