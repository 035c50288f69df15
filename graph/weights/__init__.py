"""Weights: a checkpoint's tensors, their renames, and loading them as a weight plan says.

Must not know: tracing, requests.
"""
