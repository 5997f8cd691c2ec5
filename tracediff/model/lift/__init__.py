"""The op graph of any model that llama.cpp runs, lifted from llama.cpp's own.

What is `described` by a child process comes as `nodes`. `lift` goes through them in order: `rules` say how many make an
op, `patterns` what it computes, and the `lifter` appends it under a name (`naming`), with what it reads (`layout`,
`inputs`, and of `attention` the cache). Before that keys that are `compressed` over blocks are described by tokens.
"""
