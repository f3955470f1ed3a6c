"""Saving in the background changes no bit of the run or of its checkpoints, and a failure is not overlooked."""

import json
import logging
import os
import re
import resource

import pytest
import torch
from safetensors.torch import load_file
from tests.ranks import run_ranks
from tests.run.jobs import begin, dataset, network, train_step

from lockstep.checkpoint import committed, read, read_newest
from lockstep.core.atomic import sole_use
from lockstep.core.world import World
from lockstep.errors import CheckpointError
from lockstep.run import Run, RunOptions

EPOCHS = 2


def train(folder, **options):
    """Saves after every step; returns the fingerprint at the end."""
    run, _, optimizer = begin(make_optimizer=torch.optim.AdamW, lr=0.01, directory=folder, keep=None, **options)
    for _ in run.epochs(EPOCHS):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
            run.save()
    return run.fingerprint()


def train_all(world, folder, jobs):
    return [train(folder / name, **options) for name, options in jobs.items()]


def contents(folder):
    """The entries on files in the manifest of each checkpoint."""
    return {path.name: json.loads((path / "manifest.json").read_text())["body"]["files"] for path in committed(folder)}


@pytest.mark.slow
def test_checkpoints_written_in_the_background_have_the_bytes_of_those_that_training_waited_for(tmp_path):
    jobs = {
        f"{strategy} {background}": {"strategy": strategy, "save_in_background": background}
        for strategy in ("ddp", "parameter_server")
        for background in (True, False)
    }
    fingerprints = run_ranks(train_all, 2, tmp_path, jobs)[0]
    found = [contents(tmp_path / name) for name in jobs]
    assert len(set(fingerprints)) == 1
    assert len(found[0]) == 6
    assert all(each == found[0] for each in found[1:])


SHARDED = {
    "fsdp": {"strategy": "fsdp"},
    "hybrid": {"strategy": "hybrid", "mesh": "fsdp=2,pipeline=2"},
}
MORE_SHARDED = {
    "fsdp, waited for": {"strategy": "fsdp", "save_in_background": False},
    "pipeline": {"strategy": "pipeline"},
}


@pytest.mark.parametrize(
    "sharded",
    [SHARDED, pytest.param(SHARDED | MORE_SHARDED, marks=pytest.mark.slow)],
    ids=["some", "all"],
)
def test_ranks_that_hold_rows_write_them_themselves_and_the_whole_is_the_same(sharded, tmp_path):
    """Also in the background; a pipeline's stages, and a pipeline of sharded stages, likewise."""
    settings = {"ddp": {"strategy": "ddp"}, **sharded}
    run_ranks(train_all, 4, tmp_path, settings)
    for name in sharded.keys() & {"fsdp, waited for"}:
        assert contents(tmp_path / "fsdp") == contents(tmp_path / name)
    for name in settings:
        paths = committed(tmp_path / name)
        assert len(paths) == 6
        for path, expected in zip(paths, committed(tmp_path / "ddp")):
            assert len(list(path.glob("model*"))) == (1 if name == "ddp" else 4)
            require_equal(read(path), read(expected), name)
    fsdp = committed(tmp_path / "fsdp")[0]
    rows = [load_file(path)["0.weight"].shape[0] for path in sorted(fsdp.glob("model*"))]
    assert rows == [2, 2, 2, 2]


def require_equal(found, wanted, name):
    for one, other in ((found.model, wanted.model), (found.optimizer, wanted.optimizer)):
        assert one.keys() == other.keys()
        different = [key for key in one if not torch.equal(one[key], other[key])]
        assert not different, f"{name}: {different}"
    assert found.optimizer_records == wanted.optimizer_records
    assert found.progress["position"] == wanted.progress["position"]
    assert found.progress["fingerprint"] == wanted.progress["fingerprint"]


