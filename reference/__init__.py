"""The llama.cpp engine. It runs in a child process: `python -m tracediff_reference`, a request on stdin."""
