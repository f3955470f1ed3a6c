"""The error tree and its exit codes, and the suggestion for an unknown name."""

import pytest

from lockstep import errors
from lockstep.errors import nearest


@pytest.mark.parametrize(
    ("kind", "code"),
    [
        ("ConfigError", 2),
        ("CheckpointMismatch", 2),
        ("DataError", 3),
        ("CheckpointError", 3),
        ("RankError", 4),
        ("ReplicaError", 4),
        ("StallError", 5),
        ("NonFiniteError", 6),
    ],
)
def test_every_error_has_its_exit_code(kind, code):
    error = getattr(errors, kind)
    assert issubclass(error, errors.LockstepError)
    assert error.exit_code == code


def test_the_nearest_name_is_suggested_and_numbers_are_sorted_as_numbers():
    assert nearest("dpd", ["ddp", "fsdp"]) == " Did you mean 'ddp'? Known: ddp, fsdp."
    assert nearest("zzz", ["layer10", "layer2"]) == " Known: layer2, layer10."
