"""A module of the user's, of which a data set reads a variable."""

level = 0
