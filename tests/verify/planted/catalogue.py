"""The planted faults, on how many ranks each is run, and its right cause."""

from dataclasses import dataclass

from tests.verify.planted import faults
from tests.verify.planted.loop import Loop

from lockstep.verify import Cause, Diagnosis


@dataclass(frozen=True)
class Fault:
    """A mistaken loop; the class above it is the same loop without the mistake."""

    loop: type[Loop]
    ranks: int
    cause: Cause
    is_in_reference: bool = False
    """True if the reference has the mistake too, since one process suffices for it."""

    @property
    def reference(self) -> type[Loop]:
        return self.loop if self.is_in_reference else self.sound

    @property
    def sound(self) -> type[Loop]:
        return self.loop.__mro__[1]

    @property
    def says(self) -> str:
        return self.loop.__doc__ or ""


FAULTS = (
    Fault(faults.ForgottenEpoch, 2, Cause.EPOCHS),
    Fault(faults.RankDependentSeed, 4, Cause.SEEDS),
    Fault(faults.MeanOfMeans, 2, Cause.LOSS_WEIGHTING),
    Fault(faults.DividedTwice, 2, Cause.GRADIENT_SCALE),
    Fault(faults.UnsynchronisedBuffers, 2, Cause.BUFFERS),
    Fault(faults.OtherLearningRate, 2, Cause.OPTIMIZER),
    Fault(faults.LayerLeftOut, 2, Cause.LEFT_OUT),
    Fault(faults.StaleParameter, 2, Cause.STALE),
    Fault(faults.SwappedStages, 4, Cause.STAGES),
    Fault(faults.OneMask, 2, Cause.SAME_MASKS),
    Fault(faults.PaddedSampler, 4, Cause.REPEATED),
    Fault(faults.ShufflePerRank, 2, Cause.OVERLAP),
    Fault(faults.MissingBroadcast, 4, Cause.START),
    Fault(faults.ClippedFirst, 4, Cause.CLIPPING),
    Fault(faults.SkippedOnOneRank, 2, Cause.SKIPPED),
    Fault(faults.UnscaledAccumulation, 2, Cause.ACCUMULATION),
    Fault(faults.ScheduleTooFast, 2, Cause.SCHEDULE),
    Fault(faults.FrozenOnOneRank, 2, Cause.FROZEN),
    Fault(faults.OtherThreads, 2, Cause.THREADS),
    Fault(faults.OrderOfArrival, 2, Cause.OPERATOR, is_in_reference=True),
    Fault(faults.Fused, 2, Cause.OPTIMIZER),
    Fault(faults.NormPerRank, 2, Cause.BATCH_NORM),
    Fault(faults.NoisePerRank, 2, Cause.AUGMENTATION),
    Fault(faults.NoSampler, 2, Cause.SAME_SHARE),
    Fault(faults.CompressedGradients, 2, Cause.COMPRESSED),
    Fault(faults.RaggedBatchDropped, 2, Cause.LAST_BATCH),
    Fault(faults.CountedCalls, 2, Cause.HIDDEN_STATE),
    Fault(faults.TiedWeightTwice, 2, Cause.REDUCED_TWICE),
    Fault(faults.OwnClassWeights, 2, Cause.CLASS_WEIGHTS),
    Fault(faults.EvalOnOneRank, 2, Cause.MODE),
    Fault(faults.LearningRateTimesWorld, 2, Cause.LEARNING_RATE),
    Fault(faults.LossWithState, 2, Cause.LOSS_STATE),
    Fault(faults.SummedOnly, 2, Cause.GRADIENT_SCALE),
    Fault(faults.LastMicroBatchTwice, 2, Cause.LOSS_WEIGHTING),
    Fault(faults.ReducedEarly, 2, Cause.REDUCED_AGAIN),
    Fault(faults.DecayedTwice, 2, Cause.DECAY),
    Fault(faults.DecayedByHand, 2, Cause.DECAY),
    Fault(faults.OptimizerOfAnotherModel, 2, Cause.NOT_HELD),
    Fault(faults.EmaOnRank0, 2, Cause.BUFFERS),
    Fault(faults.SharedWorkerSeed, 2, Cause.SAME_DRAWS),
    Fault(faults.OtherSeedOnOneRank, 4, Cause.SEEDS),
    Fault(faults.TargetsApart, 2, Cause.TARGETS),
    Fault(faults.OverflowOnOneRank, 2, Cause.OVERFLOW),
    Fault(faults.SkipsABatch, 2, Cause.DROPPED),
    Fault(faults.GradientsKept, 2, Cause.CARRIED),
    Fault(faults.MomentumLost, 2, Cause.OPTIMIZER_STATE),
    Fault(faults.OtherSamplerSeed, 2, Cause.OVERLAP),
)


@dataclass(frozen=True)
class Result:
    """The verdict of verify on a loop."""

    fault: Fault
    found: Diagnosis | None
    sound: Diagnosis | None
    """About the loop without the mistake, on as many ranks."""
    alone: Diagnosis | None
    """About the loop with the mistake where the reference has it too."""

    @property
    def is_found(self) -> bool:
        """True if the mistake was told from rounding."""
        return self.found is not None and self.found.cause is not Cause.REDUCTION_ORDER

    @property
    def is_right(self) -> bool:
        return self.found is not None and self.found.cause is self.fault.cause

    @property
    def is_right_alone(self) -> bool:
        return self.alone is not None and self.alone.cause is self.fault.cause
