"""Which modules are blocks, and which of them are compiled."""

import pytest
import torch
from torch import nn

from lockstep.numerics.blocks import blocks_of, compile_blocks
from lockstep.numerics.compilation import compiled_around, is_compiled
from lockstep.numerics.randomness import find_units

# Torch's own, on the compiler's import
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script")


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.1))

    def forward(self, x):
        return x + self.inner(x)


def model():
    return nn.Sequential(nn.Linear(4, 4), nn.Sequential(Residual(), Residual()), nn.Dropout(0.1))


def test_blocks_are_the_outermost_children_of_containers():
    assert list(blocks_of(model())) == ["0", "1.0", "1.1", "2"]


def test_blocks_with_children_are_compiled_and_a_model_without_them_as_one():
    net = model()
    compile_blocks(net)
    assert [name for name, module in net.named_modules() if is_compiled(module)] == ["1.0", "1.1"]
    flat = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    compile_blocks(flat)
    assert [name for name, module in flat.named_modules() if is_compiled(module)] == [""]
    assert not blocks_of(flat)


def test_a_block_in_two_places_is_compiled_once():
    block = Residual()
    net = nn.Sequential(block, block)
    compile_blocks(net)
    assert vars(net[0])["forward"]._forward.__func__ is Residual.forward


def test_random_numbers_are_keyed_around_what_is_compiled_and_not_in_it():
    net = model()
    compile_blocks(net)
    assert set(find_units(net)) == {"", "0", "1", "1.0", "1.1", "2"}


@pytest.mark.parametrize("by_hand", ["function", "method"])
def test_what_the_user_compiled_is_known(by_hand):
    net = model()
    if by_hand == "function":
        net[1] = torch.compile(net[1])
    else:
        net[1].compile()
    around = compiled_around(net)
    assert is_compiled(net[1])
    assert {around.get(module) for module in net[1].modules()} == {net[1]}
    assert net[0] not in around
