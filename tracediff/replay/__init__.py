"""Local error: every op of a trace recomputed in float64 from that trace's own recorded inputs."""
