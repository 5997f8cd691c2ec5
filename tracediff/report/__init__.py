"""Reports: pure functions of a result. They import `result`, names, and the words of `findings`."""
