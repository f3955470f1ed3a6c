"""What ranks really did when, from the timeline that a run wrote."""

from lockstep.explain.timeline.drawing import timeline_svg
from lockstep.explain.timeline.facts import Trace, explain_timeline
from lockstep.explain.timeline.terminal import timeline_text

__all__ = ["Trace", "explain_timeline", "timeline_svg", "timeline_text"]
