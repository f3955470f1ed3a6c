"""Pictures of what each rank does, for given numbers: as values, as text and as SVG.

Each subject is a file: ``explain_*`` computes the facts with the functions that the library trains with, and ``*_text``
and ``*_svg`` write them.
"""
