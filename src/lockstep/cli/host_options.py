"""The options of ``lockstep run`` and ``lockstep train`` about several hosts."""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import re
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

from lockstep.errors import ConfigError
from lockstep.launch.hosts import HostOptions, read_token
from lockstep.world import RENDEZVOUS, World

_PLACE = re.compile(r"env://|tcp://.+:\d{1,5}|file:///.+")
_COMPARED_PACKAGES = ("lockstep-train", "torch", "numpy")


def add_host_arguments(parser: argparse.ArgumentParser) -> None:
    """Declares the options."""
    hosts = parser.add_argument_group("several hosts", "the same command on each, with its own --node-rank")
    hosts.add_argument("--nnodes", type=int, metavar="N", help="number of hosts (default: this one alone)")
    hosts.add_argument("--node-rank", type=int, metavar="I", help="number of this host, from 0")
    hosts.add_argument(
        "--master", metavar="HOST:PORT", help="of the host of node-rank 0; it uses PORT and PORT+1"
    )
    hosts.add_argument(
        "--interface",
        default="",
        metavar="NAME",
        help="network interface for the data (default: towards --master)",
    )
    hosts.add_argument(
        "--token-file",
        default="",
        metavar="FILE",
        help="secret that the hosts share (default: LOCKSTEP_TOKEN, else ~/.config/lockstep/token)",
    )
    hosts.add_argument(
        "--start-limit",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="time within which every host must have come (default: 60)",
    )


def add_rendezvous_argument(parser: argparse.ArgumentParser) -> None:
    """Declares ``--rendezvous``."""
    parser.add_argument(
        "--rendezvous",
        default="",
        metavar="PLACE",
        help="where ranks that torchrun, SLURM or MPI started meet: env://, tcp://HOST:PORT of rank 0, or file://PATH",
    )


def take_rendezvous(arguments: argparse.Namespace, world: World) -> World:
    """The world with the meeting place that was asked for, which the environment then holds too.

    Raises:
        ConfigError: it is none, or no other launcher has made this process a rank.
    """
    asked = arguments.rendezvous
    if not asked:
        return world
    if world.launcher == "python":
        raise ConfigError(
            f"--rendezvous {asked} was given, and no launcher has made this process a rank. Start the ranks with "
            "torchrun, SLURM or MPI, or leave it out: Lockstep's own launcher brings its ranks together."
        )
    if not _PLACE.fullmatch(asked):
        raise ConfigError(
            f"--rendezvous {asked!r} is not known. Use env://, tcp://HOST:PORT or file:///ABSOLUTE/PATH."
        )
    os.environ[RENDEZVOUS] = asked
    return dataclasses.replace(world, rendezvous=asked)


def host_options(arguments: argparse.Namespace) -> HostOptions | None:
    """What was asked for, or None for one host.

    Raises:
        ConfigError: an option is missing or does not fit, or there is no token.
    """
    given = {
        "--node-rank": arguments.node_rank is not None,
        "--master": arguments.master is not None,
        "--interface": bool(arguments.interface),
        "--token-file": bool(arguments.token_file),
    }
    if arguments.nnodes in (None, 1):
        if alone := [option for option, is_given in given.items() if is_given and arguments.nnodes is None]:
            raise ConfigError(f"{alone[0]} was given without --nnodes. Say on how many hosts the run is.")
        return None
    absent = [option for option in ("--node-rank", "--master") if not given[option]]
    if absent:
        raise ConfigError(
            f"--nnodes {arguments.nnodes} was given without {' and '.join(absent)}. Start on host I of N: "
            "--nnodes N --node-rank I --master HOST_OF_0:PORT."
        )
    return HostOptions(
        nodes=arguments.nnodes,
        node=arguments.node_rank,
        master=arguments.master,
        interface=arguments.interface,
        start_limit=arguments.start_limit,
        token=read_token(arguments.token_file, os.environ),
    )


def refuse_hosts(arguments: argparse.Namespace, launcher: str) -> None:
    """Refuses the options where another launcher has placed the ranks.

    Raises:
        ConfigError: one was given.
    """
    if arguments.nnodes is not None:
        raise ConfigError(
            f"--nnodes {arguments.nnodes} was given to a rank that {launcher} has started, which has said already "
            f"how many there are. Leave it out, or start without {launcher}."
        )


def common_settings(kind: str, more: Sequence[tuple[str, str]]) -> dict[str, str]:
    """What must be equal on every host: versions, the kind of device, and what the command adds.

    Args:
        kind: ``cpu`` or ``cuda``.
        more: names and values.
    """
    settings = {
        "python": ".".join(platform.python_version_tuple()[:2]),
        "devices": kind,
    }
    for package in _COMPARED_PACKAGES:
        try:
            settings[package] = version(package)
        except PackageNotFoundError:
            settings[package] = "not installed"
    return {**settings, **dict(more)}
