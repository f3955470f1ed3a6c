"""What devices are connected by: seconds to begin a message, and bytes per second, inside a host and between hosts.

Rates are nominal, in one direction: PCIe 4.0 x16 is 16 GT/s on 16 lanes in 128b/130b; NVLink 4 is half of the 900 GB/s
that NVIDIA states for both directions of an H100; Ethernet and InfiniBand NDR are their line rates (IEEE 802.3, IBTA).
Latencies are assumptions of the usual size, per message of a collective; measure your own where they matter.
"""

from __future__ import annotations

from dataclasses import dataclass

from lockstep.errors import ConfigError, nearest


@dataclass(frozen=True)
class Link:
    """One way from device to device: a message of n bytes takes ``latency + n / rate`` seconds."""

    latency: float
    """Seconds."""
    rate: float
    """Bytes per second."""


@dataclass(frozen=True)
class Interconnect:
    """How a world of devices is connected."""

    name: str
    words: str
    """What it is, for people."""
    inside: Link
    """Between devices of one host; each device has its own."""
    between: Link
    """Between hosts; the devices of a host share it."""
    per_host: int = 8
    """Devices of a host."""


_PCIE = Link(10e-6, 31.5e9)
_NVLINK = Link(5e-6, 450e9)
_WHOLE_WORLD = 1 << 20

PRESETS = {
    each.name: each
    for each in (
        Interconnect("pcie", "PCIe 4.0 x16 throughout", _PCIE, _PCIE, _WHOLE_WORLD),
        Interconnect("nvlink", "NVLink 4 throughout", _NVLINK, _NVLINK, _WHOLE_WORLD),
        Interconnect("ethernet10", "10 Gb Ethernet, hosts of 8 on PCIe", _PCIE, Link(30e-6, 1.25e9)),
        Interconnect("ethernet100", "100 Gb Ethernet, hosts of 8 on PCIe", _PCIE, Link(15e-6, 12.5e9)),
        Interconnect("ethernet400", "400 Gb Ethernet, hosts of 8 on NVLink", _NVLINK, Link(10e-6, 50e9)),
        Interconnect("infiniband", "InfiniBand NDR, hosts of 8 on NVLink", _NVLINK, Link(3e-6, 50e9)),
        Interconnect(
            "internet100",
            "100 Mb internet link, one device each",
            Link(20e-3, 12.5e6),
            Link(20e-3, 12.5e6),
            1,
        ),
    )
}
"""By name."""


def presets(names: str) -> list[Interconnect]:
    """The presets of a comma-separated list; all if it is empty.

    Raises:
        ConfigError: a name is not known.
    """
    words = [word.strip() for word in names.split(",") if word.strip()]
    for word in words:
        if word not in PRESETS:
            raise ConfigError(f"interconnect {word!r} is not known.{nearest(word, tuple(PRESETS))}")
    return [PRESETS[word] for word in words] or list(PRESETS.values())
