"""Values and functions that need no process group, to use or to test them."""
