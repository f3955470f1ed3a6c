"""Findings of ``starter`` in data of the user's own, and the job files and scripts that it writes."""

import tomllib

import numpy as np
import pytest
import torch
from PIL import Image

from lockstep.config.job_file import load_job, parse_set
from lockstep.config.starter import folder_job, job_text, kind_of, look_at, script_text
from lockstep.errors import ConfigError

TABLE = "name,a,b,kind\n" + "".join(f"n{row},{row},{row / 2},{row % 3}\n" for row in range(12))


def write_photos(folder, classes=("cat", "dog"), count=6, side=24):
    for number, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for photo in range(count):
            Image.new("RGB", (side, side), (90 * number, 10 * photo, 0)).save(folder / name / f"{photo}.png")
    return folder


def write(path, text):
    path.write_text(text)
    return path


def test_the_kind_is_what_the_data_looks_like(tmp_path):
    np.savez(tmp_path / "t.npz", x=np.zeros((2, 2)), y=np.zeros(2))
    assert kind_of(write_photos(tmp_path / "photos")) == "images"
    assert kind_of(write(tmp_path / "t.csv", TABLE)) == "table"
    assert kind_of(write(tmp_path / "t.txt", "words")) == "text"
    assert kind_of(tmp_path / "t.npz") == "tensors"
    with pytest.raises(ConfigError, match="none of: a folder of photos"):
        kind_of(write(tmp_path / "t.xyz", ""))
    with pytest.raises(ConfigError, match="There is no file or folder"):
        kind_of(tmp_path / "absent")


@pytest.mark.parametrize(("side", "size", "small"), [(24, 32, True), (50, 64, True), (80, 224, False)])
def test_pictures_are_as_large_as_the_photos_suggest(tmp_path, side, size, small):
    job = tomllib.loads(folder_job(write_photos(tmp_path / "photos", side=side)))
    assert job["data"]["train"]["transform"]["size"] == size
    assert job["model"] == {"target": "lockstep.models:resnet18", "num_classes": 2, "small_images": small}


def test_photos_in_folders_of_their_splits_have_the_classes_below(tmp_path):
    for split in ("train", "val"):
        write_photos(tmp_path / "photos" / split)
    found = look_at(tmp_path / "photos", "images")
    assert (found.samples, found.outputs) == (24, 2)
    assert found.remarks[1] == "the folders are the splits; photos are scaled to 32 x 32 pixels"


def test_a_folder_of_images_is_a_job(tmp_path):
    folder = write_photos(tmp_path / "my photos")
    config = load_job(str(folder))
    assert (config.job, config.data.root) == ("my-photos", str(folder))


def test_a_mistake_in_the_job_of_a_folder_names_no_line_of_a_file_that_is_not_there(tmp_path):
    folder = write_photos(tmp_path / "photos")
    with pytest.raises(ConfigError, match=rf"the job made for '{folder}': training.global_batch is 32"):
        load_job(str(folder), [parse_set("training.micro_batches=3")])


def test_a_folder_that_holds_a_job_is_answered_with_its_command(tmp_path):
    (write_photos(tmp_path / "photos") / "mine.toml").write_text("[model]\n")
    with pytest.raises(ConfigError, match=r"lockstep train '?.*photos/mine\.toml"):
        load_job(str(tmp_path / "photos"))


def test_a_table_has_its_last_column_as_target_and_leaves_text_out(tmp_path):
    found = look_at(write(tmp_path / "t.csv", TABLE), "table")
    assert (found.goal, found.outputs, found.samples) == ("classes", 3, 12)
    assert (found.values["columns"], found.values["classes"]) == (["a", "b"], ["0", "1", "2"])
    assert "left out, because some values are not numbers: name ('n0' in row 2)" in found.remarks


@pytest.mark.parametrize(("name", "delimiter"), [("t.csv", ";"), ("t.csv", "\t"), ("t.tsv", "\t")])
def test_the_first_line_of_a_table_tells_what_separates_its_columns(tmp_path, name, delimiter):
    """A table with semicolons, as spreadsheets write it in many countries, was said to have no such line."""
    found = look_at(write(tmp_path / name, TABLE.replace(",", delimiter)), "table")
    assert (found.values["columns"], found.values["delimiter"]) == (["a", "b"], delimiter)


@pytest.mark.parametrize(
    ("target", "goal", "expected"), [("b", "", "numbers"), ("a", "", "classes"), ("a", "numbers", "numbers")]
)
def test_a_column_of_few_whole_numbers_is_of_classes_unless_told_otherwise(tmp_path, target, goal, expected):
    assert look_at(write(tmp_path / "t.csv", TABLE), "table", target=target, goal=goal).goal == expected


@pytest.mark.parametrize(
    ("text", "options", "match"),
    [
        (TABLE, {"target": "kinds"}, "not a column of .* Did you mean 'kind'"),
        (TABLE, {"target": "name", "goal": "numbers"}, "not all numbers"),
        ("a,b\n1,2\n1\n", {}, "row 3: 1 values for 2 columns"),
        ("a,a\n1,2\n", {}, "names at least two columns, each once"),
        ("a,b\n" + "1,2\n" * 9, {}, "has 9 samples; at least 10"),
        ("a,b\n" + "x,2\n" * 20, {}, r"no column of numbers beside 'b': a \('x' in row 2\)"),
        (
            "a,b\n" + "1,2\n" * 20 + ",2\n",
            {},
            r"a \('' in row 22\)\. .* fill in empty values or remove their rows",
        ),
        ("a,b\n" + "1,2\n" * 20, {}, "has one class only"),
    ],
)
def test_a_table_that_cannot_be_trained_on_is_refused_with_the_reason(tmp_path, text, options, match):
    with pytest.raises(ConfigError, match=match):
        look_at(write(tmp_path / "t.csv", text), "table", **options)


