"""Scripts of other libraries, with the order and sums of Lockstep: accelerate, transformers, lightning, ray."""
