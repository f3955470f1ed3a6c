"""Scripts of other libraries with Lockstep's order and sums: ``accelerate``, ``transformers``, ``lightning``."""
