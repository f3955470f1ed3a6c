"""``lockstep kubernetes``: writes or applies the manifest that trains a job on a Kubernetes cluster.

    --kind trainjob   a TrainJob of Kubeflow Trainer, with the TrainingRuntime that it refers to
    --kind job        a Job with an index for each pod, and the headless Service by which the pods find each other

Each host is a pod, in which ``lockstep train`` starts the ranks and watches them. All pods see one volume with the run
folder: pods that are ended save, and their successors resume.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from typing import Any

from lockstep.cli import train
from lockstep.cli.command_line import Parser
from lockstep.cli.shared_options import (
    add_options,
    add_train_options,
    deliver,
    node_options,
    require_at_least,
    require_files,
    require_positive,
)
from lockstep.config.job import JobConfig
from lockstep.errors import EXIT_CONFIG, EXIT_DATA, EXIT_NON_FINITE, EXIT_PREEMPTED, ConfigError
from lockstep.text import plural

Table = dict[str, Any]

_KINDS = ("trainjob", "job")
_TRAINER = "trainer.kubeflow.org"
_CONTAINER = "node"
"""Kubeflow's word for the container, and the replicated Job, that trains."""
_PORT = 29500
_GRACE_PERIOD, _DEFAULT_OF_KUBERNETES = 120, 30
_IMPORT_SECONDS = 120
"""From the arrival of all hosts until every rank has written a heartbeat, at most."""
_NAME = re.compile(r"[a-z]([a-z0-9-]{0,48}[a-z0-9])?")
_QUANTITY = re.compile(r"\d+(\.\d+)?(m|k|[KMGTPE]i?)?")
_PLAIN = re.compile(r"[A-Za-z/][\w./-]*[\w.]")
_NOT_TEXT = {"true", "false", "null", "yes", "no", "on", "off"}
"""Plain words that YAML does not take for text."""
_CONTAINER_SECURITY = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
_NOT_TO_BE_REPEATED = (EXIT_CONFIG, EXIT_DATA, EXIT_NON_FINITE)


def add_arguments(parser: Parser) -> None:
    """Declares the arguments of the cluster, and those of ``train`` that fit there."""
    add_options(
        parser,
        ("job", "JOB", str, "a TOML file, as the image has it, or the name of a built-in job"),
        ("--kind", "NAME", "trainjob", "trainjob (Kubeflow Trainer) or job (Kubernetes alone)"),
        ("--name", "NAME", "", "name of the run and of all objects (default: that of the job)"),
        ("--image", "IMAGE", "", "container image with Lockstep and your code"),
        ("--claim", "NAME", "", "PersistentVolumeClaim that all pods share: it gets the run folder"),
        ("--mount", "PATH", "/shared", "where the pods see that volume"),
        *node_options("number of hosts, one pod each"),
        ("--memory", "SIZE", "", "memory of each pod, such as 16Gi"),
        ("--secret", "NAME", "lockstep-token", "Secret whose key 'token' the hosts know each other by"),
        ("--user", "UID", 1000, "number of the user that the pods run as"),
        ("--grace-period", "SECONDS", int, f"time to save before a pod is ended (default: {_GRACE_PERIOD})"),
        ("--start-limit", "SECONDS", 600, "time limit for all pods to be there"),
        ("--restarts", "N", 6, "the most times that the pods are started again after a failure"),
        ("--runtime", "NAME", "", "a ClusterTrainingRuntime of the cluster, in place of one that is written"),
        ("--output", "FILE", "", "file to write the manifest to (default: the terminal)"),
        ("--submit", "", False, "apply the manifest with kubectl"),
    )
    add_train_options(parser, *train.OPTIONS_OF_NODES)


def main(arguments: argparse.Namespace) -> int:
    """Writes or applies the manifest and returns the exit status."""
    require_files(arguments, ("output",))
    apply = "kubectl apply -f {}"
    return deliver(arguments, manifest(arguments), apply.format("-").split(), f"Start it with: {apply}")


