"""Descriptions of values that stages send, and tensors of any stride as flat memory."""

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.strategies.pipeline.channels import Description, TensorSpec

TENSORS = {
    "contiguous": torch.arange(24.0).view(2, 3, 4),
    "transposed": torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
    "with holes": torch.arange(24.0).view(4, 6)[:, ::2],
    "expanded": torch.arange(3.0).expand(4, 3),
    "0-dim": torch.tensor(2.0),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_received_tensor_has_the_values_and_strides_of_the_sent_one(name):
    sent = TENSORS[name]
    spec = TensorSpec.of(sent)
    whole, flat = spec.empty(torch.device("cpu"))
    flat.copy_(spec.packed(sent))
    received = spec.spread(whole)
    assert torch.equal(received, sent)
    assert received.stride() == sent.stride()


def test_a_description_survives_its_bytes():
    value = {"hidden": (torch.ones(2, 3), 4), "text": ["a", None]}
    description, tensors = Description.of(value, "layer")
    decoded = Description.decode(description.encode())
    assert decoded == description
    again = decoded.value(tensors)
    assert again["hidden"][0] is tensors[0]
    assert (again["hidden"][1], again["text"]) == (4, ["a", None])


def test_a_value_that_cannot_be_sent_names_its_module():
    with pytest.raises(ConfigError, match=r"ends with 'layer' returns set, but only tensors"):
        Description.of({1, 2}, "layer")
