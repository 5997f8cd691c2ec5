"""Trainer against rollout: how far apart the log-probabilities of the same tokens are, and what makes them so.

`mismatch` has the stages: `logprobs` of both, what `processed` ones were made of, and the `shares` of ops in the gap,
for which both `sides` are replayed in `lanes` beside each other. `words` say it.
"""
