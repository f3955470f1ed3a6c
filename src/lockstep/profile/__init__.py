"""Writes down when each rank waits, copies, computes, exchanges and reads ahead, as a trace that browsers show."""
