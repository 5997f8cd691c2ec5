"""Two traces to pairs, and pairs to metrics: statistics, drift, logits, vital signs. No thresholds, no torch."""
