"""Causes: known mistakes as small changes to a graph, which plant faults and explain them alike."""
