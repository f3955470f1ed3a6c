"""Who sends what to whom when gradients are summed."""

from lockstep.explain.traffic.drawing import traffic_svg
from lockstep.explain.traffic.facts import Message, Moment, Traffic, Way, explain_traffic, ring_chunk
from lockstep.explain.traffic.terminal import traffic_text

__all__ = [
    "Message",
    "Moment",
    "Traffic",
    "Way",
    "explain_traffic",
    "ring_chunk",
    "traffic_svg",
    "traffic_text",
]
