"""The parts that the benchmarks share: workloads, sides that run a round when told, spread, report."""
