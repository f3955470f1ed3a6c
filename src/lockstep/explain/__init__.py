"""Pictures of who does what, for given numbers: as text, as SVG, and as values.

A subject is a folder with three files: ``facts`` computes what is true, by the functions with which the library trains;
``terminal`` and ``drawing`` write it down.
"""
