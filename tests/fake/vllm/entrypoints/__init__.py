"""A stand-in for vLLM: the command line, the replies and the files of a server with hidden states."""
