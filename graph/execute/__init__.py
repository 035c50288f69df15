"""The bound program: weights, KV memory, recurrent states, `run`, and graph replay of fixed shapes.

Must not know: requests, sampling.
"""
