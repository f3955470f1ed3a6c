import torch

from lockstep.models.weights import compare


def test_equal_sets_have_no_differences():
    tensors = {"a": torch.ones(2), "b": torch.ones(3)}
    assert not compare(tensors, {name: tensor + 1 for name, tensor in tensors.items()})


def test_each_kind_of_difference_is_told():
    given = {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(2), "e": torch.ones(1)}
    wanted = {"a": torch.ones(2), "b": torch.ones(3), "c": torch.ones(2).double(), "d": torch.ones(1)}
    found = compare(given, wanted)
    assert found
    assert (found.missing, found.unexpected) == (("d",), ("e",))
    assert found.reshaped == ("b [2] instead of [3]",)
    assert found.retyped == ("c torch.float32 instead of torch.float64",)
    assert not compare(given, wanted, dtypes=False).retyped
