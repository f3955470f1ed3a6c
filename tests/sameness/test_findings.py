"""Programs that the generator found to end otherwise once, made small."""

import dataclasses

import pytest
from tests.sameness.drawing import plain_program
from tests.sameness.programs import judge
from tests.sameness.trials import Layout

FSDP = Layout("fsdp 2", 2, {"strategy": "fsdp"})
FP16 = (("global_batch", 4), ("micro_batches", 2), ("precision", "fp16"))


@pytest.mark.parametrize(
    ("parts", "layout", "what"),
    [
        pytest.param({"optimizer": "fused_adagrad", "recipe": FP16}, FSDP, "equal", id="fp16, fused Adagrad"),
    ],
)
def test_it_ends_as_it_should(parts, layout, what):
    program = dataclasses.replace(plain_program(), **parts)
    verdict = judge(program, [layout])
    assert verdict.what == what, (verdict.said, verdict.traceback)
