"""Compiles tiles: Inductor's options, a pool of compiling processes, and their counts.

`inductor.py` alone touches `torch._inductor`. Must not know: models, passes.
"""
