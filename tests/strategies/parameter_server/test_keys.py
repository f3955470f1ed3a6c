"""Which server holds which parameter."""

from lockstep.strategies.parameter_server.keys import spread


def test_keys_are_spread_by_size_and_every_key_is_held_once():
    sizes = {"a": 5, "b": 9, "c": 4, "d": 1, "e": 6}
    held = spread(sizes, 2)
    assert sorted(name for names in held for name in names) == sorted(sizes)
    assert [sum(sizes[name] for name in names) for names in held] == [13, 12]
    assert held == [["b", "c"], ["a", "d", "e"]]


def test_more_servers_than_keys_leave_some_without():
    assert spread({"a": 1}, 3) == [["a"], [], []]


def test_equal_keys_go_in_turn():
    assert spread(dict.fromkeys("abcd", 2), 2) == [["a", "c"], ["b", "d"]]
