import pickle

import numpy as np
import pytest
import torch
from torch.utils.data import Subset

from lockstep.data import CSVTable
from lockstep.data.labels import differing_columns
from lockstep.data.reader import SampleReader
from lockstep.errors import ConfigError, DataError

TEXT = "a,b,kind\n1,2.5,rose\n\n3,-4e-2,tulip\n5,6,0\n"


def table(tmp_path, text=TEXT, label="kind", **options):
    path = tmp_path / "t.csv"
    path.write_text(text, encoding="utf-8")
    return CSVTable(path, label, **options)


def test_columns_and_named_classes_are_read(tmp_path):
    rows = pickle.loads(pickle.dumps(table(tmp_path, classes=["rose", "tulip"])))
    inputs, targets = SampleReader(rows, seed=0).read(0, np.array([1, 2]))
    assert torch.equal(inputs, torch.tensor([[3, -0.04], [5, 6]])) and targets.tolist() == [1, 0]
    assert rows.columns == ("a", "b") and targets.dtype == torch.int64
    assert rows.sample_path(1) == "t.csv, line 4"


def test_columns_in_another_order_than_those_of_the_training_are_told(tmp_path):
    """A validation table whose columns are in another order had its numbers taken for others."""
    trained = table(tmp_path, classes=["rose", "tulip"])
    turned = table(tmp_path, "b,a,kind\n2.5,1,rose\n", classes=["rose", "tulip"])
    assert "trained on are a, b, and here they are b, a" in differing_columns(Subset(trained, [0]), turned)
    named = table(tmp_path, "b,a,kind\n2.5,1,rose\n", columns=["a", "b"], classes=["rose", "tulip"])
    assert differing_columns(trained, named) == differing_columns(None, turned) == ""


def test_chosen_columns_delimiter_and_a_number_as_the_target(tmp_path):
    rows = table(
        tmp_path,
        TEXT.replace(",", ";").replace("rose", "7").replace("tulip", "8"),
        "a",
        columns=["kind", "b"],
        delimiter=";",
    )
    assert rows[1][0].tolist() == [8, pytest.approx(-0.04)] and rows[1][1].dtype == torch.float32
    assert rows.targets.tolist() == [1, 3, 5]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT.replace("-4e-2", "x"), r"t\.csv, line 4: column 'b' holds 'x', which is not a finite float32"),
        (TEXT.replace("-4e-2", "nan"), "line 4: column 'b' holds 'nan'"),
        (TEXT.replace("-4e-2", "4_2"), "line 4: column 'b' holds '4_2'"),
        (TEXT.replace("-4e-2", "1e39"), "line 4: column 'b' holds '1e39'"),
        (TEXT.replace("5,6,", "5,"), "line 5: 2 columns, and the header has 3"),
        (TEXT.replace("tulip", "lily"), "line 4: column 'kind' holds 'lily'"),
        (TEXT.replace("6,0", "6,2"), r"sample 2 \(t\.csv, line 5\) has label 2"),
        (TEXT.replace("6,0", "6,0.5"), "line 5: kind is 0.5, which is not a class"),
        ("a,b,kind\n", "a header and no rows"),
        ("", "first line that names each column once"),
        ("a,a,kind\n1,2,0\n", "names each column once"),
        ("a,b,kin\n1,2,0\n", "no column 'kind'. Did you mean 'kin'"),
        ("kind\n1\n", "no column beside the target"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path, text, message):
    with pytest.raises(DataError, match=message):
        table(tmp_path, text, classes=["rose", "tulip"])


def test_names_that_are_numbers_are_not_mixed_with_the_numbers_of_classes(tmp_path):
    """Of the labels 0, 1 and 2 with the classes "1", "2" and "3", the 1 was taken for the first class, as the 0 was."""
    text = "a,kind\n5,0\n6,1\n7,2\n"
    with pytest.raises(DataError, match=r"line 3 by the name .* in line 2 by its number, and class 0 has the name '1'"):
        table(tmp_path, text, classes=["1", "2", "3"])
    assert table(tmp_path, text.replace("0", "3"), classes=["1", "2", "3"]).targets.tolist() == [2, 0, 1]
    assert table(tmp_path, text.replace("1", "1.0"), classes=3).targets.tolist() == [0, 1, 2]
    assert table(tmp_path, text, classes=["7", "8", "9"]).targets.tolist() == [0, 1, 2]


def test_files_that_are_no_tables_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        CSVTable(tmp_path / "no.csv", "kind")
    (tmp_path / "b.csv").write_bytes(b"a,kind\n\xff\xfe,0\n")
    with pytest.raises(DataError, match=r"b\.csv cannot be read as CSV in UTF-8"):
        CSVTable(tmp_path / "b.csv", "kind")
    with pytest.raises(ConfigError, match="two of one name"):
        CSVTable(tmp_path / "b.csv", "kind", classes=["a", "b", "a"])
    with pytest.raises(ConfigError, match="one character"):
        CSVTable(tmp_path / "b.csv", "kind", delimiter="::")
