"""The paged KV cache: the layout of a block, and which layers share blocks.

Must not know: requests, prefixes, eviction.
"""
