"""Arithmetic inside the model that must not depend on the layout: precision, keyed randomness, BatchNorm."""
