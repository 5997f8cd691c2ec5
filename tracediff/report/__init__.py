"""Reports: pure functions of a result. They import `result` and nothing else of the package."""
