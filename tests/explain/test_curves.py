"""Curves of runs: which points they have, against epochs and against time."""

import json

import pytest

from lockstep.errors import ConfigError
from lockstep.explain.chart import Curve, Label
from lockstep.explain.curves import RunLog, chart, final_table, page, read_logs, text


def write(folder, epochs=2, *, loss=1.0, with_seconds=True, steps=4):
    folder.mkdir(parents=True)
    records = []
    for epoch in range(epochs):
        for step in range(epoch * steps + 2, (epoch + 1) * steps + 1, 2):
            values = {"loss": loss / step, "learning_rate": 0.1, "samples_per_second": 9.0}
            records.append({"kind": "step", "step": step, "epoch": epoch, "seconds": 60.0 * step, **values})
        values = {"loss": 0.5, "validation_accuracy": 0.5 + epoch / 10}
        end = (epoch + 1) * steps
        records.append({"kind": "epoch", "step": end, "epoch": epoch, "seconds": 61.0 * end, **values})
    for record in records if not with_seconds else ():
        del record["seconds"]
    (folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


def by_run(logs):
    """The table of several runs, with a row for its first column and one for each run."""
    return [*zip(*final_table(logs), strict=True)]


def test_a_metric_of_steps_is_drawn_by_steps_and_another_by_epochs(tmp_path):
    (log,) = read_logs([write(tmp_path / "a")])
    assert log.points("loss", "epochs") == [(0.5, 0.5), (1.0, 0.25), (1.5, 1 / 6), (2.0, 0.125)]
    assert log.points("validation_accuracy", "epochs") == [(1.0, 0.5), (2.0, 0.6)]
    assert log.points("validation_accuracy", "seconds") == [(244.0, 0.5), (488.0, 0.6)]
    assert log.points("loss_scale", "epochs") == []


def test_a_run_that_ended_within_an_epoch_is_drawn_at_its_part_of_one(tmp_path):
    """A run of 6 steps with 4 an epoch had its last step at 2 epochs, and all others at wrong places."""
    folder = write(tmp_path / "a")
    end = {"kind": "epoch", "step": 6, "epoch": 1, "seconds": 9.0, "loss": 0.5, "epochs_done": 1.5}
    lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    (folder / "log.jsonl").write_text("".join(lines[:4]) + json.dumps(end) + "\n")
    (log,) = read_logs([folder])
    assert [x for x, _ in log.points("loss", "epochs")] == [0.5, 1.0, 1.5]
    assert by_run([log])[1][1] == "1.5"


def test_values_that_are_not_finite_are_left_out(tmp_path):
    folder = write(tmp_path / "a")
    lines = (folder / "log.jsonl").read_text().replace('"loss": 0.25', '"loss": null')
    (folder / "log.jsonl").write_text(lines)
    assert [x for x, _ in read_logs([folder])[0].points("loss", "epochs")] == [0.5, 1.5, 2.0]


def test_a_metric_that_is_not_finite_at_the_end_has_no_older_value_in_the_table(tmp_path):
    """The table had the loss of an epoch before, as if the run had not diverged."""
    folder = write(tmp_path / "one")
    path = folder / "log.jsonl"
    *before, last = map(json.loads, path.read_text().splitlines())
    before = [each | {"validation_loss": None} for each in before]
    last |= {"accuracy": None, "validation_accuracy": None, "validation_loss": None}
    path.write_text("".join(json.dumps(each) + "\n" for each in (*before, last)))
    table = by_run(read_logs([folder]))
    row = dict(zip(*table, strict=True))
    assert [row["accuracy"], row["validation accuracy"], row["validation loss"]] == ["not finite"] * 3
    assert "nan" not in page(read_logs([folder])).lower()


def test_a_curve_that_others_cover_is_wide_enough_to_be_seen(tmp_path):
    logs = read_logs([write(tmp_path / name, loss=2.0 if name == "c" else 1.0) for name in "abcd"])
    first = [shape.width for shape in chart(logs).shapes if isinstance(shape, Curve)][:4]
    assert first == pytest.approx([8.0, 4.8, 1.6, 1.6])  # a, b and d are equal, and d is drawn last


def test_every_metric_has_a_panel_for_epochs_and_one_for_time_and_every_run_a_curve(tmp_path):
    logs = read_logs([write(tmp_path / "a"), write(tmp_path / "b", 3, loss=2.0)])
    picture = chart(logs)
    words = [shape.text for shape in picture.shapes if isinstance(shape, Label)]
    for name in ("loss", "validation accuracy", "learning rate"):
        assert words.count(name) == 2
    assert words.count("epochs") == words.count("minutes") == 3
    curves = [shape for shape in picture.shapes if isinstance(shape, Curve)]
    assert len(curves) == 2 * 2 * 3
    assert len({curve.colour for curve in curves}) == 2
    for curve in curves:
        assert all(0 <= x <= picture.width and 0 <= y <= picture.height for x, y in curve.points)


def test_a_lower_loss_is_drawn_lower_and_later_points_further_right(tmp_path):
    curve = next(shape for shape in chart(read_logs([write(tmp_path / "a")])).shapes if isinstance(shape, Curve))
    assert [x for x, _ in curve.points] == sorted(x for x, _ in curve.points)
    assert [y for _, y in curve.points] == sorted(y for _, y in curve.points)


def test_logs_without_times_are_drawn_against_epochs_alone(tmp_path):
    words = [shape.text for shape in chart(read_logs([write(tmp_path / "a", with_seconds=False)])).shapes
             if isinstance(shape, Label)]  # fmt: skip
    assert words.count("epochs") == 3
    assert not {"seconds", "minutes", "hours"} & set(words)


def test_a_run_in_its_first_epoch_has_its_last_values_and_is_drawn_against_time(tmp_path):
    folder = write(tmp_path / "a", 1)
    lines = (folder / "log.jsonl").read_text().splitlines(keepends=True)
    (folder / "log.jsonl").write_text("".join(lines[:-1]))
    logs = read_logs([folder])
    assert by_run(logs)[1] == ("a", "0", "4 min 00 s", "0.25", "0.1")
    words = [shape.text for shape in chart(logs).shapes if isinstance(shape, Label)]
    assert words.count("minutes") == 2
    assert "epochs" not in words


def test_learning_rates_of_groups_have_a_panel_each(tmp_path):
    folder = write(tmp_path / "a")
    text = (folder / "log.jsonl").read_text()
    rates = ", ".join(f'"learning_rate_{number}": {number / 10}' for number in range(1, 11))
    (folder / "log.jsonl").write_text(text.replace('"learning_rate": 0.1', rates))
    words = [shape.text for shape in chart(read_logs([folder])).shapes if isinstance(shape, Label)]
    assert [word for word in words if word.startswith("learning rate")] == [
        f"learning rate {number}" for number in range(1, 11) for _ in range(2)
    ]


def test_the_table_has_the_last_values_and_the_best_accuracy(tmp_path):
    rows = by_run(read_logs([write(tmp_path / "a"), write(tmp_path / "b", 1)], ["one", "two"]))
    assert rows[0] == (
        "run",
        "epochs",
        "time",
        "loss",
        "validation accuracy",
        "learning rate",
        "best accuracy (epoch)",
    )
    assert rows[1] == ("one", "2", "8 min 08 s", "0.5", "60.00 %", "0.1", "60.00 % (2)")
    assert rows[2][:3] == ("two", "1", "4 min 04 s")
    assert [line.split()[0] for line in text(read_logs([tmp_path / "a"])).splitlines()[:2]] == ["run", "epochs"]


def test_the_table_of_a_few_runs_fits_into_80_columns(tmp_path):
    """A row for each run had 165 characters."""
    logs = read_logs([write(tmp_path / name) for name in ("digits-001", "digits-002", "digits-003")])
    lines = text(logs, {log.name: "0123456789abcdef" for log in logs}).splitlines()
    assert lines[0].split() == ["run", "digits-001", "digits-002", "digits-003"]
    assert max(map(len, lines)) <= 80


def test_an_accuracy_that_is_given_in_percent_is_not_multiplied():
    record = {"kind": "epoch", "step": 4, "epoch": 0, "validation_accuracy": 43.24}
    assert by_run([RunLog("a", (record,))])[1] == ("a", "1", "-", "43.24", "43.24 (1)")


def test_a_percentage_below_one_and_the_marks_of_an_axis_are_not_multiplied_either():
    """An axis to 40 began with 0 %, and a last accuracy of 0.5 beside a best one of 43.24 was 50.00 %."""
    records = [
        {"kind": "epoch", "step": 4 * n, "epoch": n - 1, "validation_accuracy": value}
        for n, value in ((1, 43.24), (2, 0.5))
    ]
    log = RunLog("a", tuple(records))
    assert by_run([log])[1] == ("a", "2", "-", "0.5", "43.24 (1)")
    words = [shape.text for shape in chart([log]).shapes if isinstance(shape, Label)]
    assert "0" in words and "50" in words and not [word for word in words if "%" in word]


def test_the_table_has_the_means_of_the_last_epoch_and_not_those_of_its_last_steps(tmp_path):
    folder = write(tmp_path / "a")
    later = {"kind": "step", "step": 10, "epoch": 2, "seconds": 600.0, "loss": 9.0, "learning_rate": 0.01}
    with (folder / "log.jsonl").open("a") as log:
        log.write(json.dumps(later) + "\n")
    head, row = by_run(read_logs([folder]))
    values = dict(zip(head, row, strict=True))
    assert (values["epochs"], values["loss"], values["learning rate"]) == ("2", "0.5", "0.1")


def test_evaluations_between_epochs_and_after_them_are_one_curve(tmp_path):
    path = write(tmp_path / "a") / "log.jsonl"
    between = {"kind": "step", "step": 7, "epoch": 1, "seconds": 420.0, "validation_accuracy": 0.55}
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines[:-1], json.dumps(between) + "\n", lines[-1]]))
    (log,) = read_logs([path.parent])
    assert log.points("validation_accuracy", "epochs") == [(1.0, 0.5), (1.75, 0.55), (2.0, 0.6)]
    assert by_run([log])[1][-1] == "60.00 % (2)"


