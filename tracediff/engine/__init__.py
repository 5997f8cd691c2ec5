"""Engines: each runs a model and hands every output to a recorder, which writes the trace."""
