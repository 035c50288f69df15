"""Graphs as data: canonical text, node order, the partitioned program, tile files, weight plans.

Must not know: transformers, Inductor, where a graph comes from.
"""
