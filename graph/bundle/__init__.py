"""Bundles: the directory a start needs, its key and checksums, and the cache of them.

Must not know: how code is compiled.
"""
