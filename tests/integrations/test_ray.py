"""``LockstepTrainer`` on clusters of Ray whose nodes are processes of this machine, in a network of their own."""

import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil
import pytest
from tests.launch.hosts.network import TwoHostNetwork
from tests.launch.hosts.network import missing as no_namespaces
from tests.printed import fingerprint

ray = pytest.importorskip("ray", reason="needs pip install 'ray[train]'")
pytest.importorskip("ray.train", reason="needs pip install 'ray[train]'")

from ray.exceptions import RayError  # noqa: E402  after the skip
from ray.train import FailureConfig, RunConfig, ScalingConfig  # noqa: E402
from ray.train.v2._internal.execution.failure_handling import (  # noqa: E402
    DefaultFailurePolicy,
    FailureDecision,
)
from ray.train.v2.api.exceptions import WorkerGroupError  # noqa: E402

from lockstep.errors import ConfigError  # noqa: E402
from lockstep.integrations.ray import LockstepTrainer, RestartAfterLoss  # noqa: E402

NETWORK = ["unshare", "--net", "bash", "-c", 'ip link set lo up && exec "$@"', "network"]
QUICK = {"RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.5", "RAY_TRAIN_WORKER_GROUP_START_TIMEOUT_S": "10"}


def missing():
    """Why no cluster can be started here; empty if it can."""
    if shutil.which("unshare") is None or shutil.which("ip") is None:
        return "a network for the cluster needs unshare and ip (apt-get install util-linux iproute2)"
    made = subprocess.run([*NETWORK, "true"], capture_output=True, text=True)
    return f"no network can be made for the cluster: {made.stderr.strip()}" if made.returncode else ""