def manifest(arguments: argparse.Namespace) -> str:
    """Returns the manifest as YAML. Raises ``ConfigError`` where the job and the cluster do not fit."""
    pods = _Pods(arguments)
    write = _train_job if arguments.kind == "trainjob" else _indexed_job
    documents = [*([pods.network_policy] if pods.nodes > 1 else []), *write(pods)]
    return "---\n".join([_head(pods), *("\n".join([*_yaml(each), ""]) for each in documents)])


class _Pods:
    """The settings that all pods of a run share, from checked arguments."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        _check(arguments)
        config, ranks, cores = train.job_of_nodes(arguments, is_here=False)
        self.nodes, self.restarts, self.image = arguments.nodes, arguments.restarts, arguments.image
        self.name = _name(arguments, config)
        self.secret, self.runtime = arguments.secret, arguments.runtime
        default = _DEFAULT_OF_KUBERNETES if self.runtime else _GRACE_PERIOD
        self.grace_period: int = arguments.grace_period or default
        self.labels = {"app.kubernetes.io/name": "lockstep", "app.kubernetes.io/instance": self.name}
        self.command = self._command(arguments, ranks)
        amounts = {"cpu": str(cores), **({"memory": arguments.memory} if arguments.memory else {})}
        gpus = {"nvidia.com/gpu": str(arguments.gpus_per_node)} if arguments.gpus_per_node else {}
        self.resources = {"requests": amounts, "limits": {**amounts, **gpus}}
        self._start_limit = arguments.start_limit
        # The hosts' secret; one host needs none.
        source = {"secretKeyRef": {"name": self.secret, "key": "token"}}
        self.token = [{"name": "LOCKSTEP_TOKEN", "valueFrom": source}] if self.nodes > 1 else []
        # The shared volume, and memory for what the processes of a pod share: a container has 64 MB of its own.
        self.volumes = [
            {"name": "shared", "persistentVolumeClaim": {"claimName": arguments.claim}},
            {"name": "memory", "emptyDir": {"medium": "Memory"}},
        ]
        places = {"shared": arguments.mount, "memory": "/dev/shm"}
        self.mounts = [{"name": name, "mountPath": path} for name, path in places.items()]
        # Every pod runs as an ordinary user, who owns what it writes to the volume.
        numbers = dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), arguments.user)
        self.security = {"runAsNonRoot": True, **numbers, "seccompProfile": {"type": "RuntimeDefault"}}

    def _command(self, arguments: argparse.Namespace, ranks: int) -> list[str]:
        words = train.command_of_node(arguments, ranks, self.grace_period)
        # A lost pod ends the others too: all are started again, and nothing has to join a running run.
        for setting in (f"run.directory={arguments.mount}/runs", f"run.name={self.name}", "run.restarts=0"):
            words += ["--set", setting]
        return [*words, "--resume", "auto", "--start-limit", str(arguments.start_limit)]

    def template(self, container: Table, **more: Any) -> Table:
        """The pods' template, with these fields of its container and of its specification."""
        probe = {"exec": {"command": ["lockstep", "ps", "--check"]}, "timeoutSeconds": 10}
        tries = (self._start_limit + _IMPORT_SECONDS) // 10
        whole = {
            "name": _CONTAINER,
            **container,
            "securityContext": _CONTAINER_SECURITY,
            "startupProbe": {**probe, "periodSeconds": 10, "failureThreshold": tries},
            "livenessProbe": {**probe, "periodSeconds": 30, "failureThreshold": 3},
            "volumeMounts": self.mounts,
        }
        specification = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self.grace_period,
            "automountServiceAccountToken": False,
            "securityContext": self.security,
            **more,
            "containers": [whole],
            "volumes": self.volumes,
        }
        return {"metadata": {"labels": self.labels}, "spec": specification}

    @property
    def network_policy(self) -> Table:
        """Only pods of the run may reach its pods: the ranks' own connections are not protected."""
        selector = {"matchLabels": self.labels}
        ingress = [{"from": [{"podSelector": selector}]}]
        specification = {"podSelector": selector, "policyTypes": ["Ingress"], "ingress": ingress}
        return self.document("networking.k8s.io/v1", "NetworkPolicy", specification)

    def document(self, version: str, kind: str, specification: Table, **labels: str) -> Table:
        """An object with the name and the labels of the run, and further labels."""
        metadata = {"name": self.name, "labels": {**self.labels, **labels}}
        return {"apiVersion": version, "kind": kind, "metadata": metadata, "spec": specification}


