"""Layouts that are trained on simulated devices, and what is required of them."""

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
    "fsdp 2, whole for the step": (
        2,
        "fsdp",
        {"fsdp": {"reshard_after_forward": False, "reshard_after_backward": False}},
    ),
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


WAITS = {
    "_agree": "tensor: ranks that compute the same gradients compare them before they are used",
    "_step_scaled": "fp16: torch's GradScaler reads whether gradients were finite, once for each device",
    "scale": "fp16: the scale is read after it was updated, to multiply the loss and to stop where it vanishes",
    "_share_overflows": "fp16 in parts: ranks agree whether some of them had gradients that were not finite",
}
"""Functions in which the host waits for the device in a step, once in each, and why it has to."""


def require(found, reference, layout):
    """Compares with one device."""
    import pytest  # the proof kit for GPUs has none

    assert [each.races for each in found] == [{}] * len(found)
    devices = LAYOUTS[layout][2].get("layers", {}).get("devices", 1)
    for each in found:
        for (_, where), count in each.waits.items():
            function = where.partition(" < ")[0].rpartition(" ")[2]
            assert function in WAITS, f"the host waits in {where}"
            assert count <= each.steps * (devices if function == "_step_scaled" else 1)
    if layout in LEVEL_B:
        for each in found:
            assert each.losses == pytest.approx(reference.losses, rel=0.02)
    else:
        assert {each.fingerprint for each in found} == {reference.fingerprint}
