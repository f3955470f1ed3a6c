"""Descriptions of values that stages send, and tensors of any stride as flat memory."""

from collections import namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from lockstep.errors import ConfigError
from lockstep.strategies.pipeline.channels import Description, TensorSpec, _overlapping, tensors_of

TENSORS = {
    "contiguous": torch.arange(24.0).view(2, 3, 4),
    "transposed": torch.arange(24.0).view(2, 3, 4).transpose(0, 2),
    "with holes": torch.arange(24.0).view(4, 6)[:, ::2],
    "expanded": torch.arange(3.0).expand(4, 3),
    "0-dim": torch.tensor(2.0),
    "without elements": torch.ones(()).expand(4, 0, 3),
    "the last of a sequence": torch.arange(60.0).view(3, 4, 5)[:, -1],
    "a row": torch.arange(60.0).view(6, 10)[3],
    "rows in half precision": torch.arange(60.0).half().view(6, 10)[3:],
    "of eight bytes": torch.arange(60).view(6, 10)[1:].t(),
}


@pytest.mark.parametrize("name", TENSORS)
def test_a_received_tensor_has_the_values_strides_and_alignment_of_the_sent_one(name):
    sent = TENSORS[name]
    spec = TensorSpec.of(sent)
    whole, flat = spec.empty(torch.device("cpu"))
    flat.copy_(spec.packed(sent))
    for received in (spec.received(whole), spec.copied(sent, torch.device("cpu"))):
        assert torch.equal(received, sent)
        assert received.stride() == sent.stride()
        assert received.data_ptr() % 64 == sent.data_ptr() % 64
        assert not received._is_view() or name in ("expanded", "without elements")
        assert received.is_leaf


def test_a_description_survives_its_bytes():
    value = {"hidden": (torch.ones(2, 3), 4), "text": ["a", None]}
    description, tensors = Description.of(value, "layer")
    decoded = Description.decode(description.encode())
    assert decoded == description
    again = decoded.value(tensors)
    assert again["hidden"][0] is tensors[0]
    assert (again["hidden"][1], again["text"]) == (4, ["a", None])


Pair = namedtuple("Pair", "hidden residual")


@dataclass(frozen=True)
class Output:
    pair: Any
    count: int = 0


def test_named_tuples_and_dataclasses_come_out_as_what_they_were():
    x, y = torch.ones(2, 3), torch.zeros(2)
    value = {"first": Output(Pair([x], y), 3), "second": (Pair(None, Output(y)), 1.5)}
    description, tensors = Description.of(value, "layer")
    again = Description.decode(description.encode()).value(tensors)
    assert type(again["first"]) is Output and type(again["first"].pair) is Pair and again["first"].count == 3
    assert again["first"].pair.hidden[0] is x and again["second"][0].residual.pair is y
    assert again["second"][0].hidden is None and again["second"][1] == 1.5


def test_a_tensor_that_is_there_twice_is_sent_once_and_is_one_tensor_again():
    x, y = torch.ones(2, 3), torch.zeros(2)
    value = Pair((x, y), [x, x])
    description, tensors = Description.of(value, "layer")
    assert [each is of for each, of in zip(tensors, (x, y), strict=True)] == [True, True]
    assert [each is of for each, of in zip(tensors_of(value), (x, y), strict=True)] == [True, True]
    received = [x.clone(), y.clone()]
    (first, second), others = Description.decode(description.encode()).value(received)
    assert first is received[0] and second is received[1] and all(each is first for each in others)


class Marked(torch.Tensor):
    pass


@pytest.mark.parametrize(
    "views, found",
    [
        (lambda x: [x, x[:, :1]], (0, 1)),
        (lambda x: [*x.chunk(2, 1), torch.ones(4)], ()),
        (lambda x: [x[0], x[1].expand(3, 4), x[2]], ()),
        (lambda x: [x[0], x[2, 1:], x[:, 3]], (0, 1, 2)),
        (lambda x: [x, x.view(torch.int32)], (0, 1)),
        (lambda x: [x[0], x.view(torch.int64)[1]], (0, 1)),
        (lambda x: [x.view(-1)[:9].unfold(0, 3, 2), x.view(-1)[9:]], ()),
        (lambda x: [x[:0], x], ()),
    ],
)
def test_tensors_that_share_elements_are_found(views, found):
    assert _overlapping(views(torch.zeros(4, 4))) == found


def within_a_function():
    return namedtuple("Local", "x")(torch.ones(1))


@pytest.mark.parametrize(
    "value, said",
    [
        ({1, 2}, r"ends with 'layer' returns set, but only tensors"),
        (Output({1, 2}), r"returns Output with set, but only tensors"),
        (within_a_function(), r"returns Local whose class is defined within a function \(move it to the top"),
        ({(1, 2): torch.ones(1)}, r"returns dict that has other keys than strings and numbers"),
        (torch.eye(2).to_sparse(), r"returns Tensor that is sparse_coo \(.*to_dense\(\)"),
        ([torch.ones(2, dtype=torch.complex64).conj()], r"list with Tensor that is conjugate \(resolve_conj"),
        (torch.ones(2).as_subclass(Marked), r"returns Marked that is a class of tensors"),
    ],
    ids=["set", "inside", "local class", "keys", "sparse", "conjugate", "subclass"],
)
def test_a_value_that_cannot_be_sent_names_its_module_and_its_class(value, said):
    with pytest.raises(ConfigError, match=said):
        Description.of(value, "layer")


def test_a_tuple_of_torchs_own_is_refused_or_arrives_as_it_was():
    """torch 2.15 knows the parts of such a tuple, and earlier ones do not."""
    value = torch.arange(4.0).view(2, 2).max(0)
    try:
        description, tensors = Description.of(value, "layer")
    except ConfigError as error:
        assert "returns max, but only tensors" in str(error)
    else:
        received = Description.decode(description.encode()).value(tensors)
        assert type(received) is type(value)
        assert [each.tolist() for each in received] == [each.tolist() for each in value]
