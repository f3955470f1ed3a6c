"""Lockstep trains a PyTorch model on any number of devices; the result does not depend on how many."""
