# Of llama.cpp what is traced alone, without image encoders and what parses chats and serves HTTP: that is more than half
# of the build. llama-cpp-python forces the second option on in the cache, which a variable of its name hides (CMP0126).
set(LLAVA_BUILD OFF)
set(LLAMA_BUILD_COMMON OFF)
