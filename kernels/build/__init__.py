"""Builds and loads the C++ kernel library: its sources and flags as data, and its self-test.

Must not know: what calls the library.
"""
