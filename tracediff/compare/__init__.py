"""Two traces to pairs, and pairs to metrics: statistics, drift, logits, vital signs. No thresholds, no torch.

`align` pairs records by name and shape; `measure` has the `metrics` of each pair, and `sides` makes one result of
several ranks. `tokens`, `logits` and `vital_signs` are of whole traces, `storage` of what was judged.
"""
