"""Compiled graphs that depend on their code and inputs alone."""

import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.numerics.compilation import (
    CompiledForward,
    explain_compiler,
    fix_graphs,
    require_repeatable,
    uncompiled,
)

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not shutil.which("g++"), reason="needs a C++ compiler (apt-get install g++)"),
    # torch's own, on the compiler's import
    pytest.mark.filterwarnings("ignore:.*torch.jit.script"),
]


def normalized(inputs, share):
    return torch.nn.functional.layer_norm(inputs * (1 + share), inputs.shape[-1:], eps=share * 1e-4)


def compiled_after(*shares):
    """The function, compiled in a process that has computed it with these numbers."""
    torch._dynamo.reset()
    function = torch.compile(normalized)
    for share in shares:
        function(torch.ones(32, 64), share)
    return function


def test_bits_do_not_depend_on_the_numbers_that_a_function_was_compiled_for():
    """By itself torch makes a graph for all numbers at the second one, which rounds otherwise."""
    compiled_after()
    fix_graphs()
    inputs = torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    expected = compiled_after()(inputs, 0.3)
    assert torch.equal(compiled_after(0.9, 0.8)(inputs, 0.3), expected)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"deterministic": False, "shape_padding": True}, {"deterministic": True, "shape_padding": True}),
        (
            {"shape_padding": True, "dynamic_scale_rblock": True},  # torch 2.8 and 2.9
            {"shape_padding": False, "dynamic_scale_rblock": False},
        ),
    ],
    ids=["with a switch", "without"],
)
def test_no_kernel_is_chosen_by_its_speed_where_torch_is_deterministic(monkeypatch, settings, expected):
    compiler = SimpleNamespace(**settings)
    monkeypatch.setitem(sys.modules, "torch._inductor.config", compiler)
    fix_graphs()
    assert vars(compiler) == settings
    torch.set_deterministic_debug_mode("error")
    try:
        fix_graphs()
        assert vars(compiler) == expected
    finally:
        torch.set_deterministic_debug_mode("default")


def test_more_graphs_than_torch_keeps_are_explained():
    forward = CompiledForward(normalized)
    with pytest.raises(ConfigError, match=r"more came than torch keeps of one function \(8\)"):
        for rows in range(1, 10):
            forward(torch.ones(rows, 64), 0.1)


def test_parts_of_a_micro_batch_that_are_only_looked_at_make_no_graphs():
    """A mean is told from a sum by parts of a micro-batch, each of another shape."""
    torch._dynamo.reset()
    calls = []
    function = torch.compile(torch.nn.Linear(4, 4), backend=lambda graph, _: calls.append(graph) or graph.forward)
    function(torch.ones(8, 4))
    with uncompiled():
        for rows in range(1, 12):
            function(torch.ones(rows, 4))
    assert len(calls) == 1


def test_other_errors_are_left_as_they_are():
    assert explain_compiler(ValueError("x")) is None


def test_a_refusal_while_the_compiler_traces_is_told_as_such():
    class Refusing(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func, types, args=(), kwargs=None):
            raise ConfigError("The gradient is elsewhere.")

    weight = torch.nn.Parameter(torch.ones(2, 2))
    weight.grad = torch.ones(2, 2).as_subclass(Refusing)
    function = torch.compile(lambda x: x @ weight, backend="eager")
    with pytest.raises(torch._dynamo.exc.InternalTorchDynamoError) as raised:
        function(torch.ones(2, 2))
    with pytest.raises(ConfigError, match="The gradient is elsewhere"):
        explain_compiler(raised.value)


def by_method(mode):
    module = torch.nn.Linear(2, 2)
    module.compile(mode=mode)
    return module


def by_run(mode):
    """As with compile=True where the environment has the setting."""
    module = torch.nn.Linear(2, 2)
    with torch._inductor.config.patch({"max_autotune": True} if mode else {}):
        module.forward = CompiledForward(module.forward)
    return module


WAYS = [
    lambda mode: torch.compile(torch.nn.Linear(2, 2), mode=mode),
    lambda mode: torch.compile(torch.nn.functional.cross_entropy, mode=mode),
    by_method,
    by_run,
]


@pytest.mark.parametrize("compiled", WAYS, ids=["module", "function", "method", "run"])
def test_kernels_that_are_chosen_by_their_speed_are_refused(compiled):
    with pytest.raises(ConfigError, match="It was compiled with max_autotune, as mode='max-autotune' does"):
        require_repeatable("It", compiled("max-autotune-no-cudagraphs"), on_gpu=False)
    require_repeatable("It", compiled(None), on_gpu=True)
    require_repeatable("It", compiled("max-autotune"), on_gpu=False, is_deterministic=False)


@pytest.mark.parametrize("compiled", WAYS[:3], ids=["module", "function", "method"])
def test_cuda_graphs_are_refused_on_a_gpu(compiled):
    for mode in ("reduce-overhead", "max-autotune"):
        with pytest.raises(ConfigError, match="It was compiled with CUDA graphs"):
            require_repeatable("It", compiled(mode), on_gpu=True, is_deterministic=False)
    require_repeatable("It", compiled("reduce-overhead"), on_gpu=False)


def test_what_torch_compile_has_not_made_is_let_be():
    for given in (torch.nn.Linear(2, 2), normalized, object(), torch.compile(normalized, backend="eager")):
        require_repeatable("It", given, on_gpu=True)
