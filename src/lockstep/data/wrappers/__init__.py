"""Data sets around another data set: other samples, another order, or whole micro-batches changed."""
