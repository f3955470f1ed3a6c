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
    "data x layers": (2, "hybrid", {"mesh": "data=2,layers=2"}),
    "data x pipeline": (4, "hybrid", {"mesh": "data=2,pipeline=2"}),
    "fsdp x pipeline": (4, "hybrid", {"mesh": "fsdp=2,pipeline=2"}),
    "tensor 2": (2, "tensor", {}),
    "data x tensor": (4, "hybrid", {"mesh": "data=2,tensor=2"}),
}
WIDER = {
    **{f"{strategy} 1": (1, strategy, {}) for strategy in ("ddp", "fsdp", "pipeline", "parameter_server", "tensor")},
    "dp 1": (1, "dp", {"dp": {"replicas": 1}}),
    "dp 4": (1, "dp", {"dp": {"replicas": 4}}),
    "layers 1": (1, "layers", {"layers": {"devices": 1}}),
    "layers 3": (1, "layers", {"layers": {"devices": 3}}),
    "layers 4": (1, "layers", {"layers": {"devices": 4}}),
    "pipeline 4": (4, "pipeline", {}),
    "pipeline 3, gpipe": (3, "pipeline", {"pipeline": {"schedule": "gpipe"}}),
    "pipeline 4, gpipe": (4, "pipeline", {"pipeline": {"schedule": "gpipe"}}),
    "pipeline 4, interleaved": (4, "pipeline", {"pipeline": {"schedule": "interleaved"}}),
    "parameter_server 4": (4, "parameter_server", {}),
    "tensor 4": (4, "tensor", {}),
}
"""Further numbers of devices, for which one model is enough."""
LEVEL_B = ("tensor 2", "tensor 4", "data x tensor")


def waits_of(layout, precision, in_shards=False):
    """Where the host may wait for the device in a step, and how often: the table in docs/gpu.md.

    _agree              tensor: ranks that compute the same gradients compare them before they are used
    _step_scaled        fp16: torch's GradScaler reads whether gradients were finite, once for each device
    scale               fp16: the scale is read after it was updated, to multiply the loss and to stop where it vanishes
    _share_overflows    fp16 in parts: ranks agree whether some of them had gradients that were not finite
    """
    ranks, strategy, options = {**LAYOUTS, **WIDER}[layout]
    mesh = "single" if ranks == 1 and strategy not in ("dp", "layers") else options.get("mesh", strategy)
    found = {"_agree": 1} if "tensor" in mesh else {}
    if precision == "fp16":
        devices = 2 if "layers=2" in mesh else options.get("layers", {}).get("devices", 1)
        found |= {"_step_scaled": devices, "scale": 1}
        if in_shards or any(name in mesh for name in ("fsdp", "pipeline", "parameter_server", "tensor")):
            found["_share_overflows"] = 1
    return found


def functions_of(waits):
    """How often the host has waited in each function; up to Python 3.11 a comprehension is one of its own."""
    found = {}
    for (_, where), count in waits.items():
        names = [each.rpartition(" ")[2] for each in where.split(" < ")]
        function = next(each for each in names if not each.endswith("comp>"))
        found[function] = found.get(function, 0) + count
    return found


def require(found, reference, layout, precision="fp32", *, in_shards=False, bound=0.0):
    """Compares with one device: equal bits, or losses within ``bound``; no race, and the waits of the table."""
    import pytest  # the proof kit for GPUs has none

    assert [each.races for each in found] == [{}] * len(found)
    assert [each.added for each in found] == [()] * len(found), "communicators are made within steps"
    expected, everywhere = waits_of(layout, precision, in_shards), set()
    for each in found:
        waits = functions_of(each.waits)
        everywhere |= waits.keys()
        for function, count in waits.items():
            assert function in expected, f"the host waits in {function}: {each.waits}"
            assert count <= each.steps * expected[function]
    assert everywhere == expected.keys()
    if bound or (layout in LEVEL_B and not in_shards):
        for each in found:
            assert each.losses == pytest.approx(reference.losses, rel=bound or 0.02)
    else:
        assert {each.fingerprint for each in found} == {reference.fingerprint}
