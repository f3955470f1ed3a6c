"""Pure values and functions: no process group is needed to use or to test them."""
