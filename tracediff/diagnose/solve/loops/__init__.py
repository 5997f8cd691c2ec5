"""The mathematics of ops as the loops that engines write, and what runs them all at once."""
