"""``lockstep kubernetes``: the manifest that is written, its fields, and what is refused before."""

import pytest
from tests.cli.manifests import container, documents, environment, unfit

yaml = pytest.importorskip("yaml")

REQUIRED = ("--image", "registry.example/lockstep:1", "--claim", "runs")
PLAIN = ("kubernetes", "digits", "--kind", "job", *REQUIRED)
TWO = ("--nodes", "2", "--tasks-per-node", "2")


def written(command, *words):
    status, output, errors = command(*words)
    assert (status, errors) == (0, "")
    return documents(output)


def test_a_plain_job_has_a_pod_for_each_host_and_a_service_by_which_they_meet(command):
    found = written(command, *PLAIN, *TWO, "--threads", "3", "--memory", "4Gi", "--epochs", "2")
    assert list(found) == ["NetworkPolicy", "Service", "Job"]
    job, service = found["Job"]["spec"], found["Service"]["spec"]
    assert (job["completionMode"], job["completions"], job["parallelism"]) == ("Indexed", 2, 2)
    pod = job["template"]["spec"]
    assert pod["subdomain"] == found["Service"]["metadata"]["name"] == "digits"
    assert service["selector"].items() <= job["template"]["metadata"]["labels"].items()
    assert service["clusterIP"] == "None", "a headless Service"
    assert container(found["Job"])["resources"]["limits"] == {"cpu": "6", "memory": "4Gi"}
    assert container(found["Job"])["command"] == [
        *("lockstep", "train", "digits", "--set", "run.grace=110", "--epochs", "2", "--threads", "3"),
        *("--devices", "cpu:2", "--set", "run.directory=/shared/runs", "--set", "run.name=digits"),
        *("--set", "run.restarts=0", "--resume", "auto", "--start-limit", "600"),
    ]
    assert environment(container(found["Job"]), index=1, token="t" * 40) == {
        "PET_NNODES": "2",
        "PET_NODE_RANK": "1",
        "PET_MASTER_ADDR": "digits-0.digits",
        "PET_MASTER_PORT": "29500",
        "LOCKSTEP_TOKEN": "t" * 40,
    }


def test_pods_share_a_volume_and_have_time_to_save(command):
    job = written(command, *PLAIN, *TWO, "--grace-period", "60", "--mount", "/data", "--user", "2000")["Job"]
    pod = job["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"] == {"claimName": "runs"}
    assert container(job)["volumeMounts"][0]["mountPath"] == "/data"
    assert "run.directory=/data/runs" in container(job)["command"]
    assert pod["terminationGracePeriodSeconds"] == 60
    assert "run.grace=50" in container(job)["command"], "the report is written in the ten seconds after"
    assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["fsGroup"] == 2000
    for probe in ("startupProbe", "livenessProbe"):
        assert container(job)[probe]["exec"]["command"] == ["lockstep", "ps", "--check"]
    start = container(job)["startupProbe"]
    assert start["periodSeconds"] * start["failureThreshold"] > 600, "all pods may take that long to be there"


def test_a_failure_that_would_happen_again_is_not_repeated_and_a_preemption_not_counted(command):
    job = written(command, *PLAIN, *TWO, "--restarts", "4")["Job"]["spec"]
    assert job["backoffLimit"] == 8, "a failure of one pod ends both"
    actions = {
        code: rule["action"]
        for rule in job["podFailurePolicy"]["rules"]
        for code in rule.get("onExitCodes", {}).get("values", ())
    }
    assert actions == {2: "FailJob", 3: "FailJob", 6: "FailJob", 75: "Ignore"}
    assert job["template"]["spec"]["restartPolicy"] == "Never", "a podFailurePolicy needs it"


def test_a_train_job_comes_with_its_runtime(command):
    found = written(command, "kubernetes", "digits", *REQUIRED, "--nodes", "2", "--gpus-per-node", "4")
    assert list(found) == ["NetworkPolicy", "TrainingRuntime", "TrainJob"]
    runtime, job = found["TrainingRuntime"], found["TrainJob"]
    reference = job["spec"]["runtimeRef"]
    assert (reference["kind"], reference["name"]) == (runtime["kind"], runtime["metadata"]["name"])
    trainer = job["spec"]["trainer"]
    assert trainer["numNodes"] == 2
    assert trainer["resourcesPerNode"]["limits"] == {"cpu": "4", "nvidia.com/gpu": "4"}
    assert trainer["command"][trainer["command"].index("--devices") + 1] == "0,1,2,3"
    assert [each["name"] for each in trainer["env"]] == ["LOCKSTEP_TOKEN"], "Kubeflow sets PET_NNODES and so on"
    (replicated,) = runtime["spec"]["template"]["spec"]["replicatedJobs"]
    label = replicated["template"]["metadata"]["labels"]["trainer.kubeflow.org/trainjob-ancestor-step"]
    assert (replicated["name"], label) == ("node", "trainer"), "by these Kubeflow finds what trains"
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["name"] == "node"
    assert pod["terminationGracePeriodSeconds"] == 120
    assert runtime["spec"]["template"]["spec"]["failurePolicy"]["maxRestarts"] == 6


