"""Which server holds which parameter: a pure function of their sizes."""

from __future__ import annotations

from collections.abc import Mapping


def spread(sizes: Mapping[str, int], servers: int) -> list[list[str]]:
    """The keys of each server: the largest first, each to the server that has the least so far.

    Args:
        sizes: bytes of each key, in the order of the model.
        servers: how many there are.

    Returns:
        Names by server, each list in the order of the model.
    """
    loads = [0] * servers
    owner: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        server = min(range(servers), key=lambda number: (loads[number], number))
        loads[server] += sizes[name]
        owner[name] = server
    return [[name for name in sizes if owner[name] == server] for server in range(servers)]