@pytest.fixture
def scenario(tmp_path):
    """The outcome of a scenario of ``tests/integrations/ray_cluster.py``: one object for each run."""
    if reason := missing():
        pytest.skip(reason)

    def run(name, argument, **more):
        words = [*NETWORK, sys.executable, "-m", "tests.integrations.ray_cluster"]
        environment = {**os.environ, **QUICK, "RAY_USAGE_STATS_ENABLED": "0", **more}
        done = subprocess.run(
            [*words, name, str(tmp_path), str(argument)], capture_output=True, text=True, env=environment
        )
        lines = done.stdout.splitlines()
        found = [json.loads(line.removeprefix("FOUND ")) for line in lines if line.startswith("FOUND ")]
        assert done.returncode == 0 and found, done.stdout[-4000:] + done.stderr[-4000:]
        return found

    return run


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The fingerprint of digits after some epochs on one process, without Ray."""

    def trained(epochs):
        folder = tmp_path_factory.mktemp("alone")
        words = ["digits", "--epochs", str(epochs), "--devices", "cpu:1"]
        settings = ["log.progress=false", f"run.directory={folder}", "run.name=one"]
        sets = [word for setting in settings for word in ("--set", setting)]
        subprocess.run([sys.executable, "-m", "lockstep", "train", *words, *sets], check=True)
        return json.loads((folder / "one" / "outcome.json").read_text())["fingerprint"]

    return trained


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_job_on_three_workers_has_the_fingerprint_of_one_process(scenario, alone, tmp_path):
    (found,) = scenario("fixed", 3)
    assert found["value"]["fingerprint"] == alone(2), found["error"]
    assert found["starts"] == [[0, 3]], "three ranks have trained"
    assert found["metrics"]["step"] == 24 and found["metrics"]["validation_accuracy"] > 0.9
    assert (tmp_path / "run" / "model.safetensors").exists(), "it is an ordinary run folder"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_command_trains_on_a_cluster_of_its_own_and_the_run_folder_is_an_ordinary_one(alone, tmp_path):
    if reason := missing():
        pytest.skip(reason)
    words = [*NETWORK, sys.executable, "-m", "lockstep", "train", "digits", "--epochs", "2", "--ray"]
    options = ["--devices", "1-2", "--set", f"run.directory={tmp_path}", "--set", "log.progress=false"]
    done = subprocess.run([*words, *options], capture_output=True, text=True, env={**os.environ, **QUICK})
    assert done.returncode == 0, done.stderr[-4000:]
    assert fingerprint(done.stdout) == alone(2)
    replay = [sys.executable, "-m", "lockstep", "replay", f"{tmp_path}/digits-001", "--step", "12"]
    done = subprocess.run(replay, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "matches: the gradient has the bits that were recorded" in done.stdout


@pytest.fixture
def two_nodes(tmp_path):
    """A cluster of two nodes with networks of their own; gives the words a command on the first begins with."""
    if reason := no_namespaces():
        pytest.skip(reason)
    environment = {**os.environ, **QUICK, "RAY_USAGE_STATS_ENABLED": "0", "OF_TEST": str(tmp_path)}
    places = (["--head", "--port=6379", "--include-dashboard=false"], ["--address=10.77.0.1:6379"])
    environment |= {
        "RAY_TMPDIR": str(tmp_path),
        "RAY_AUTH_MODE": "disabled",
    }  # nobody else is in that network
    ray_command = str(Path(sys.executable).with_name("ray"))
    with TwoHostNetwork(tmp_path) as network, ExitStack() as stack:
        stack.callback(end_all, str(tmp_path))
        for prefix, address, place in zip(network.prefixes, network.addresses, places, strict=True):
            words = [ray_command, "start", "--num-cpus=1", f"--node-ip-address={address}", *place]
            subprocess.run([*prefix, *words], env=environment, check=True)
        yield network, environment


def end_all(mark):
    """Kills the processes of a cluster: those whose environment has the mark."""
    for process in psutil.process_iter():
        with suppress(psutil.Error):
            if process.environ().get("OF_TEST") == mark:
                process.kill()
                process.wait(10)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_workers_on_two_hosts_have_the_fingerprint_of_one_process(two_nodes, alone, tmp_path):
    network, environment = two_nodes
    words = [sys.executable, "-m", "lockstep", "train", "digits", "--epochs", "2", "--ray", "10.77.0.1:6379"]
    options = ["--devices", "2", "--set", f"run.directory={tmp_path}/runs", "--set", "log.progress=false"]
    command = [*network.prefixes[0], *words, *options]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    assert fingerprint(done.stdout) == alone(2)
    assert min(network.bytes_sent()) > 1e6, "gradients go over the cable"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_function_has_one_fingerprint_on_one_and_three_workers(scenario):
    first, third = (scenario("function", workers)[0] for workers in (1, 3))
    assert first["value"] and first["value"] == third["value"], first["error"] or third["error"]
    assert third["metrics"] == {"step": 24, "epoch": 1}, "that of the last run.save"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_storage_that_is_uploaded_to_is_resumed_from(scenario, alone, tmp_path):
    first, second = scenario("remote", 2)
    assert second["value"]["fingerprint"] == alone(2), second["error"]
    assert first["value"]["fingerprint"] != second["value"]["fingerprint"]
    assert (tmp_path / "run" / "model.safetensors").exists(), "weights and logs are uploaded, too"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_mistake_of_the_program_is_named_and_not_repeated(scenario):
    (found,) = scenario("failure", "fail")
    kind, said = found["error"]
    assert kind == "RankError"
    assert said.startswith("rank 1 failed first, step 5, update, samples ")
    assert "ray_worker.py" not in said and "ValueError: a mistake of the program" in said


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_worker_that_hangs_is_named_with_its_line(scenario):
    (found,) = scenario("failure", "hang")
    kind, said = found["error"]
    assert kind == "StallError"
    assert "the others wait for rank 1, which is in step 5, update" in said and "`time.sleep(1)`" in said


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_node_that_is_drained_is_left_with_a_checkpoint(scenario, alone):
    (found,) = scenario("drained", "")
    assert found["value"]["fingerprint"] == alone(8), found["error"]
    (_, first), (step, second) = found["starts"]
    assert (first, second) == (3, 2)
    assert step >= 10, "it resumed where it stood"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_workers_that_come_and_go_leave_no_trace(scenario, alone):
    """``python -m tests.integrations.ray_cluster schedules FOLDER 0:20`` runs twenty of these."""
    (found,) = scenario("schedules", f"{int(time.time()) % 1000}:1")
    assert found["changes"], found
    assert found["value"]["fingerprint"] == alone(8), found


def test_a_job_that_cannot_be_shared_by_so_many_workers_is_refused():
    with pytest.raises(ConfigError, match="micro_batches=8"):
        LockstepTrainer("digits", scaling_config=ScalingConfig(num_workers=(1, 9)))
    with pytest.raises(ConfigError, match=r"training\.epoch"):
        LockstepTrainer("digits", settings=["training.epoch=3"])


def test_workers_of_a_portable_job_have_its_variables_before_torch():
    given = RunConfig(worker_runtime_env={"env_vars": {"OWN": "1"}})
    trainer = LockstepTrainer("digits", run_config=given)
    variables = trainer.run_config.worker_runtime_env["env_vars"]
    assert variables["OWN"] == "1" and variables["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    trainer = LockstepTrainer(print, portable=True, run_config=RunConfig())
    assert "ONEDNN_MAX_CPU_ISA" in trainer.run_config.worker_runtime_env["env_vars"]
    assert not LockstepTrainer(print, run_config=RunConfig()).run_config.worker_runtime_env


def test_a_range_of_workers_restarts_after_losses_without_limit():
    elastic = LockstepTrainer("digits", scaling_config=ScalingConfig(num_workers=(1, 4)))
    assert elastic.run_config.failure_config.max_failures == -1
    limited = RunConfig(failure_config=FailureConfig(max_failures=2))
    trainer = LockstepTrainer("digits", scaling_config=ScalingConfig(num_workers=(1, 4)), run_config=limited)
    assert trainer.run_config.failure_config.max_failures == 2
    assert LockstepTrainer("digits").run_config.failure_config.max_failures == 0


def record(**more):
    """The error record of a worker."""
    known = {"host": "a", "pid": 7, "phase": "forward", "epoch": 0, "step": 3, "samples": [1], "exit_code": 4}
    shown = {"traceback": "...", "shown": "...", "on_purpose": False, "time": 1.0}
    return {**known, **shown, "rank": 0, "kind": "ValueError", "message": "wrong", **more}


@pytest.mark.parametrize(
    ("failures", "decision"),
    [
        ({1: record()}, FailureDecision.RAISE),
        ({1: None}, FailureDecision.RETRY),
        (
            {0: record(kind="RuntimeError", message="Connection reset by peer"), 1: None},
            FailureDecision.RETRY,
        ),
        ({0: "stopped", 1: "stopped"}, FailureDecision.RETRY),
        ({0: record(), 1: None}, FailureDecision.RAISE),
    ],
)
def test_only_what_may_not_happen_again_restarts_the_workers(failures, decision):
    from lockstep.integrations.ray_worker import WorkerFailure

    def error(found):
        if found is None:
            return RayError("The actor died.")
        return WorkerFailure(None, 75) if found == "stopped" else WorkerFailure(found)

    limits = FailureConfig(max_failures=-1)
    policy = RestartAfterLoss(DefaultFailurePolicy(limits), limits)
    found = {rank: error(each) for rank, each in failures.items()}
    assert policy.make_decision(WorkerGroupError("", found)) is decision
