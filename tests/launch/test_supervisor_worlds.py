"""Worlds under the launcher: plain scripts, torch's own rendezvous, many runs at once, a world of torchrun."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.launch.command import COMMAND, LOOP, Command
from tests.launch.listening import listening_addresses

PLAIN = """
import os, sys
import torch, torch.distributed as dist
for _ in range(2):  # torchrun's store does not take a second group
    if dist.is_initialized():
        dist.destroy_process_group()
    dist.init_process_group()
    value = torch.ones(1)
    dist.all_reduce(value)
print("sum", int(value), "rank", os.environ["RANK"], flush=True)
"""

WORKERS = """
import sys, torch
from torch.utils.data import DataLoader

class Squares:
    def __len__(self):
        return 6
    def __getitem__(self, index):
        return Value(index)

class Value:
    def __init__(self, x):
        self.x = x * x

def collect(values):
    return [value.x for value in values]

if __name__ == "__main__":
    for method in ("fork", "spawn"):
        loader = DataLoader(Squares(), num_workers=1, collate_fn=collect, multiprocessing_context=method)
        print(method, [x for values in loader for x in values])
    print(__name__, sys.argv[1:], __file__ == sys.argv[0])
"""


@pytest.mark.fault("P16", "S2", "S3")
def test_a_plain_torch_script_meets_twice_without_an_address_and_may_forget_to_destroy(command):
    script = command.folder / "plain.py"
    script.write_text(PLAIN)
    code, lines = command.start(script, options=["--logs", command.folder / "logs"]).end()
    assert (code, lines) == (0, [])
    assert command.stdout == "sum 3 rank 0\n"
    assert (command.folder / "logs" / "rank-002.log").read_text() == "sum 3 rank 2\n"


@pytest.mark.slow
def test_a_script_is_a_real_main_whose_classes_its_loader_workers_can_pickle(command):
    script = command.folder / "workers.py"
    script.write_text(WORKERS)
    code, lines = command.start(script, "--epochs", "3", devices="cpu:1").end()
    assert (code, lines) == (0, [])
    assert command.stdout.splitlines() == [
        "fork [0, 1, 4, 9, 16, 25]",
        "spawn [0, 1, 4, 9, 16, 25]",
        "__main__ ['--epochs', '3'] True",
    ]


@pytest.mark.slow
def test_rank_settings_and_the_process_group_do_not_depend_on_the_number_of_ranks(command):
    """On one process ``init_process_group`` asked for MASTER_ADDR once, so that torchrun's scripts failed there."""
    script = command.folder / "threads.py"
    script.write_text(
        "import os, torch\nfrom lockstep.core.world import World\n"
        "world = World.from_environment()\n"
        "torch.distributed.init_process_group('gloo')\n"
        "assert torch.distributed.get_world_size() == world.world_size\n"
        "print(torch.get_num_threads(), world.launcher, world.local_world_size, os.environ['CUDA_VISIBLE_DEVICES'])\n"
    )
    clean = {"OMP_NUM_THREADS": ""}
    assert command.start(script, devices="cpu:3", environment=clean).end()[0] == 0
    assert command.stdout == "1 lockstep 3 \n"
    assert command.start(script, devices="cpu:1", options=["--threads", "2"]).end()[0] == 0
    assert command.stdout == "2 lockstep 1 \n"


@pytest.mark.fault("X1", "M7")
def test_nothing_listens_off_the_loopback_interface(command):
    command.loop()
    command.wait_for_mark("running", 3)
    listening = [address for process in command.processes() for address in listening_addresses(process)]
    assert listening, "gloo listens somewhere"
    assert set(listening) <= {"127.0.0.1", "::1"}


@pytest.mark.slow
def test_the_launcher_itself_never_imports_torch(command):
    command.loop()
    running = command.wait_for_mark("running", 3)
    assert "libtorch" not in Path(f"/proc/{command.process.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{running[0]}/maps").read_text()


@pytest.mark.slow
@pytest.mark.fault("S3")
def test_eight_runs_at_once_all_succeed(tmp_path):
    start_at_once(8, tmp_path)


