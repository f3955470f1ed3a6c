import pytest

from lockstep.checkpoint import Best, committed, prune, read, read_best, read_newest, write, write_best
from lockstep.checkpoint.manifest import seal
from lockstep.errors import CheckpointError


@pytest.fixture
def save(tmp_path, state_of):
    return lambda step, **options: write(tmp_path, state_of(step), step=step, **options)


def names(directory):
    return sorted(path.name for path in directory.iterdir() if path.name.startswith("step"))


def test_an_empty_or_missing_folder_has_no_checkpoint(tmp_path):
    assert committed(tmp_path / "none") == []
    assert read_best(tmp_path) is None


def test_the_newest_is_the_highest_step_whatever_the_order_of_names(tmp_path, save):
    for step in (5, 99_999_999, 100_000_000):
        save(step)
    assert [path.name for path in committed(tmp_path)] == ["step-00000005", "step-99999999", "step-100000000"]


def test_the_newest_is_that_of_a_training_that_began_anew(tmp_path, save):
    """A run that was resumed went on from the last step of the training before, and ended with its weights."""
    for step in (10, 20, 30, 10, 20):
        save(step)
    ordered = ["step-00000030", "step-00000010-2", "step-00000020-2"]
    assert [path.name for path in committed(tmp_path)] == ordered
    assert read_newest(tmp_path).path.name == "step-00000020-2"
    save(40)
    assert [path.name for path in committed(tmp_path)] == [*ordered, "step-00000040-2"]


def test_what_goes_on_from_an_earlier_checkpoint_takes_away_what_it_has_passed(tmp_path, save):
    for step in (10, 20, 30, 40, 15):
        save(step, keep=2)
    assert names(tmp_path) == ["step-00000015-2", "step-00000030", "step-00000040"]
    for step in (35, 45):
        save(step, keep=2)
    assert names(tmp_path) == ["step-00000035-2", "step-00000045-2"]


def test_only_the_last_n_are_kept(tmp_path, save):
    for step in range(5):
        save(step, keep=2)
    assert names(tmp_path) == ["step-00000003", "step-00000004"]


def test_the_best_is_never_deleted_until_another_is_best(tmp_path, save):
    save(0, keep=1)
    write_best(tmp_path, Best(0, "accuracy", 0.97))
    for step in (1, 2):
        save(step, keep=1)
    assert names(tmp_path) == ["step-00000000", "step-00000002"]
    assert read_best(tmp_path) == Best(0, "accuracy", 0.97)
    write_best(tmp_path, Best(2, "accuracy", 0.98))
    save(3, keep=1)
    assert names(tmp_path) == ["step-00000002", "step-00000003"]


def test_the_newest_step_and_the_one_just_written_stay(tmp_path, save):
    for step in (10, 20, 30):
        save(step)
    save(15, keep=1)
    assert names(tmp_path) == ["step-00000015-2", "step-00000030"]


@pytest.mark.fault("K4")
def test_saving_a_step_again_never_writes_over_it(tmp_path, save, shown):
    first = save(4)
    second = save(4)
    assert (first.name, second.name) == ("step-00000004", "step-00000004-2")
    assert names(tmp_path) == ["step-00000004-2"]
    assert shown(read(second)) == 4


def test_an_altered_best_record_is_refused_and_then_nothing_is_deleted(tmp_path, save, caplog):
    save(1)
    write_best(tmp_path, Best(1, "accuracy", 0.5))
    content = (tmp_path / "best.json").read_bytes()
    (tmp_path / "best.json").write_bytes(content.replace(b'"step":1', b'"step":2'))
    with pytest.raises(CheckpointError, match="SHA-256 does not match"):
        read_best(tmp_path)
    save(2, keep=1)
    assert names(tmp_path) == ["step-00000001", "step-00000002"]
    assert "were not removed" in caplog.text


@pytest.mark.parametrize("value", ["", "high", 0.5, None])
def test_a_best_record_without_a_number_is_refused_however_well_it_is_sealed(tmp_path, save, value):
    save(1)
    (tmp_path / "best.json").write_bytes(seal({"step": 1, "metric": "accuracy", "value": value}))
    with pytest.raises(CheckpointError, match="does not hold a step, a metric and its value"):
        read_best(tmp_path)


@pytest.mark.fault("K8")
def test_links_and_other_names_are_not_checkpoints(tmp_path, save):
    path = save(1)
    (tmp_path / "step-00000009").symlink_to(path)
    (tmp_path / "step-9").mkdir()
    (tmp_path / "step-00000008").write_text("a file")
    assert committed(tmp_path) == [path]
    prune(tmp_path, keep=1)
    assert (tmp_path / "step-00000009").is_symlink()


def test_infinite_and_nan_metrics_are_recorded(tmp_path):
    write_best(tmp_path, Best(1, "loss", float("inf")))
    assert read_best(tmp_path).value == float("inf")
