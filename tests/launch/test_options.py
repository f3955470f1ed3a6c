import errno
import socket

import pytest

from lockstep.core.world import World
from lockstep.errors import ConfigError
from lockstep.launch import options
from lockstep.launch.options import (
    LaunchOptions,
    parse_devices,
    rank_environment,
    single_host_layout,
    visible_gpus,
    world_environment,
)

FOUR = ("0", "1", "2", "3")


@pytest.mark.parametrize(
    ("text", "gpus", "kind", "names"),
    [
        ("2", FOUR, "cuda", ("0", "1")),
        (2, (), "cpu", ("cpu", "cpu")),
        ("auto", FOUR, "cuda", FOUR),
        ("auto", (), "cpu", ("cpu",) * 6),
        ("0,3", FOUR, "cuda", ("0", "3")),
        ("3,", FOUR, "cuda", ("3",)),
        ("1,0", ("GPU-aa", "GPU-bb"), "cuda", ("GPU-bb", "GPU-aa")),
        ("cpu", FOUR, "cpu", ("cpu",) * 6),
        ("cpu:3", FOUR, "cpu", ("cpu",) * 3),
    ],
)
def test_each_spelling_chooses_its_devices(text, gpus, kind, names):
    chosen = parse_devices(text, gpus=gpus, cores=6)
    assert (chosen.kind, chosen.names, chosen.count) == (kind, names, len(names))


def test_auto_takes_no_more_cpu_ranks_than_the_default_recipe_has_micro_batches():
    assert parse_devices("auto", gpus=(), cores=64).count == 8


def test_ranks_see_their_gpus_renumbered_and_cpu_ranks_see_none():
    assert parse_devices("0,2", gpus=("4", "5", "7")).visible == "4,7"
    assert parse_devices("cpu:2", gpus=FOUR).visible == ""


@pytest.mark.parametrize(
    ("text", "gpus", "message"),
    [
        (
            "5",
            FOUR,
            r"devices=5 was asked for and 4 GPUs are visible \(0, 1, 2, 3\)\. Use devices=4, or devices=cpu:5",
        ),
        ("0,4", FOUR, "there is no index 4"),
        ("0,1", (), "no GPU is visible"),
        ("0", FOUR, "at least 1 process"),
        ("cpu:0", (), "at least 1 process"),
        ("-1", FOUR, "should be a number, 'auto', 'cpu', 'cpu:N'"),
        ("gpu", FOUR, "should be a number, 'auto', 'cpu', 'cpu:N'"),
    ],
)
def test_what_cannot_be_had_is_refused_with_what_there_is(text, gpus, message):
    with pytest.raises(ConfigError, match=message):
        parse_devices(text, gpus=gpus, cores=6)


@pytest.mark.parametrize(
    ("setting", "visible"),
    [("", ()), ("-1", ()), ("2,5", ("2", "5")), ("GPU-1a, MIG-2b", ("GPU-1a", "MIG-2b")), ("1,-1,0", ("1",))],
)
def test_cuda_visible_devices_is_respected(setting, visible, monkeypatch):
    monkeypatch.setattr(options, "_torch_is_cpu_build", lambda: False)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": setting}) == visible


def test_without_the_variable_the_device_nodes_are_counted(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "_torch_is_cpu_build", lambda: False)
    for name in ("nvidia0", "nvidia1", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert visible_gpus({}, tmp_path) == ("0", "1")


def test_the_windows_subsystem_for_linux_lists_its_gpus(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "_torch_is_cpu_build", lambda: False)
    (tmp_path / "dxg").touch()
    assert visible_gpus({"PATH": str(tmp_path)}, tmp_path) == ()
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA (UUID: GPU-1)'\necho 'GPU 1: NVIDIA (UUID: GPU-2)'\n")
    program.chmod(0o755)
    assert visible_gpus({"PATH": f"{tmp_path}:/bin"}, tmp_path) == ("0", "1")


def test_of_mig_instances_one_is_visible(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "_torch_is_cpu_build", lambda: False)
    for name in ("nvidia0", "nvidia1"):
        (tmp_path / name).touch()
    (tmp_path / "driver/capabilities/gpu0/mig/gi1").mkdir(parents=True)
    assert visible_gpus({}, tmp_path, tmp_path / "driver") == ("0",)
    assert visible_gpus({"CUDA_VISIBLE_DEVICES": "MIG-1a,MIG-2b"}) == ("MIG-1a",)
    with pytest.raises(ConfigError, match=r"1 GPU is visible .MIG-1a; of MIG instances a process sees one\)"):
        parse_devices("2", gpus=("MIG-1a",))


def test_a_gpu_that_is_named_twice_is_shown_once_and_given_to_two_ranks():
    devices = parse_devices("2,0,2", gpus=FOUR)
    assert (devices.count, devices.visible, devices.shared) == (3, "2,0", "0,1,0")
    assert parse_devices("2,0", gpus=FOUR).shared == ""


def test_a_cpu_build_of_torch_sees_no_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(options, "_torch_is_cpu_build", lambda: True)
    (tmp_path / "nvidia0").touch()
    assert visible_gpus({}, tmp_path) == ()


def test_sets_of_texts_have_one_order_in_all_runs_unless_the_user_wants_another(tmp_path):
    """A script that numbers its classes by a set had other bits in every run, and nothing was said."""
    wanted = LaunchOptions(devices=parse_devices("cpu:1"))
    layout = single_host_layout(wanted)
    assert world_environment(wanted, layout, tmp_path, {})["PYTHONHASHSEED"] == "0"
    given = {"PYTHONHASHSEED": "random"}
    assert world_environment(wanted, layout, tmp_path, given)["PYTHONHASHSEED"] == "random"


def test_a_host_without_an_address_of_loopback_is_told_so(tmp_path, monkeypatch):
    def refused(*_):
        raise OSError(errno.EADDRNOTAVAIL, "attempting to bind")

    monkeypatch.setattr(socket, "create_server", refused)
    wanted = LaunchOptions(devices=parse_devices("cpu:2"))
    with pytest.raises(ConfigError, match=r"Cannot assign requested address\. Give the loopback interface"):
        world_environment(wanted, single_host_layout(wanted), tmp_path, {})


def test_a_script_finds_the_variables_of_torchrun_on_any_number_of_processes(tmp_path):
    wanted = LaunchOptions(devices=parse_devices("cpu:1"))
    layout = single_host_layout(wanted)
    found = world_environment(wanted, layout, tmp_path, {"MASTER_ADDR": "10.0.0.9", "MASTER_PORT": "5"})
    found |= rank_environment(0, layout)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR")
    assert [found[name] for name in names] == ["0", "0", "1", "1", "0", "127.0.0.1"]
    assert 0 < int(found["MASTER_PORT"]) != 5
    assert World.from_environment(found).rendezvous == f"file://{tmp_path}/rendezvous"
