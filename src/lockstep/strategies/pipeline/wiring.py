"""The channels of a pipeline's ranks: activations run from stage to stage, gradients run back."""

from __future__ import annotations

import torch
import torch.distributed as dist

from lockstep.collectives import let_go_of_groups
from lockstep.strategies.groups import Groups
from lockstep.strategies.pipeline.channel import Channel
from lockstep.strategies.pipeline.stage import Neighbours

_ON, _BACK, _ON_AROUND, _BACK_AROUND, _ANSWER = range(5)
"""Tags: forward and backward, between neighbours and from the last rank around to the first; outputs to all ranks."""


class Wiring:
    """The groups that the ranks of one pipeline talk over.

    Args:
        groups: of the mesh, with an axis ``pipeline``.
        device: where activations are.
        around: whether a rank holds several stages, so that the last rank talks to the first.
    """

    def __init__(self, groups: Groups, device: torch.device, *, around: bool) -> None:
        line = groups.along("pipeline")
        assert line is not None
        self.group: dist.ProcessGroup = line
        self.place, self.length = groups.coordinate("pipeline"), groups.size("pipeline")
        self.ranks: list[int] = dist.get_process_group_ranks(line)
        self._device = device
        tags = (_ON, _BACK, *((_ON_AROUND, _BACK_AROUND) if around else ()), _ANSWER)
        self._groups = dict.fromkeys(range(5), line)
        self._channels: list[Channel] = []
        if device.type == "cuda":
            self._groups |= {tag: self._own_group(groups) for tag in tags}

    def neighbours(self, stage: int, names: list[str]) -> Neighbours:
        """The channels of a stage of this rank.

        Args:
            stage: its number.
            names: of the last module of each stage.
        """
        before = after = None
        if stage > 0:
            around = self.place == 0
            before = self._pair((self.place - 1) % self.length, around, names[stage - 1])
        if stage < len(names) - 1:
            around = self.place == self.length - 1
            after = self._pair((self.place + 1) % self.length, around, names[stage])
        return Neighbours(before, after)

    def answers(self, name: str) -> dict[int, Channel]:
        """For the output of the whole model: to every other rank on the last one, from the last one on the others.

        Args:
            name: of the last module.
        """
        last = self.length - 1
        peers = range(last) if self.place == last else [last]
        return {peer: self._channel(_ANSWER, peer, name) for peer in peers}

    @property
    def bytes_sent(self) -> int:
        """By this rank, over all channels."""
        return sum(channel.bytes_sent for channel in self._channels)

    def release(self) -> None:
        """Lets go of the groups, here and in all channels."""
        let_go_of_groups(self, *self._channels)
        self._groups.clear()

    def _pair(self, peer: int, around: bool, name: str) -> tuple[Channel, Channel]:
        on, back = (_ON_AROUND, _BACK_AROUND) if around else (_ON, _BACK)
        return self._channel(on, peer, name), self._channel(back, peer, name)

    def _channel(self, tag: int, peer: int, name: str) -> Channel:
        channel = Channel(self._groups[tag], self.ranks[peer], tag, self._device, name)
        self._channels.append(channel)
        return channel

    def _own_group(self, groups: Groups) -> dist.ProcessGroup:
        """One more group of the ranks of this pipeline. Collective over the world."""
        everyone = dist.get_process_group_ranks(groups.world)
        mine: dist.ProcessGroup | None = None
        for line in groups.mesh.lines("pipeline"):
            group = dist.new_group([everyone[rank] for rank in line])
            mine = group if groups.rank in line else mine
        assert mine is not None
        return mine
