"""Makes the model of a job, which must be one."""

from __future__ import annotations

from torch import nn

from lockstep.errors import ConfigError
from lockstep.job.component import Component
from lockstep.job.instantiate import instantiate


def make_model(component: Component) -> nn.Module:
    """What the import path makes of its arguments; ``ConfigError`` where that is no ``torch.nn.Module``."""
    model = instantiate(component, name="model")
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model: {component.target} made a {type(model).__name__}, not a torch.nn.Module.")
    return model
