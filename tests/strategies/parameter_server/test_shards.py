"""The server of each parameter, and of the rows of a large one."""

import pytest

from lockstep.strategies.parameter_server.shards import Key, Size, spread


def whole(**sizes):
    return {name: Size(1, size) for name, size in sizes.items()}


def names(held):
    return [[key.name for key in keys] for keys in held]


def test_keys_are_spread_by_size_and_every_key_is_held_once():
    assert names(spread(whole(a=5, b=9, c=4, d=1, e=6), 2)) == [["b", "c"], ["a", "d", "e"]]


def test_more_servers_than_keys_leave_some_without():
    assert names(spread(whole(a=1), 3)) == [["a"], [], []]


def test_equal_keys_go_in_turn():
    assert names(spread(whole(a=2, b=2, c=2, d=2), 2)) == [["a", "c"], ["b", "d"]]


def test_a_parameter_that_is_more_than_a_fair_share_is_cut_by_rows():
    """The picture of the module."""
    sizes = {"embedding": Size(6, 60), "head": Size(5, 25), "norm": Size(5, 5)}
    assert spread(sizes, 2) == [
        [Key("embedding", (0, 3)), Key("head")],
        [Key("embedding", (3, 6)), Key("norm")],
    ]


def test_one_server_holds_all_uncut():
    assert spread({"a": Size(4, 100), "b": Size(2, 1)}, 1) == [[Key("a"), Key("b")]]


def test_fewer_rows_than_servers_make_as_many_pieces_as_rows():
    held = spread({"a": Size(2, 100), "b": Size(9, 1)}, 3)
    assert [key for keys in held for key in keys if key.name == "a"] == [Key("a", (0, 1)), Key("a", (1, 2))]
    assert names(held) == [["a"], ["a"], ["b"]]


@pytest.mark.parametrize("servers", [1, 2, 3, 5])
def test_every_row_is_held_once_and_by_no_server_twice(servers):
    sizes = {"a": Size(7, 700), "b": Size(1, 300), "c": Size(4, 90), "d": Size(11, 330), "e": Size(3, 3)}
    held = spread(sizes, servers)
    for name, size in sizes.items():
        rows = [
            row for keys in held for key in keys if key.name == name for row in range(*(key.rows or (0, size.rows)))
        ]
        assert sorted(rows) == list(range(size.rows))
    for keys in held:
        assert len({key.name for key in keys}) == len(keys)
