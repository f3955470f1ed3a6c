"""The folder that a run writes to, and the checkpoint that it resumes from."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from lockstep.errors import ConfigError
from lockstep.job.run_folder import (
    FILE,
    Start,
    choose_run_folder,
    discard,
    locked,
    planned_run_folder,
    run_folder,
    with_start,
)


@pytest.fixture
def job(load, tmp_path):
    return lambda *options: load(f"run.directory={tmp_path / 'runs'}", *options)


def checkpoint(folder, step=1):
    (folder / f"step-{step:08d}").mkdir(parents=True)


def test_runs_are_numbered_and_their_folders_made(job, tmp_path):
    for number in ("001", "002", "003"):
        config = job()
        planned = planned_run_folder(config)
        chosen = choose_run_folder(config)
        assert run_folder(chosen) == planned == tmp_path / "runs" / f"work-{number}"
        assert planned.is_dir()
        assert chosen.checkpoint.resume == ""


def test_numbers_go_on_after_the_highest_and_other_names_do_not_count(job, tmp_path):
    for name in ("work-007", "work-x", "other-050", "work-12"):
        (tmp_path / "runs" / name).mkdir(parents=True)
    assert choose_run_folder(job()).run.name == "work-008"


def test_runs_that_start_at_once_get_different_folders(job):
    config = job()
    with ThreadPoolExecutor(8) as pool:
        names = [chosen.run.name for chosen in pool.map(lambda _: choose_run_folder(config), range(24))]
    assert len(set(names)) == 24


@pytest.mark.fault("M8")
def test_a_name_is_taken_once(job, tmp_path):
    config = job("run.name=mine")
    assert run_folder(choose_run_folder(config)) == tmp_path / "runs" / "mine"
    with pytest.raises(ConfigError, match="exists"):
        choose_run_folder(config)


def test_resume_auto_takes_the_latest_run_that_has_a_checkpoint(job, tmp_path):
    runs = tmp_path / "runs"
    checkpoint(runs / "work-001")
    checkpoint(runs / "work-002")
    (runs / "work-003").mkdir()
    config = job("checkpoint.resume=auto")
    assert planned_run_folder(config) == runs / "work-002"
    chosen = choose_run_folder(config)
    assert run_folder(chosen) == runs / "work-002"
    assert chosen.checkpoint.resume == "auto"


def test_resume_auto_starts_anew_where_there_is_nothing_to_resume_and_says_where_it_looked(job, tmp_path, capsys):
    chosen = choose_run_folder(job("checkpoint.resume=auto"))
    assert (chosen.run.name, chosen.checkpoint.resume) == ("work-001", "")
    assert (
        f"nothing to resume: no run of this job in '{tmp_path / 'runs'}' has a checkpoint." in capsys.readouterr().err
    )


def test_resume_auto_goes_on_in_a_named_folder_with_or_without_a_checkpoint(job, tmp_path):
    config = job("checkpoint.resume=auto", "run.name=mine")
    assert choose_run_folder(config).checkpoint.resume == ""
    assert choose_run_folder(config).checkpoint.resume == ""
    checkpoint(tmp_path / "runs" / "mine")
    assert choose_run_folder(config).checkpoint.resume == "auto"


def test_a_folder_in_which_no_run_has_begun_is_removed_and_its_logs_are_kept_elsewhere(job, tmp_path):
    folder = run_folder(choose_run_folder(job("run.name=mine")))
    (folder / "ranks").mkdir()
    (folder / "ranks" / "report.txt").write_text("refused")
    logs = discard(folder)
    assert (logs / "report.txt").read_text() == "refused"
    shutil.rmtree(logs.parent)
    assert not folder.exists()
    begun = run_folder(choose_run_folder(job("run.name=mine")))
    (begun / "job.json").touch()
    assert discard(begun) is None
    assert begun.exists()


def test_resume_of_a_run_folder_goes_on_in_it(job, tmp_path):
    checkpoint(tmp_path / "elsewhere" / "old")
    chosen = choose_run_folder(job(f"checkpoint.resume={tmp_path}/elsewhere/old"))
    assert run_folder(chosen) == tmp_path / "elsewhere" / "old"
    assert chosen.checkpoint.resume == "auto"


def test_resume_of_one_checkpoint_goes_on_in_a_new_folder(job, tmp_path):
    checkpoint(tmp_path / "old", step=40)
    one = tmp_path / "old" / "step-00000040"
    chosen = choose_run_folder(job(f"checkpoint.resume={one}"))
    assert chosen.run.name == "work-001"
    assert chosen.checkpoint.resume == str(one)


@pytest.mark.parametrize("resume", ["auto", "old", "old/step-00000040"])
@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["training.clip_norm=0.1"], "training.clip_norm 0.1 (was not set)"),
        (
            ["optimizer.lr=0.3", "run.threads=2"],
            "optimizer.lr 0.3 (was 0.1), run.threads 2 (was 1)",
        ),
        (["training.epochs=7"], "training.epochs 7 (was 3)"),
        (["training.epochs=7", "schedule.kind=constant"], 'schedule.kind "constant" (was "cosine")'),
        (["data.workers=3", "run.devices=cpu:3", "log.every=2", "checkpoint.keep=2"], ""),
    ],
)
def test_settings_that_a_resumed_run_had_not_before_are_named(job, tmp_path, capsys, resume, options, said):
    """A job resumed with another loss, clipping or schedule ended as if nothing were amiss."""
    own = ["training.epochs=3", "schedule.kind=cosine"]
    start = Start(step=0, strategy="ddp", shares=[], level="A", device="cpu", context={}, job=job(*own))
    checkpoint(tmp_path / "runs" / "old", step=40)
    (tmp_path / "runs" / "old" / FILE).write_text(with_start([], start))
    place = resume if resume == "auto" else tmp_path / "runs" / resume
    name = "new" if "/" in resume else "old"
    choose_run_folder(job(*own, *options, f"run.name={name}", f"checkpoint.resume={place}"))
    found = capsys.readouterr().err
    assert (f"lockstep: the run goes on with other settings than before: {said}. Its" in found) if said else not found


@pytest.mark.fault("M8")
def test_a_directory_that_is_a_file_is_a_config_error(job, tmp_path):
    (tmp_path / "runs").write_text("")
    with pytest.raises(ConfigError, match=r"runs"):
        choose_run_folder(job())


@pytest.mark.fault("M8")
@pytest.mark.parametrize("name", ["", "run.name=mine"])
def test_a_place_where_nothing_can_be_made_is_a_config_error(job, name):
    """The kernel refuses new folders there whoever asks, as on a disk that is mounted to be read only."""
    with pytest.raises(ConfigError, match=r"No run folder can be made in '/proc/runs': .+\. Set run.directory"):
        choose_run_folder(job("run.directory=/proc/runs", *filter(None, [name])))


@pytest.mark.fault("M8")
def test_a_folder_in_use_is_refused_and_free_again_when_its_process_ended(tmp_path):
    code = (
        "import sys; from pathlib import Path; from lockstep.job.run_folder import locked\n"
        "with locked(Path(sys.argv[1])): print('held', flush=True); sys.stdin.read()"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(ConfigError, match="still going on"), locked(tmp_path):
            pass
        holder.kill()
        holder.wait()
    with locked(tmp_path):
        pass
