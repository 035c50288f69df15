"""`LLM` and batch files: requests of a program, without HTTP of its own.

Must not know: the command line.
"""
