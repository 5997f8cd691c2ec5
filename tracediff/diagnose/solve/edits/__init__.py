"""Edits of an op's loops: hypotheses that are generated, each priced by what it takes to say it."""
