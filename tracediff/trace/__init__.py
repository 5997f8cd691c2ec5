"""The trace: the only thing that engines share. A text file of JSON lines and a binary file beside it."""
