"""Checks of the user's code while it runs, for the setting ``checks``: does the result depend on the number of ranks?

rehearsal      the first steps, and a few later ones: a micro-batch is computed again, and must have the same bits
short_step     what a rehearsal computes, and what it restores
findings       what it finds, and the messages with which a run is refused
means          losses and metrics that are not means over samples
agreement      ranks run the same code and hold equal bits
calls          ranks make the same calls; no result is computed from their number
"""
