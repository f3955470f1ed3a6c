"""The settings of runs and jobs, and their checks, free of torch."""