def test_tensors_of_every_kind_of_file_are_read(tmp_path):
    x, y = np.zeros((12, 2, 3), np.float32), np.arange(12) % 4
    np.savez(tmp_path / "t.npz", x=x, y=y)
    np.save(tmp_path / "x.npy", x)
    np.save(tmp_path / "y.npy", y)
    torch.save({"x": torch.as_tensor(x), "y": torch.as_tensor(y)}, tmp_path / "t.pt")
    for data in (tmp_path / "t.npz", tmp_path, tmp_path / "t.pt"):
        found = look_at(data, kind_of(data))
        assert (found.goal, found.outputs, found.values["in_features"]) == ("classes", 4, 6)


@pytest.mark.parametrize(
    ("arrays", "goal", "match"),
    [
        ({"x": np.zeros((12, 2))}, "", "does not hold tensors named x and y: it holds x. Save both"),
        ({"X": np.zeros((12, 2)), "Y": np.zeros(12)}, "", "it holds X, Y. Save both under these names"),
        ({"x": np.zeros((12, 2)), "y": np.zeros(11)}, "", "as many rows"),
        ({"x": np.zeros((12, 2)), "y": np.zeros(12)}, "classes", "Use --goal numbers"),
    ],
)
def test_tensors_that_cannot_be_trained_on_are_refused_with_the_reason(tmp_path, arrays, goal, match):
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(ConfigError, match=match):
        look_at(tmp_path / "t.npz", "tensors", goal=goal)


def test_a_file_of_tensors_without_names_is_told_so(tmp_path):
    """The words were Python's: tuple indices must be integers or slices, not str."""
    torch.save((torch.zeros(12, 2), torch.zeros(12)), tmp_path / "t.pt")
    with pytest.raises(ConfigError, match=r"it holds a tuple\. Save both under these names, in a \.pt file as a dict"):
        look_at(tmp_path / "t.pt", "tensors")


def test_a_photo_in_no_folder_of_a_class_is_not_counted(tmp_path):
    folder = write_photos(tmp_path / "photos")
    (folder / "cover.png").write_bytes((folder / "cat" / "0.png").read_bytes())
    found = look_at(folder, "images")
    assert (found.samples, found.remarks[0]) == (12, "12 photos in 2 classes: cat, dog")


@pytest.mark.parametrize(("lengths", "size", "samples"), [((641,), 641, 10), ((704,), 704, 10), ((320, 383), 703, 10)])
def test_texts_have_the_samples_that_the_script_cuts(tmp_path, lengths, size, samples):
    """One byte too many for each file was told, or but one, and a last sample that has no next byte."""
    for number, length in enumerate(lengths):
        (tmp_path / f"{number}.txt").write_text("x" * length)
    found = look_at(tmp_path, "text")
    namespace = {}
    exec(script_text(found, "text.py", epochs=1), namespace)
    assert (found.samples, len(namespace["datasets"]()[0]) + len(namespace["datasets"]()[1])) == (samples, samples)
    assert found.remarks[0].startswith(f"{size} bytes in ")


def test_the_texts_are_a_job_and_a_script_whatever_the_path_holds(tmp_path):
    folder = tmp_path / 'it\'s "here" {x} \\ \u00e9'
    folder.mkdir()
    found = look_at(write(folder / "t.csv", TABLE), "table")
    script = script_text(found, "mine")
    compile(script, "mine.py", "exec")
    assert repr(str(folder / "t.csv")) in script
    photos = look_at(write_photos(folder / "photos"), "images")
    assert tomllib.loads(job_text(photos, "mine"))["data"]["root"] == str(folder / "photos")


def test_rows_without_a_value_to_predict_are_no_class_of_their_own(tmp_path):
    (tmp_path / "t.csv").write_text("a,kind\n" + "".join(f"{row},{'' if row % 7 else 'x'}\n" for row in range(14)))
    with pytest.raises(ConfigError, match=r"no value in 12 rows of column 'kind'.*row 3\. Remove"):
        look_at(tmp_path / "t.csv", "table")


def test_a_table_in_another_encoding_is_refused_with_what_to_do(tmp_path):
    (tmp_path / "t.csv").write_bytes("größe,kind\n1,2\n".encode("latin-1"))
    with pytest.raises(ConfigError, match=r"cannot be read as CSV in UTF-8.*Save it so"):
        look_at(tmp_path / "t.csv", "table")


@pytest.mark.parametrize("name", ["x", "y"])
def test_a_row_that_is_not_finite_is_named(tmp_path, name):
    arrays = {"x": np.zeros((5000, 2)), "y": np.zeros(5000)}
    arrays[name][4500] = np.nan
    np.savez(tmp_path / "t.npz", **arrays)
    with pytest.raises(ConfigError, match=f"Row 4500 of {name} is NaN or infinite"):
        look_at(tmp_path / "t.npz", "tensors")


def test_tensors_of_bfloat16_are_read(tmp_path):
    torch.save({"x": torch.ones(12, 3, dtype=torch.bfloat16), "y": torch.arange(12) % 2}, tmp_path / "t.pt")
    assert look_at(tmp_path / "t.pt", "tensors").outputs == 2


def test_a_photo_that_cannot_be_opened_is_named_with_what_to_do(tmp_path):
    folder = write_photos(tmp_path / "data")
    broken = sorted(folder.rglob("*.*g"))[0]
    broken.write_bytes(b"no photo")
    with pytest.raises(ConfigError, match=rf"{broken.name}.*Replace or remove it"):
        look_at(folder, "images")
