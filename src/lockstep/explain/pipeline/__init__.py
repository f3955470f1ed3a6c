"""When each rank of a pipeline computes what."""

from lockstep.explain.pipeline.drawing import pipeline_svg
from lockstep.explain.pipeline.facts import Pipeline, Timeline, explain_pipeline
from lockstep.explain.pipeline.terminal import pipeline_text

__all__ = ["Pipeline", "Timeline", "explain_pipeline", "pipeline_svg", "pipeline_text"]