def train_apart(world, folder):
    """The run folder is a relative path, and the processes have no common working directory, as on two hosts."""
    own = folder / f"host{world.rank}"
    own.mkdir()
    os.chdir(own)
    said = []
    monitor = logging.Handler()
    monitor.emit = lambda record: said.append(record.getMessage())
    logging.getLogger("lockstep").addHandler(monitor)
    run, _, optimizer = begin(strategy="fsdp", directory="run")
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
        run.save()
    run.close()
    return said


def test_without_a_common_folder_rank_0_writes_for_all_and_says_so(tmp_path):
    said = run_ranks(train_apart, 2, tmp_path)
    names = [sorted(path.name for path in own.glob("run/**/*.safetensors")) for own in hosts(tmp_path)]
    assert names == [3 * ["model.safetensors"] + 3 * ["optimizer.safetensors"], []]
    assert all(read(path).model for path in committed(tmp_path / "host0" / "run"))
    warned = [sum("The hosts do not share the folder" in text for text in each) for each in said]
    assert warned == [1, 0]


def hosts(folder):
    return [folder / f"host{rank}" for rank in range(2)]


@pytest.mark.fault("K2")
def test_a_failed_save_ends_the_run_after_the_next_step(tmp_path):
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    run, _, optimizer = begin(directory=tmp_path)
    steps = []
    with pytest.raises(CheckpointError, match=r"step 1 could not be written to .*; make room"):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
            steps.append(batch.plan.step)
            if batch.plan.step == 0:
                resource.setrlimit(resource.RLIMIT_FSIZE, (64, before[1]))
                try:
                    run.save()
                    run._writer.background._thread.join()
                finally:
                    resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert steps == [0]
    assert [path.name for path in tmp_path.iterdir()] == ["writer.lock"]
    run.close()


def test_a_folder_that_another_process_writes_to_is_refused_until_that_has_ended(tmp_path):
    run, _, optimizer = begin(directory=tmp_path)
    with sole_use(tmp_path / "writer.lock"):
        train_step(run, next(iter(run.batches(dataset()))), optimizer)
        with pytest.raises(CheckpointError, match=r"Another run writes its checkpoints to .* still going on"):
            run.save()
        assert committed(tmp_path) == []
    run.save()
    with pytest.raises(BlockingIOError), sole_use(tmp_path / "writer.lock"):
        pass
    run.close()
    with sole_use(tmp_path / "writer.lock"):
        pass


def test_a_run_whose_folder_was_moved_away_says_so_and_keeps_others_out_of_the_new_one(tmp_path, caplog):
    """It kept the lock of the file that had gone with the folder, and a second run was let in."""
    run, _, optimizer = begin(directory=tmp_path / "run")
    batches = iter(run.batches(dataset()))
    for step in range(3):
        train_step(run, next(batches), optimizer)
        run.save(wait=True)
        assert caplog.text.count("its whole folder was removed or moved") == (step > 0)
        if step == 0:
            (tmp_path / "run").rename(tmp_path / "moved")
    with pytest.raises(BlockingIOError), sole_use(tmp_path / "run" / "writer.lock"):
        pass
    with sole_use(tmp_path / "moved" / "writer.lock"):
        assert [len(committed(tmp_path / name)) for name in ("moved", "run")] == [1, 2]
    run.close()
    with sole_use(tmp_path / "run" / "writer.lock"):
        pass


def until(folder, last, seed, resume=None):
    """Saves after each step up to ``last``; the weights there, and the step with which it began."""
    run, _, optimizer = begin(network(seed), directory=folder, resume=resume)
    first = run.position.step
    for _ in run.epochs(3):
        for batch in run.batches(dataset()):
            train_step(run, batch, optimizer)
            run.save()
            if batch.plan.step + 1 == last:
                return run.fingerprint(), first
    raise AssertionError(f"there is no step {last}")


def test_a_run_that_began_anew_goes_on_from_its_own_checkpoints(tmp_path, caplog):
    """It went on from the last step of the training before, without a step of its own, with exit status 0."""
    whole, _ = until(tmp_path / "whole", 5, 1)
    until(tmp_path / "run", 6, 0)
    caplog.set_level(logging.INFO, "lockstep")
    until(tmp_path / "run", 2, 1)
    assert re.search("holds checkpoints of an earlier training, the last one step-00000006", caplog.text)
    assert until(tmp_path / "run", 5, 1, "auto") == (whole, 2)
    assert read_newest(tmp_path / "run").path.name == "step-00000005-2"


