"""Hosts that connected, hosts that run something else, and the ranks of each; pure values."""

import json
from dataclasses import asdict

import pytest

from lockstep.config.checks import from_plain
from lockstep.errors import ConfigError
from lockstep.launch.hosts.roll_call import Hello, Plan, absent, compare


def hello(node, ranks=2, **settings):
    return Hello(node=node, name=f"n{node}", ranks=ranks, instance=str(node), settings=settings)


def test_the_missing_hosts_are_named_and_those_that_came():
    error = absent({0: hello(0), 2: hello(2)}, 4, 60)
    assert str(error).startswith(
        "Not every host connected within 60 s. missing: host 1 (node-rank 1), host 3 (node-rank 3); "
        "connected: 0 (n0), 2 (n2)."
    )


def test_every_setting_that_differs_is_named_with_its_hosts():
    hosts = {
        0: hello(0, torch="2.13.0", threads="1", lr="0.1"),
        1: hello(1, torch="2.12.1", threads="1", lr="0.1"),
        2: hello(2, torch="2.13.0", threads="1"),
    }
    with pytest.raises(ConfigError) as caught:
        compare(hosts)
    assert "lr is 0.1 on hosts 0, 1, not set on host 2; torch is 2.13.0 on hosts 0, 2, 2.12.1 on host 1." in str(
        caught.value
    )
    assert "threads" not in str(caught.value)


def test_many_differences_are_counted():
    with pytest.raises(ConfigError, match="and 14 more"):
        compare(
            {
                0: hello(0, **{f"s{n}": "a" for n in range(20)}),
                1: hello(1, **{f"s{n}": "b" for n in range(20)}),
            }
        )


def test_hosts_that_are_alike_pass():
    compare({0: hello(0, torch="2"), 1: hello(1, ranks=4, torch="2")})


@pytest.mark.parametrize(
    "change",
    [{"node": -1}, {"node": "1"}, {"ranks": 0}, {"ranks": 1 << 20}, {"settings": 3}, {"node": None}],
)
def test_what_is_no_host_is_refused(change):
    with pytest.raises((ValueError, TypeError)):
        Hello.from_json({**asdict(hello(1)), **change})


def test_a_plan_comes_through_json_as_it_was():
    plan = Plan(name="n0", run_id="r", ranks={0: 2, 1: 3}, rendezvous="tcp://10.0.0.1:5", shared={"a": [1]})
    assert from_plain(Plan, json.loads(json.dumps(asdict(plan)))) == plan
