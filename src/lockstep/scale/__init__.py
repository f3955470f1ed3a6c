"""Measures how a job's training scales over devices and strategies, says what limits it, and predicts larger worlds."""
