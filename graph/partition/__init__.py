"""Splits a lowered graph at opaque ops; equal subgraphs share a tile.

Must not know: compilers, requests.
"""
