"""Which layouts of a job are compared: all strategies and numbers of devices that fit, or those that were asked for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from lockstep.job.config import JobConfig
from lockstep.mesh import HYBRIDS, Mesh
from lockstep.strategy_options import ONE_PROCESS, STRATEGIES

DEVICES = (1, 2, 4)
"""Numbers of devices that are tried by default, as far as the recipe's micro-batches go."""


@dataclass(frozen=True)
class Layout:
    """A strategy on a number of devices."""

    strategy: str
    devices: int
    mesh: str = ""
    mode: str = ""
    """Of strategy parameter_server, where it is not the synchronous one."""

    @property
    def label(self) -> str:
        """As in ``ddp on 4``."""
        mode = f" ({self.mode})" if self.mode else ""
        return f"{self.mesh or self.strategy}{mode} on {self.devices}"

    @property
    def ranks(self) -> int:
        """How many processes it takes."""
        if self.mesh:
            return Mesh.parse(self.mesh).ranks
        return 1 if self.strategy in ONE_PROCESS else self.devices

    def of(self, config: JobConfig, directory: str) -> JobConfig:
        """The job in this layout, which writes nothing but into ``directory``."""
        training = dataclasses.replace(config.training, strategy=self.strategy, mesh=self.mesh)
        run = dataclasses.replace(
            config.run, devices=f"cpu:{self.devices}", directory=directory, name="verify"
        )
        log = dataclasses.replace(config.log, tensorboard=False, json=False, progress=False)
        checkpoint = dataclasses.replace(config.checkpoint, resume="")
        servers = dataclasses.replace(config.parameter_server, mode=self.mode or "synchronous")
        changed = dataclasses.replace(
            config, training=training, run=run, log=log, checkpoint=checkpoint, parameter_server=servers
        )
        if (option := ONE_PROCESS.get(self.strategy)) is None:
            return changed
        options = dataclasses.replace(getattr(config, self.strategy), **{option: self.devices})
        return dataclasses.replace(changed, **{self.strategy: options})


REFERENCE = Layout("single", 1)


def layouts(
    config: JobConfig, devices: Iterable[int], strategies: Sequence[str], *, fitting: bool = True
) -> list[Layout]:
    """The layouts to be compared with ``REFERENCE``.

    Args:
        config: the job.
        devices: numbers of devices.
        strategies: names; none for all.
        fitting: leave out numbers of devices that the recipe's micro-batches do not go around to.
    """
    found = []
    for count in devices:
        if fitting and count > config.training.micro_batches:
            continue
        for strategy in strategies or STRATEGIES:
            if strategy in ("single", "hybrid") or (count == 1 and strategy != "ddp"):
                continue
            found.append(Layout(strategy, count))
            if strategy == "parameter_server":
                found.append(Layout(strategy, count, mode="asynchronous"))
        if count >= 4 and count % 2 == 0 and (not strategies or "hybrid" in strategies):
            found += [
                Layout("hybrid", count, f"{first}=2,{second}={count // 2}") for first, second in HYBRIDS
            ]
    return found
