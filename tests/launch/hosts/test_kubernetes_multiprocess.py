"""The commands and variables of written manifests, run in two network namespaces as two pods would run them."""

import os
import signal
import subprocess

import pytest
from tests.cli.manifests import container, documents, environment
from tests.launch.command import wait_until
from tests.launch.hosts.host import LOCKSTEP, job, on_one_process
from tests.printed import fingerprint

from lockstep.cli import main

EPOCHS = 20  # on a busy machine the probes take seconds, and the job is to be running still


@pytest.fixture
def manifest(capsys, tmp_path, network):
    """The objects of a manifest for two pods, whose shared volume is the test's folder; the pods know their names."""

    def written(*words):
        settings = job(tmp_path, "checkpoint.every_steps=5", epochs=EPOCHS)
        names = ("--image", "any", "--claim", "any", "--mount", str(tmp_path), "--nodes", "2")
        assert main(["kubernetes", *settings, *names, *words]) == 0
        return documents(capsys.readouterr().out)

    before = network.hosts_file.read_text()
    names = [f"{address} digits-{index}.digits" for index, address in enumerate(network.addresses)]
    network.hosts_file.write_text("\n".join([before, *names, ""]))
    yield written
    network.hosts_file.write_text(before)


def begin(hosts, command, variables):
    """Starts the pods: the same command, each with its own variables."""
    for index, host in enumerate(hosts.hosts):
        host.begin_command(command[1:], variables(index))


def probe(host):
    """The answer of the probe of a pod; a pod sees no run of another one."""
    alone = ["bash", "-c", 'mount -t tmpfs none /dev/shm && exec "$@"', "probe"]
    places = {"TMPDIR": str(host.folder / "tmp"), "XDG_RUNTIME_DIR": str(host.folder / "runtime")}
    return subprocess.run(
        [*host.prefix, *alone, *LOCKSTEP, "ps", "--check"],
        env={**os.environ, **places},
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_pods_of_a_written_job_are_preempted_and_resume_to_the_fingerprint_of_one_process(
    wired_hosts, manifest, tmp_path
):
    pod = container(manifest("--kind", "job")["Job"])
    assert pod["startupProbe"]["exec"]["command"] == ["lockstep", "ps", "--check"]

    def variables(index):
        return environment(pod, index, wired_hosts.token.read_text())

    begin(wired_hosts, pod["command"], variables)
    assert probe(wired_hosts[0]).returncode == 1, "nothing has started"
    wait_until(lambda: list(tmp_path.glob("runs/*/step-*/manifest.json")), 60, "a checkpoint")
    assert [probe(host).returncode for host in wired_hosts.hosts] == [0, 0], probe(wired_hosts[1]).stdout
    wired_hosts[1].process.send_signal(signal.SIGTERM)  # as Kubernetes does before it ends a pod
    assert [code for code, _ in wired_hosts.end()] == [75, 75], wired_hosts[0].stderr
    assert "no run of this user" in probe(wired_hosts[0]).stdout
    begin(wired_hosts, pod["command"], variables)
    assert [code for code, _ in wired_hosts.end(90)] == [0, 0], wired_hosts[0].stderr
    assert "Resumed from" in wired_hosts[0].stdout + wired_hosts[0].stderr
    assert fingerprint(wired_hosts[0].stdout) == on_one_process(tmp_path, epochs=EPOCHS)


@pytest.mark.slow
def test_pods_of_a_written_train_job_give_the_fingerprint_of_one_process(wired_hosts, manifest, tmp_path):
    trainer = manifest()["TrainJob"]["spec"]["trainer"]

    def variables(index):
        kubeflow = {"PET_NNODES": "2", "PET_NPROC_PER_NODE": "1", "PET_NODE_RANK": str(index)}
        kubeflow |= {"PET_MASTER_ADDR": "digits-0.digits", "PET_MASTER_PORT": "29400"}
        return kubeflow | environment(trainer, index, wired_hosts.token.read_text())

    begin(wired_hosts, trainer["command"], variables)
    assert [code for code, _ in wired_hosts.end(90)] == [0, 0], wired_hosts[0].stderr
    assert fingerprint(wired_hosts[0].stdout) == on_one_process(tmp_path, epochs=EPOCHS)
