"""Which rank reads which samples."""

from lockstep.explain.samples.drawing import samples_svg
from lockstep.explain.samples.facts import Part, Samples, Scheme, explain_samples
from lockstep.explain.samples.terminal import samples_text

__all__ = ["Part", "Samples", "Scheme", "explain_samples", "samples_svg", "samples_text"]
