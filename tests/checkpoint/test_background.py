"""Checkpoints written on a thread while the state they were taken from goes on changing."""

import subprocess
import sys
import threading

import pytest
import torch
from tests.checkpoint.full_disk import largest_file

from lockstep.checkpoint import (
    BackgroundWriter,
    CheckpointState,
    committed,
    prepare,
    read,
    read_newest,
    writer,
)
from lockstep.checkpoint.background import snapshot
from lockstep.errors import CheckpointError, ConfigError
from lockstep.runtime.stop_signals import CriticalThread, Ended, wait_for_critical_threads


def write(background, directory, state, **options):
    return background.write(prepare(directory, state, **options))


@pytest.fixture
def slow_disk(monkeypatch):
    """A disk that writes nothing durably until it is told to, and says when somebody waits for it."""
    go_on, asked, durable = threading.Event(), threading.Event(), writer.make_durable

    def make_durable(path):
        asked.set()
        assert go_on.wait(30)
        durable(path)

    monkeypatch.setattr(writer, "make_durable", make_durable)
    yield asked, go_on
    go_on.set()
    wait_for_critical_threads()


def test_what_is_written_is_the_state_at_the_save_and_not_a_later_one(tmp_path, state_of, shown, slow_disk):
    asked, go_on = slow_disk
    background, state = BackgroundWriter(), state_of(4)
    path = write(background, tmp_path, state, step=4)
    for tensor in (*state.model.values(), *state.optimizer.values()):
        tensor.fill_(-1)
    state.progress["step"] = -1
    assert asked.wait(30)
    assert (path.name, path.exists(), background.busy) == ("step-00000004", False, True)
    go_on.set()
    background.finish()
    assert shown(read(path)) == 4


def test_a_check_never_waits(tmp_path, state_of, slow_disk):
    background = BackgroundWriter()
    write(background, tmp_path, state_of(1), step=1)
    background.check()
    assert background.busy
    slow_disk[1].set()
    background.finish()


def test_the_next_save_waits_for_the_one_on_its_way(tmp_path, state_of, slow_disk):
    asked, go_on = slow_disk
    background = BackgroundWriter()
    write(background, tmp_path, state_of(1), step=1)
    assert asked.wait(30)
    second = threading.Thread(target=write, args=(background, tmp_path, state_of(2)), kwargs={"step": 2})
    second.start()
    second.join(0.2)
    assert second.is_alive()
    assert [path.name.split(".")[1] for path in tmp_path.iterdir()] == ["step-00000001"]
    go_on.set()
    second.join(30)
    background.finish()
    assert [path.name for path in committed(tmp_path)] == ["step-00000001", "step-00000002"]


def test_readers_of_the_same_process_wait_for_it(tmp_path, state_of, shown):
    background = BackgroundWriter()
    for step in (1, 2, 3):
        write(background, tmp_path, state_of(step), step=step)
        assert read_newest(tmp_path).path.name == f"step-0000000{step}"
    assert shown(read_newest(tmp_path).state) == 3


@pytest.mark.fault("K2")
def test_a_disk_that_fills_up_meanwhile_is_one_sentence_once_and_leaves_the_former_whole(tmp_path, state_of, shown):
    background = BackgroundWriter()
    write(background, tmp_path, state_of(1), step=1)
    background.finish()
    with largest_file(1 << 10):
        write(background, tmp_path, state_of(2, 5000), step=2)
        wait_for_critical_threads()
    with pytest.raises(CheckpointError, match=r"step 2 could not be written to .*make room") as failure:
        background.check()
    assert "\n" not in str(failure.value)
    background.check()
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    write(background, tmp_path, state_of(3), step=3)
    background.finish()
    assert shown(read_newest(tmp_path).state) == 3


def test_what_cannot_be_written_at_all_is_refused_at_once(tmp_path, state_of):
    background, state = BackgroundWriter(), state_of(1)
    state.progress["function"] = print
    with pytest.raises(ConfigError, match="a checkpoint cannot hold"):
        write(background, tmp_path / "run", state, step=1)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="could not be written"):
        write(background, tmp_path / "file", state_of(1), step=1)
    assert not background.busy


@pytest.mark.fault("K3")
def test_old_ones_go_and_the_one_before_a_broken_newest_is_found(tmp_path, state_of, shown, caplog):
    background = BackgroundWriter()
    for step in range(1, 6):
        write(background, tmp_path, state_of(step), step=step, keep=2)
    background.finish()
    assert [path.name for path in committed(tmp_path)] == ["step-00000004", "step-00000005"]
    weights = tmp_path / "step-00000005" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    assert shown(read_newest(tmp_path).state) == 4
    assert "Checkpoint skipped" in caplog.text


def test_a_program_that_ends_without_a_last_look_does_not_seem_to_have_saved(tmp_path):
    code = """if True:
        import resource, sys, torch
        from lockstep.checkpoint import BackgroundWriter, CheckpointState, prepare
        resource.setrlimit(resource.RLIMIT_FSIZE, (1024, 1024))
        state = CheckpointState({"w": torch.zeros(5000)}, {}, {})
        BackgroundWriter().write(prepare(sys.argv[1], state, step=7))
    """
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 3
    assert done.stderr.startswith("lockstep: The checkpoint of step 7 could not be written")
    assert list(tmp_path.iterdir()) == []


def test_a_snapshot_shares_no_memory_and_keeps_values_types_and_shapes():
    base = torch.arange(12.0).reshape(3, 4)
    state = CheckpointState({"a": base, "b": base.t(), "c": base[1:, ::2].to(torch.bfloat16)}, {}, {})
    wanted = {name: tensor.clone() for name, tensor in state.model.items()}
    copied, _ = snapshot(state)
    base.zero_()
    for name, tensor in copied.model.items():
        assert (tensor.dtype, tensor.is_contiguous()) == (wanted[name].dtype, True)
        assert torch.equal(tensor, wanted[name])


@pytest.mark.gpus(1)
def test_a_snapshot_of_a_gpu_holds_what_was_there_before_the_next_update(tmp_path, shown, state_of):
    state = state_of(6, 1 << 22)
    tensors = {name: tensor.cuda() for name, tensor in state.model.items()}
    moved = type(state)(tensors, {k: t.cuda() for k, t in state.optimizer.items()}, state.progress)
    taken, events = snapshot(moved)
    for tensor in (*moved.model.values(), *moved.optimizer.values()):
        tensor.zero_()
    assert all(tensor.is_pinned() for tensor in taken.model.values())
    for event in events:
        event.synchronize()
    assert shown(taken) == 6


def test_a_rank_that_fails_waits_for_a_moment_though_it_is_told_to_end():
    release, waited = threading.Event(), []

    class Writing(CriticalThread):
        def run(self):
            release.wait(30)

    class Interrupted(Writing):
        """The first wait for it is cut short, as a signal handler of the rank would."""

        def join(self, timeout=None):
            waited.append(timeout)
            if len(waited) == 1:
                raise Ended
            super().join(timeout)

    thread = Interrupted()
    thread.start()
    wait_for_critical_threads(0.05)
    assert thread.is_alive()
    assert len(waited) >= 2
    release.set()
    wait_for_critical_threads(30)
    assert not thread.is_alive()