def test_a_runtime_of_the_cluster_gets_the_volume_and_what_it_must_allow_is_said(command):
    status, output, _ = command("kubernetes", "digits", *REQUIRED, *TWO, "--runtime", "torch-distributed")
    found = documents(output)
    assert list(found) == ["NetworkPolicy", "TrainJob"]
    specification = found["TrainJob"]["spec"]
    assert specification["runtimeRef"]["kind"] == "ClusterTrainingRuntime"
    (patch,) = specification["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    pod = replicated["template"]["spec"]["template"]["spec"]
    assert pod["volumes"][0]["persistentVolumeClaim"]["claimName"] == "runs"
    assert "run.grace=20" in specification["trainer"]["command"], "Kubernetes gives 30 s if the runtime says nothing"
    assert "# terminationGracePeriodSeconds must be at least that." in output
    assert status == 0


def test_one_host_needs_no_token_no_service_and_no_policy(command):
    found = written(command, *PLAIN)
    assert list(found) == ["Job"]
    assert "env" not in container(found["Job"]) and "subdomain" not in found["Job"]["spec"]["template"]["spec"]


@pytest.mark.parametrize("kind", ["job", "trainjob"])
@pytest.mark.parametrize("nodes", ["1", "2"])
def test_every_field_is_one_of_kubernetes_with_its_type(command, kind, nodes):
    words = ("--kind", kind, "--nodes", nodes, "--memory", "1Gi")
    found = written(command, "kubernetes", "digits", *REQUIRED, *words)
    assert not [wrong for each in found.values() for wrong in unfit(each)]


def test_the_schemas_of_kubernetes_and_kubeflow_take_the_manifests(command):
    """Skipped where the packages with the schemas are not installed."""
    validate = pytest.importorskip("kubernetes_validate", reason="needs pip install kubernetes-validate")
    trainer = pytest.importorskip("kubeflow_trainer_api.models", reason="needs pip install kubeflow-trainer-api")
    for words in (PLAIN, (*PLAIN, *TWO)):
        for each in written(command, *words).values():
            validate.validate(each, validate.latest_version(), strict=True)
    for words in ((), ("--runtime", "torch-distributed")):
        found = written(command, "kubernetes", "digits", *REQUIRED, *TWO, "--gpus-per-node", "2", *words)
        job = trainer.TrainerV1alpha1TrainJob.from_dict(found["TrainJob"])
        assert same(job.to_dict(), found["TrainJob"])
        if "TrainingRuntime" in found:
            runtime = trainer.TrainerV1alpha1TrainingRuntime.from_dict(found["TrainingRuntime"])
            assert same(runtime.to_dict(), found["TrainingRuntime"])
            (replicated,) = found["TrainingRuntime"]["spec"]["template"]["spec"]["replicatedJobs"]
            whole = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}}
            whole["spec"] = replicated["template"]["spec"]
            validate.validate(whole, validate.latest_version(), strict=True)


def same(taken, written):
    """True if a model of the API took all that was written."""
    if isinstance(written, dict):
        return all(name in taken and same(taken[name], each) for name, each in written.items())
    if isinstance(written, list):
        return len(taken) == len(written) and all(map(same, taken, written))
    return taken == written


def test_text_that_yaml_would_read_as_something_else_is_quoted(command):
    odd = "yes: [1, #2], 'a' \"b\" \\ é"
    words = ("kubernetes", "flowers", "--kind", "job", *REQUIRED, "--data", odd, "--mount", "/on")
    job = written(command, *words)["Job"]
    assert odd in container(job)["command"]
    assert container(job)["volumeMounts"][0]["mountPath"] == "/on"


def test_the_manifest_is_written_to_a_file_or_given_to_kubectl(command, tmp_path, monkeypatch):
    status, output, _ = command(*PLAIN, "--output", "job.yaml")
    assert (status, output) == (0, "Wrote job.yaml. Start it with: kubectl apply -f job.yaml\n")
    kubectl = tmp_path / "kubectl"
    kubectl.write_text(f'#!/bin/bash\necho "$@"; /bin/cat > {tmp_path}/applied')
    kubectl.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    assert command(*PLAIN, "--submit")[:2] == (0, "apply -f -\n")
    assert (tmp_path / "applied").read_text() == (tmp_path / "job.yaml").read_text()
    kubectl.write_text("#!/bin/bash\necho 'no cluster' >&2; exit 1")
    assert command(*PLAIN, "--submit")[2] == "lockstep: kubectl refused the job: no cluster\n"
    monkeypatch.setenv("PATH", "/nowhere")
    status, _, errors = command(*PLAIN, "--submit")
    assert status == 2 and "kubectl was not found on this host" in errors


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--image", ""), "--image is missing."),
        (("--claim", ""), "--claim is missing. Name a PersistentVolumeClaim that all pods can write to"),
        (("--kind", "pod"), "--kind 'pod' is not known. Use trainjob or job."),
        (("--runtime", "torch"), "only a TrainJob has one"),
        (("--nodes", "0"), "--nodes is 0, and must be at least 1."),
        (("--user", "0"), "--user is 0, and must be at least 1."),
        (("--restarts", "-1"), "--restarts is -1, and must be at least 0."),
        (("--nodes", "16"), "micro_batches=8"),
        (("--memory", "much"), "--memory 'much' is not a size."),
        (("--mount", "shared"), "--mount 'shared' is not an absolute path."),
        (("--name", "My_Run"), "The name 'My_Run' cannot be that of a pod."),
        (("--output", "no/folder/job.yaml"), "the folder 'no/folder' does not exist"),
    ],
)
def test_what_does_not_fit_is_refused(command, words, said):
    status, output, errors = command(*PLAIN, *words)
    assert (status, output) == (2, "")
    assert said in errors
