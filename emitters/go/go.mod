module tracediff

go 1.18
