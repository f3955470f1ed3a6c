"""The places of ranks when training is parallel in more than one way."""

import pytest

from lockstep.core.mesh import HYBRIDS, Mesh, hybrid_mesh
from lockstep.errors import ConfigError


def test_the_last_axis_runs_fastest():
    mesh = Mesh.parse("data=2,pipeline=3")
    assert mesh.ranks == 6
    assert [(mesh.coordinate("data", r), mesh.coordinate("pipeline", r)) for r in range(6)] == [
        (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2),
    ]  # fmt: skip
    assert mesh.ranks_along("pipeline", 4) == [3, 4, 5]
    assert mesh.ranks_along("data", 4) == [1, 4]


def test_the_lines_of_an_axis_hold_every_rank_once():
    mesh = Mesh.parse("data=2,tensor=2,pipeline=2")
    for axis in ("data", "tensor", "pipeline"):
        lines = mesh.lines(axis)
        assert sorted(rank for line in lines for rank in line) == list(range(8))
        for line in lines:
            assert all(mesh.ranks_along(axis, rank) == line for rank in line)


def test_devices_of_one_process_take_no_ranks():
    mesh = Mesh.parse("data=2,layers=3")
    assert mesh.ranks == 2
    assert mesh.size("layers") == 3
    assert mesh.ranks_along("data", 1) == [0, 1]
    assert mesh.coordinate("layers", 1) == 0


def test_an_axis_of_size_one_is_one():
    mesh = Mesh.parse("data=1,pipeline=2")
    assert (mesh.size("data"), mesh.size("pipeline"), mesh.ranks) == (1, 2, 2)


def test_an_axis_the_mesh_lacks_has_size_one():
    mesh = Mesh.single("data", 4)
    assert mesh.size("pipeline") == 1
    assert mesh.coordinate("pipeline", 3) == 0
    assert str(mesh) == "data=4"


def test_a_world_of_another_size_is_refused_with_the_factors_that_fit():
    with pytest.raises(
        ConfigError,
        match=r"data=2,pipeline=2 takes 4 processes and 6 .*data=2,pipeline=3; data=3,pipeline=2;",
    ):
        Mesh.parse("data=2,pipeline=2").check_world(6)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("dta=2", r"names the axis 'dta'\. Did you mean 'data'"),
        ("data=2,data=2", "names the axis 'data' twice"),
        ("data", r"gives the axis 'data' the size ''; write for example data=2"),
        ("data=0", "the size '0'"),
        ("data=-1", "the size '-1'"),
        ("data=two", "the size 'two'"),
        ("", "names the axis ''"),
    ],
)
def test_a_mesh_that_is_none_is_refused(text, said):
    with pytest.raises(ConfigError, match=said):
        Mesh.parse(text)


def test_axes_that_go_together_may_come_in_any_order():
    for first, second in HYBRIDS:
        assert str(hybrid_mesh(f"{first}=2,{second}=3")) == f"{first}=2,{second}=3"
        assert str(hybrid_mesh(f"{second}=3,{first}=2")) == f"{second}=3,{first}=2"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "data=2,fsdp=2",
            r"cannot lay out the mesh data=2,fsdp=2\. Use one like data=N,layers=N; .*fsdp=N,pipeline=N\.$",
        ),
        ("data=2,pipeline=2,tensor=2", r"cannot lay out"),
        ("data=4", r", or strategy 'ddp' without a mesh\.$"),
        ("fsdp=4", r", or strategy 'fsdp' without a mesh\.$"),
    ],
)
def test_axes_that_do_not_go_together_are_refused_with_those_that_do(text, said):
    with pytest.raises(ConfigError, match=said):
        hybrid_mesh(text)
