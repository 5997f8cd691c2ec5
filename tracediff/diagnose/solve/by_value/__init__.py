"""What is found by value: right values, or numbers of the file, in other places or through another function."""
