"""What an engine should write, and what is wrong with how it was written."""