def test_a_run_that_went_on_from_another_has_the_epochs_of_both(tmp_path):
    path = write(tmp_path / "a", epochs=3) / "log.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    first = next(number for number, line in enumerate(lines) if json.loads(line)["kind"] == "epoch")
    path.write_text("".join(lines[first + 1 :]))
    (_, row) = by_run(read_logs([path.parent]))
    assert (row[1], row[-1]) == ("3", "70.00 % (3)")


def test_the_page_has_all_in_one_file(tmp_path):
    html = page(read_logs([write(tmp_path / "a")], ["a < b"]))
    assert "<svg" in html and "a &lt; b" in html
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")


@pytest.mark.parametrize(
    ("folders", "labels", "message"),
    [
        (["none"], [], "There is no run folder 'none'."),
        (
            ["bare"],
            [],
            "'bare/log.jsonl' cannot be read: No such file or directory. Give the run folders of jobs",
        ),
        (["a", "b"], ["x"], "--labels gives 1 names, and there are 2 runs"),
        (["a", "b"], ["x", "x"], "Two runs have the same name: x, x"),
        (["empty"], [], "has no record yet"),
    ],
)
def test_what_cannot_be_compared_is_said(tmp_path, monkeypatch, folders, labels, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "a"), write(tmp_path / "b")
    (tmp_path / "empty").mkdir(), (tmp_path / "bare").mkdir()
    (tmp_path / "empty" / "log.jsonl").touch()
    with pytest.raises(ConfigError) as caught:
        read_logs([*map(type(tmp_path), folders)], labels)
    assert message in str(caught.value)


def test_runs_of_the_same_name_in_two_folders_are_told_apart(tmp_path):
    folders = [write(tmp_path / "x" / "run"), write(tmp_path / "y" / "run")]
    assert [log.name for log in read_logs(folders)] == [str(folder) for folder in folders]
