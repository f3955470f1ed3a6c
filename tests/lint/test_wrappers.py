"""The calls that wrap a model, and the signs that a script runs on several ranks."""

import pytest

from lockstep.lint.script import Script
from lockstep.lint.wrappers import DDP, FSDP, is_distributed, is_managed, reduces, wraps

IMPORTS = """\
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as Wrapped
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
"""


@pytest.mark.parametrize(
    ("text", "source", "target", "certain"),
    [
        ("model = Wrapped(model)", "model", "model", True),
        ("self.net = Wrapped(module=net.cuda(), device_ids=[0])", "net.cuda()", "self.net", True),
        ("train(Wrapped(model))", "model", "", True),
        ("if several:\n    model = Wrapped(model)", "model", "model", False),
        ("if __name__ == '__main__':\n    model = Wrapped(model)", "model", "model", True),
        ("if several:\n    def make(net):\n        model = Wrapped(net)", "net", "model", True),
    ],
)
def test_a_wrap_has_its_model_its_name_and_its_condition(text, source, target, certain):
    (wrap,) = wraps(Script(IMPORTS + text), DDP)
    assert (wrap.kind, wrap.source, wrap.target, wrap.certain) == (DDP, source, target, certain)


def test_only_the_kinds_asked_for_and_only_those_of_torch_are_found():
    script = Script(IMPORTS + "a = FSDP(a)\nb = Wrapped(b)\nc = other.DistributedDataParallel(c)\n")
    assert [wrap.target for wrap in wraps(script, FSDP)] == ["a"]
    assert [wrap.target for wrap in wraps(script, DDP, FSDP)] == ["a", "b"]


@pytest.mark.parametrize(
    ("text", "distributed", "managed"),
    [
        ("dist.init_process_group()", True, False),
        ("x = 1", False, False),
        ("import deepspeed\ndist.init_process_group()", False, True),
    ],
)
def test_a_script_shows_that_it_runs_on_several_ranks(text, distributed, managed):
    script = Script(IMPORTS + text)
    assert (is_distributed(script), is_managed(script)) == (distributed, managed)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("dist.all_reduce(x)", True),
        ("meter.synchronize()", True),
        ("ReduceLROnPlateau(x)", False),
        ("x = 1", False),
    ],
)
def test_values_of_several_ranks_are_combined(text, expected):
    assert reduces(Script(text)) is expected
