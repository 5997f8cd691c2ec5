"""The sections of the terminal report: each a function from the result to what is printed, or to nothing."""
