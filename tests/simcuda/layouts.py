"""Layouts that are trained on simulated devices, and what is required of them."""

import pytest

LAYOUTS = {
    "single": (1, "single", {}),
    "dp 2": (1, "dp", {"dp": {"replicas": 2}}),
    "dp 3": (1, "dp", {"dp": {"replicas": 3}}),
    "ddp 2": (2, "ddp", {}),
    "ddp 3": (3, "ddp", {}),
    "ddp 4": (4, "ddp", {}),
    "fsdp 2": (2, "fsdp", {}),
    "fsdp 3": (3, "fsdp", {}),
    "fsdp 4": (4, "fsdp", {}),
    "fsdp 2, whole after forward": (2, "fsdp", {"fsdp": {"reshard_after_forward": False}}),
    "layers 2": (1, "layers", {"layers": {"devices": 2}}),
    "pipeline 2": (2, "pipeline", {}),
    "pipeline 3": (3, "pipeline", {}),
    "pipeline 2, gpipe": (2, "pipeline", {"pipeline": {"schedule": "gpipe"}}),
    "pipeline 2, interleaved": (2, "pipeline", {"pipeline": {"schedule": "interleaved"}}),
    "parameter_server 2": (2, "parameter_server", {}),
    "parameter_server 3": (3, "parameter_server", {}),
    "parameter_server 4, two servers": (4, "parameter_server", {"parameter_server": {"servers": 2}}),
    "data x pipeline": (4, "hybrid", {"mesh": "data=2,pipeline=2"}),
    "fsdp x pipeline": (4, "hybrid", {"mesh": "fsdp=2,pipeline=2"}),
    "tensor 2": (2, "tensor", {}),
    "data x tensor": (4, "hybrid", {"mesh": "data=2,tensor=2"}),
}
LEVEL_B = ("tensor 2", "data x tensor")


def require(found, reference, layout, most_waits=0):
    """Compares with one device; ``most_waits`` is of one step on one rank."""
    assert [each.races for each in found] == [{}] * len(found)
    for each in found:
        assert sum(each.waits.values()) <= most_waits * each.steps, each.waits
    if layout in LEVEL_B:
        for each in found:
            assert each.losses == pytest.approx(reference.losses, rel=0.02)
    else:
        assert {each.fingerprint for each in found} == {reference.fingerprint}
