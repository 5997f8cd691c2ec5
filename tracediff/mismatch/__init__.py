"""Trainer against rollout: how far apart the log-probabilities of the same tokens are, and what makes them so."""