def test_a_resumed_run_without_a_step_left_says_so(tmp_path, caplog):
    """It ended with the weights of the run before: a script whose code has changed trained nothing, without a word."""
    caplog.set_level(logging.INFO, "lockstep")
    for resume in (None, "auto"):
        assert "has no step left" not in caplog.text
        run, _, optimizer = begin(directory=tmp_path, resume=resume)
        for _ in run.epochs(2):
            for batch in run.batches(dataset()):
                train_step(run, batch, optimizer)
            run.save(wait=True)
    assert "run.epochs(2) has no step left: the run that was resumed has done 2 epochs." in caplog.text


@pytest.mark.parametrize(("folders", "is_told"), [(("run", "run"), True), (("first", "second"), False)])
def test_a_run_that_goes_on_from_an_earlier_one_of_its_program_says_so(folders, is_told, tmp_path, caplog):
    """All parts of a cross-validation ended with the weights of the first one."""
    for folder in folders:
        run, _, optimizer = begin(directory=tmp_path / folder, resume="auto")
        with run:
            for _ in run.epochs(1):
                for batch in run.batches(dataset()):
                    train_step(run, batch, optimizer)
                run.save(wait=True)
    assert ("was written by an earlier run of this program" in caplog.text) == is_told


def prepared(folder, world, lr=0.1, **options):
    run = Run(RunOptions.of(global_batch=24, directory=folder, **options), world)
    model = network()
    model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=lr))
    return run, optimizer


def some_steps(folder, world, count, **options):
    run, optimizer = prepared(folder, world, **options)
    for batch in run.batches(dataset()):
        train_step(run, batch, optimizer)
        if run.position.step + 1 == count:
            run.save(wait=True)
            return


def test_a_restarted_run_goes_on_from_its_own_checkpoint_and_not_from_that_of_a_former_run(tmp_path):
    """The script says nothing about resuming, and an older run in the folder had come further."""
    some_steps(tmp_path, World(run_id="former"), 3)
    some_steps(tmp_path, World(run_id="this"), 2)
    again, _ = prepared(tmp_path, World(run_id="this", restart=1))
    assert again.position.step == 2
    new, _ = prepared(tmp_path, World(run_id="this"))
    assert new.position.step == 0
    other, _ = prepared(tmp_path, World(run_id="other", restart=1))
    assert other.position.step == 0


def test_a_restarted_run_keeps_its_learning_rate_whatever_the_script_gives(tmp_path, caplog):
    """As a script does that multiplies it by the number of processes, and is restarted on fewer."""
    some_steps(tmp_path, World(run_id="this"), 2)
    with caplog.at_level("WARNING", "lockstep"):
        _, optimizer = prepared(tmp_path, World(run_id="this", restart=1), lr=0.05)
    assert optimizer.param_groups[0]["lr"] == 0.1
    assert "lr of optimizer 0, group 0: 0.1 in the checkpoint's run, 0.05 here" in caplog.text
    assert "goes on with those of the checkpoint" in caplog.text


def test_a_restarted_run_that_began_from_a_checkpoint_begins_there_again_until_it_has_one(tmp_path):
    some_steps(tmp_path / "first", World(run_id="former"), 2)
    start = tmp_path / "first" / "step-00000002"
    assert read(start).progress["run"] == "former"
    again, _ = prepared(tmp_path / "next", World(run_id="this", restart=1), resume=str(start))
    assert again.position.step == 2


def test_what_a_killed_process_left_in_the_folder_goes_when_the_run_is_prepared(tmp_path):
    left = tmp_path / ".step-00000002.0000000000000000-1-1-00000000.partial"
    left.mkdir()
    os.utime(left, (0, 0))
    prepared(tmp_path, World())
    assert list(tmp_path.iterdir()) == []
