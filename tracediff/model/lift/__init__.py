"""The op graph of any model that llama.cpp runs, lifted from llama.cpp's own."""
