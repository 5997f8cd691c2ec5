"""One engine held against itself: two traces of it, or all ways in which it can be run."""
