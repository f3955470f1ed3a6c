"""Reads manifests of Kubernetes as its server does: the fields, their types, and what a pod's container gets."""

OBJECT = {"apiVersion": str, "kind": str, "metadata": {"name": str, "labels?": {"*": str}}}
PROBE = {
    "exec": {"command": [str]},
    "timeoutSeconds": int,
    "periodSeconds": int,
    "failureThreshold": int,
}
SOURCE = {
    "secretKeyRef?": {"name": str, "key": str},
    "fieldRef?": {"fieldPath": str},
}
ENV = [{"name": str, "value?": str, "valueFrom?": SOURCE}]
RESOURCES = {"requests?": {"*": str}, "limits?": {"*": str}}
CONTAINER = {
    "name": str,
    "image?": str,
    "command?": [str],
    "env?": ENV,
    "resources?": RESOURCES,
    "securityContext?": {"allowPrivilegeEscalation": bool, "capabilities": {"drop": [str]}},
    "startupProbe?": PROBE,
    "livenessProbe?": PROBE,
    "volumeMounts?": [{"name": str, "mountPath": str}],
}
POD = {
    "metadata?": {"labels": {"*": str}},
    "spec": {
        "restartPolicy": str,
        "terminationGracePeriodSeconds?": int,
        "automountServiceAccountToken?": bool,
        "subdomain?": str,
        "securityContext?": {
            **{f"{name}?": int for name in ("runAsUser", "runAsGroup", "fsGroup")},
            "runAsNonRoot?": bool,
            "seccompProfile?": {"type": str},
        },
        "containers": [CONTAINER],
        "volumes?": [
            {
                "name": str,
                "persistentVolumeClaim?": {"claimName": str},
                "emptyDir?": {"medium": str},
            }
        ],
    },
}
JOB = {
    "completionMode?": str,
    "completions?": int,
    "parallelism?": int,
    "backoffLimit?": int,
    "podFailurePolicy?": {
        "rules": [
            {
                "action": str,
                "onExitCodes?": {"containerName": str, "operator": str, "values": [int]},
                "onPodConditions?": [{"type": str}],
            }
        ]
    },
    "template": POD,
}
SELECTOR = {"matchLabels": {"*": str}}
FAILURES = {
    "maxRestarts": int,
    "rules": [{"name": str, "action": str, "onJobFailureReasons": [str]}],
}
SCHEMAS = {
    "Job": {**OBJECT, "spec": JOB},
    "Service": {
        **OBJECT,
        "spec": {"clusterIP": str, "publishNotReadyAddresses": bool, "selector": {"*": str}},
    },
    "NetworkPolicy": {
        **OBJECT,
        "spec": {
            "podSelector": SELECTOR,
            "policyTypes": [str],
            "ingress": [{"from": [{"podSelector": SELECTOR}]}],
        },
    },
    "TrainJob": {
        **OBJECT,
        "spec": {
            "runtimeRef": {"apiGroup": str, "kind": str, "name": str},
            "trainer": {
                "numNodes": int,
                "image": str,
                "command": [str],
                "env?": ENV,
                "resourcesPerNode": RESOURCES,
            },
        },
    },
    "TrainingRuntime": {
        **OBJECT,
        "spec": {
            "mlPolicy": {"numNodes": int, "torch": {}},
            "template": {
                "spec": {
                    "failurePolicy": FAILURES,
                    "replicatedJobs": [{"name": str, "template": {"metadata": {"labels": {"*": str}}, "spec": JOB}}],
                }
            },
        },
    },
}
"""By kind the fields that Kubernetes and Kubeflow know and we write; one with a question mark may be absent."""


def documents(text):
    """The objects of a manifest, by kind."""
    import yaml

    return {each["kind"]: each for each in yaml.safe_load_all(text)}


def container(job):
    """The container of a Job."""
    (found,) = job["spec"]["template"]["spec"]["containers"]
    return found


def environment(found, index, token):
    """The variables that the pod with this index gives its container."""
    references = {
        "fieldRef": {"fieldPath": "metadata.annotations['batch.kubernetes.io/job-completion-index']"},
        "secretKeyRef": {"name": "lockstep-token", "key": "token"},
    }
    values = {"fieldRef": str(index), "secretKeyRef": token}
    taken = {}
    for each in found["env"]:
        taken[each["name"]] = each.get("value")
        for kind, reference in each.get("valueFrom", {}).items():
            assert reference == references[kind]
            taken[each["name"]] = values[kind]
    return taken


def unfit(document):
    """The faults of an object: fields that are unknown, absent or of another type."""
    return list(_unfit(document, SCHEMAS[document["kind"]], document["kind"]))


def _unfit(value, schema, place):
    if isinstance(schema, dict):
        if not isinstance(value, dict):
            yield f"{place} is no object"
            return
        known = {name.rstrip("?"): each for name, each in schema.items()}
        absent = [name for name in schema if name[-1] not in "?*" and name not in value]
        yield from (f"{place}.{name} is absent" for name in absent)
        for name, each in value.items():
            if name not in known and "*" not in known:
                yield f"{place}.{name} is unknown"
            else:
                yield from _unfit(each, known.get(name, known.get("*")), f"{place}.{name}")
    elif isinstance(schema, list):
        if not isinstance(value, list) or not value:
            yield f"{place} is no list, or empty"
            return
        for number, each in enumerate(value):
            yield from _unfit(each, schema[0], f"{place}[{number}]")
    elif type(value) is not schema:
        yield f"{place} is {value!r}"
