"""The messages of a whole job that goes wrong; nothing is lost by it."""

import hashlib
import shutil

import pytest
from tests.printed import fingerprint_of
from tests.trainer.jobs import Jobs


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """The fingerprint of the job that nothing happened to, on one process."""
    return fingerprint_of(Jobs(tmp_path_factory.mktemp("undisturbed")).train("--devices", "cpu:1"))


def digests(folder):
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and "step-" in str(path)
    }


@pytest.mark.slow
@pytest.mark.fault("P1", "K5")
def test_a_killed_run_goes_on_by_itself_with_the_processes_that_are_left(jobs, undisturbed):
    jobs.fault("kill", rank=1, call=31)
    done = jobs.train("--devices", "cpu:3", "--restart-world", "remaining")
    assert fingerprint_of(done) == undisturbed
    said = done.stderr.splitlines()
    killed = next(number for number, line in enumerate(said) if line.startswith("rank 1 killed by SIGKILL"))
    assert said[killed + 1] == "Restart 1 of 3: 2 ranks of 3, from the last checkpoint if there is one."


@pytest.mark.fault("D6")
def test_nan_names_step_and_samples_and_leaves_the_last_checkpoint_finite(jobs):
    jobs.fault("nan", rank=1, call=25)
    failed = jobs.train("--devices", "cpu:2")
    assert failed.returncode == 6
    assert "The loss of step 6 is nan in micro-batch 4 (samples " in failed.stderr
    assert [path.name for path in jobs.checkpoints()] == ["step-00000004"]


@pytest.mark.fault("K3")
@pytest.mark.slow
def test_a_flipped_byte_is_refused_and_nothing_is_written_over(jobs):
    assert jobs.train("--devices", "cpu:2", "--epochs", "1").returncode == 0
    broken = jobs.checkpoints()[-1]
    weights = max(broken.iterdir(), key=lambda path: path.stat().st_size)
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    before = digests(jobs.folder)
    failed = jobs.train("--devices", "cpu:2", "--resume", str(broken))
    assert failed.returncode == 3
    assert broken.name in failed.stderr
    assert digests(jobs.folder) == before


@pytest.mark.slow
@pytest.mark.fault("K3")
def test_a_run_folder_whose_newest_checkpoint_is_broken_goes_on_from_the_one_before(jobs, undisturbed):
    jobs.fault("kill", rank=0, call=47)
    assert jobs.train("--devices", "cpu:2", "--restarts", "0").returncode == 4
    newest = jobs.checkpoints()[-1]
    weights = max(newest.iterdir(), key=lambda path: path.stat().st_size)
    weights.write_bytes(weights.read_bytes()[:-1])
    resumed = jobs.train("--devices", "cpu:3", "--resume", "auto")
    assert "skipped" in resumed.stderr and newest.name in resumed.stderr
    assert fingerprint_of(resumed) == undisturbed


@pytest.mark.fault("K6", "S8")
@pytest.mark.slow
def test_a_checkpoint_of_another_model_is_refused_by_name(jobs):
    assert jobs.train("--devices", "cpu:1", "--epochs", "1").returncode == 0
    path = jobs.checkpoints()[-1]
    failed = jobs.train("--devices", "cpu:2", "--resume", str(path), "--set", "model.target=parts:other_model")
    assert failed.returncode == 2
    assert "1.weight" in failed.stderr


@pytest.mark.parametrize(
    ("damage", "status", "words"),
    [
        (lambda photos: shutil.rmtree(photos), 2, "does not exist"),
        pytest.param(
            lambda photos: [p.unlink() for p in (photos / "roses").iterdir()],
            3,
            "roses",
            marks=pytest.mark.slow,
        ),
        (lambda photos: _truncate(photos / "daisy" / "7.jpg"), 3, "7.jpg"),
    ],
    ids=["no folder", "empty class", "truncated photo"],
)
@pytest.mark.fault("D1", "D4", "M13")
def test_broken_photos_are_named(jobs, damage, status, words):
    photos = jobs.folder / "photos"
    _make_photos(photos)
    damage(photos)
    failed = jobs.train(
        "--devices=cpu:2", "--data=photos",
        "--set", "data.train.transform.size=8", "--set", "data.validation.transform.size=8",
        "--set", 'model={target="lockstep.models:perceptron", in_features=192, hidden=[8], num_classes=2}',
        job="flowers",
    )  # fmt: skip
    assert failed.returncode == status, failed.stderr
    assert words in failed.stderr
    assert not jobs.checkpoints()


@pytest.mark.fault("D5")
@pytest.mark.slow
def test_a_label_outside_of_the_classes_stops_before_the_first_step(jobs):
    failed = jobs.train("--devices=cpu:2", "--set", 'model={target="lockstep.models:digits_net", num_classes=7}')
    assert failed.returncode == 3
    assert "has label" in failed.stderr and "classes" in failed.stderr


def _make_photos(folder):
    from PIL import Image

    for name in ("daisy", "roses"):
        (folder / name).mkdir(parents=True)
        for number in range(40):
            color = (number * 6, 255 - number * 6, 128 if name == "daisy" else 20)
            Image.new("RGB", (24, 16), color).save(folder / name / f"{number}.jpg")


def _truncate(path):
    content = path.read_bytes()
    path.write_bytes(content[: len(content) * 3 // 5])
