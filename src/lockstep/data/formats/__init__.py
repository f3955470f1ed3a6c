"""Data sets by file format, each a map-style set that is checked when it is opened."""