def _check(arguments: argparse.Namespace) -> None:
    if arguments.kind not in _KINDS:
        raise ConfigError(f"--kind {arguments.kind!r} is not known. Use trainjob or job.")
    if arguments.runtime and arguments.kind != "trainjob":
        raise ConfigError("--runtime was given, and only a TrainJob has one. Leave it out, or use --kind trainjob.")
    for option, example in (
        ("image", "the one that 'docker build' makes from Lockstep's Dockerfile"),
        ("claim", "a PersistentVolumeClaim that all pods can write to, since their own disks go with them"),
    ):
        if not getattr(arguments, option):
            raise ConfigError(f"--{option} is missing. Name {example}.")
    numbers = ("nodes", "tasks_per_node", "cpus_per_task", "grace_period", "start_limit", "user")
    require_positive(arguments, *numbers)
    require_at_least(arguments, 0, "restarts", "gpus_per_node")
    if arguments.memory and not _QUANTITY.fullmatch(arguments.memory):
        raise ConfigError(f"--memory {arguments.memory!r} is not a size. Use a number and a unit, such as 16Gi.")
    if not re.fullmatch(r"(/[\w.-]+)+", arguments.mount):
        raise ConfigError(f"--mount {arguments.mount!r} is not an absolute path. Use one such as /shared.")


def _name(arguments: argparse.Namespace, config: JobConfig) -> str:
    """The name of the objects, from which the names of hosts are made."""
    derived = re.sub(r"[^a-z0-9]+", "-", config.job.lower()).strip("-")[:50].strip("-")
    name: str = arguments.name or derived
    if not _NAME.fullmatch(name):
        raise ConfigError(
            f"The name {name!r} cannot be that of a pod. Give a --name of at most 50 lower-case letters, digits and "
            "hyphens that begins with a letter."
        )
    return name


def _train_job(pods: _Pods) -> list[Table]:
    trainer = {
        "numNodes": pods.nodes,
        "image": pods.image,
        "command": pods.command,
        **({"env": pods.token} if pods.token else {}),
        "resourcesPerNode": pods.resources,
    }
    kind = "ClusterTrainingRuntime" if pods.runtime else "TrainingRuntime"
    runtime = {"apiGroup": _TRAINER, "kind": kind, "name": pods.runtime or pods.name}
    specification: Table = {"runtimeRef": runtime, "trainer": trainer}
    if pods.runtime:
        specification["runtimePatches"] = [_patch(pods)]
    job = pods.document(f"{_TRAINER}/v1alpha1", "TrainJob", specification)
    return [job] if pods.runtime else [_training_runtime(pods), job]


def _patch(pods: _Pods) -> Table:
    """Changes that Kubeflow lets a TrainJob make in a runtime of the cluster: neither probes nor the grace period."""
    container = {"name": _CONTAINER, "volumeMounts": pods.mounts, "securityContext": _CONTAINER_SECURITY}
    specification = {"volumes": pods.volumes, "containers": [container], "securityContext": pods.security}
    template = {"metadata": {"labels": pods.labels}, "spec": specification}
    replicated = [{"name": _CONTAINER, "template": {"spec": {"template": template}}}]
    return {
        "manager": "lockstep",
        "trainingRuntimeSpec": {"template": {"spec": {"replicatedJobs": replicated}}},
    }


