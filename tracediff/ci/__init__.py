"""A gate for continuous integration: what an engine may not get worse at, locked in a file for review."""
