"""Each process runs its whole share of a step in one forward pass, as SyncBatchNorm over the global batch needs.

    micro-batches        k0  k1  k2  k3  k4  k5  k6  k7
    rank 0 of 2          [k0 k2 k4 k6]  one forward  <-- statistics of every BatchNorm -->  loss of each micro-batch
    rank 1 of 2          [k1 k3 k5 k7]  one forward      over the rows of both ranks        loss of each micro-batch

Level B: bounded against one forward over the global batch on one device, whatever the number of processes.
"""

from __future__ import annotations

from lockstep.strategies.one_forward.strategy import SyncedDistributedDataParallel, SyncedSingle

__all__ = ["SyncedDistributedDataParallel", "SyncedSingle"]