@pytest.mark.slow
@pytest.mark.crowd
@pytest.mark.timeout(600)
@pytest.mark.fault("S3")
@pytest.mark.parametrize("batch", range(4))
def test_two_hundred_runs_fifty_at_once_all_succeed(tmp_path, batch):
    start_at_once(50, tmp_path)


def start_at_once(number, folder):
    commands = []
    try:
        for one in range(number):
            (folder / str(one)).mkdir()
            commands.append(Command(folder / str(one)).loop(steps=5, devices="cpu:2"))
        for one in commands:
            assert one.end(timeout=300) == (0, [])
            assert one.stdout == "rank 0 done\n"
    finally:
        for one in commands:
            one.clean_up()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.fault("P16")
def test_a_forgotten_destroy_never_turns_a_good_run_into_a_failure(command):
    script = command.folder / "plain.py"
    script.write_text(PLAIN)
    assert [command.start(script).end() for _ in range(100)] == [(0, [])] * 100


def under_torchrun(*words):
    agent = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node=2",
        "--no-python",
    ]
    done = subprocess.run(
        [*agent, *COMMAND, *map(str, words)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done


ABORTS_LATE = """
import atexit, os, sys

class Group:  # as gloo's may, where it is destroyed after its threads
    def __del__(self):
        os.abort()

sys.kept = Group()
atexit.register(lambda: print(f"rank {os.environ['RANK']} done"))
sys.exit()
"""


@pytest.mark.slow
def test_a_script_under_torchrun_ends_without_the_destructors_that_may_abort_it(tmp_path):
    script = tmp_path / "late.py"
    script.write_text(ABORTS_LATE)
    found = re.findall(r"rank \d done", under_torchrun(script).stdout)
    assert sorted(found) == ["rank 0 done", "rank 1 done"]


def test_a_script_under_torchrun_joins_its_world(tmp_path):
    done = under_torchrun(LOOP, tmp_path, 5)
    # two ranks write into one pipe, so their lines may run into each other
    assert sorted(re.findall(r"rank \d done", done.stdout)) == ["rank 0 done", "rank 1 done"]


REFUSED = """
import sys, torch, lockstep
from torch import nn
from torch.utils.data import TensorDataset

what, strategy = sys.argv[1:]
steps = []

class Layer(nn.Linear):
    def forward(self, x):
        if what == "forward" and len(steps) > 2:
            raise KeyError("mine")
        return object() if what == "stage" else super().forward(x)

def loss_fn(output, target):
    if what == "loss" and len(steps) > 2:
        return output.detach().sum()
    return nn.functional.cross_entropy(output, target)

servers = {"parameter_server": {"servers": 1}} if strategy == "parameter_server" else {}
run = lockstep.init(global_batch=8, micro_batches=4, strategy=strategy, **servers)
model = nn.Sequential(Layer(6, 8), nn.Linear(8, 8), nn.Linear(8, 3))
model, optimizer = run.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
for batch in run.batches(TensorDataset(torch.ones(64, 6), torch.ones(64, dtype=torch.long))):
    run.backward(batch, loss_fn)
    optimizer.step()
    optimizer.zero_grad()
    steps.append(1)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "strategy", "said"),
    [
        ("loss", "pipeline", "ConfigError: The loss has no gradient"),
        ("stage", "pipeline", "ConfigError: The stage that ends with '0' returns object"),
        ("forward", "pipeline", "KeyError: 'mine'"),
        ("forward", "parameter_server", "KeyError: 'mine'"),
    ],
)
def test_an_error_of_one_rank_in_a_step_ends_the_others_under_torchrun(what, strategy, said, tmp_path):
    """They wait for what that rank would have sent; its error is the only one that is printed."""
    (tmp_path / "script.py").write_text(REFUSED)
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=3"]
    done = subprocess.run(
        [*agent, str(tmp_path / "script.py"), what, strategy],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        timeout=120,
        check=False,
    )
    assert done.returncode == 1
    errors = re.findall(r"^\[rank\d\]: (?:lockstep\.errors\.)?(\w+Error: .*)", done.stderr, re.M)
    assert errors and all(error.startswith(said) for error in errors), done.stderr


def test_python_alone_is_a_world_of_one(tmp_path):
    done = subprocess.run(
        [sys.executable, str(LOOP), str(tmp_path), "5"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.returncode, done.stdout) == (0, "rank 0 done\n")
