"""Measures how training scales over devices and strategies, names what limits it, and predicts larger worlds."""