def _training_runtime(pods: _Pods) -> Table:
    job = {
        "backoffLimit": 0,
        "podFailurePolicy": {"rules": [_on_exit("FailJob", _NOT_TO_BE_REPEATED)]},
        "template": pods.template({}),
    }
    replicated = {
        "name": _CONTAINER,
        "template": {"metadata": {"labels": {f"{_TRAINER}/trainjob-ancestor-step": "trainer"}}, "spec": job},
    }
    # All pods are started again together, unless one says that it would fail again.
    final = {"name": "mistake", "action": "FailJobSet", "onJobFailureReasons": ["PodFailurePolicy"]}
    failures = {"maxRestarts": pods.restarts, "rules": [final]}
    specification = {
        "mlPolicy": {"numNodes": pods.nodes, "torch": {}},
        "template": {"spec": {"failurePolicy": failures, "replicatedJobs": [replicated]}},
    }
    labels = {f"{_TRAINER}/framework": "torch"}
    return pods.document(f"{_TRAINER}/v1alpha1", "TrainingRuntime", specification, **labels)


def _on_exit(action: str, codes: tuple[int, ...]) -> Table:
    return {
        "action": action,
        "onExitCodes": {"containerName": _CONTAINER, "operator": "In", "values": list(codes)},
    }


def _indexed_job(pods: _Pods) -> list[Table]:
    index = {"fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"}}
    hosts = [
        {"name": "PET_NNODES", "value": str(pods.nodes)},
        {"name": "PET_NODE_RANK", "valueFrom": index},
        {"name": "PET_MASTER_ADDR", "value": f"{pods.name}-0.{pods.name}"},
        {"name": "PET_MASTER_PORT", "value": str(_PORT)},
    ]
    container = {
        "image": pods.image,
        "command": pods.command,
        **({"env": [*hosts, *pods.token]} if pods.nodes > 1 else {}),
        "resources": pods.resources,
    }
    more = {"subdomain": pods.name} if pods.nodes > 1 else {}
    evicted = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget"}]}
    rules = [_on_exit("FailJob", _NOT_TO_BE_REPEATED), _on_exit("Ignore", (EXIT_PREEMPTED,)), evicted]
    specification = {
        "completionMode": "Indexed",
        "completions": pods.nodes,
        "parallelism": pods.nodes,
        "backoffLimit": pods.restarts * pods.nodes,  # a failure of one ends all
        "podFailurePolicy": {"rules": rules},
        "template": pods.template(container, **more),
    }
    names = {"clusterIP": "None", "publishNotReadyAddresses": True, "selector": pods.labels}
    job, service = pods.document("batch/v1", "Job", specification), pods.document("v1", "Service", names)
    return [service, job] if pods.nodes > 1 else [job]


def _head(pods: _Pods) -> str:
    lines = [
        f"{plural(pods.nodes, 'pod')} of: {shlex.join(pods.command)}",
        f"kubectl apply -f FILE; kubectl logs -f -l app.kubernetes.io/instance={pods.name}",
    ]
    if pods.nodes > 1:
        lines += [
            "Once, for all runs: the secret by which the hosts know each other. It is in no file.",
            f"kubectl create secret generic {pods.secret} --from-literal=token=$(openssl rand -hex 32)",
        ]
    if pods.runtime:
        lines += [
            f"Probes, restarts and grace period are those of the runtime {pods.runtime}. The pods save within "
            f"{pods.grace_period} s: its",
            "terminationGracePeriodSeconds must be at least that.",
        ]
    return "".join(f"# {line}\n" for line in lines)


def _yaml(value: Any) -> list[str]:
    """The lines of a value of objects, lists and scalars. Text that is not a plain word is quoted as in JSON."""
    if isinstance(value, dict) and value:
        return [line for key, each in value.items() for line in _entry(f"{key}:", each)]
    if isinstance(value, list) and value:
        items = [_yaml(each) for each in value]
        return [line for first, *rest in items for line in (f"- {first}", *(f"  {each}" for each in rest))]
    is_plain = isinstance(value, str) and _PLAIN.fullmatch(value) and value.lower() not in _NOT_TEXT
    return [value if is_plain else json.dumps(value, ensure_ascii=False)]


def _entry(key: str, value: Any) -> list[str]:
    lines = _yaml(value)
    if isinstance(value, dict | list) and value:
        return [key, *(f"  {line}" for line in lines)]
    return [f"{key} {lines[0]}"]
