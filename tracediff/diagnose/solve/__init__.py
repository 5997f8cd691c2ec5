"""Solves for a mistake: at a faulty op all is known but what the engine computed instead."""
