"""Running statistics and other buffers that a forward pass changes."""

from lockstep.buffers.devices import RunningBuffersOnDevices
from lockstep.buffers.finding import has_batch_norm
from lockstep.buffers.running import RunningBuffers

__all__ = ["RunningBuffers", "RunningBuffersOnDevices", "has_batch_norm"]
