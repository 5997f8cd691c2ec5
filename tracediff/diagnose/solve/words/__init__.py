"""Edits of loops in the reader's words."""
