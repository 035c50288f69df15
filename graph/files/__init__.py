"""A model's files: found, fetched and read; what the model is (`ModelSpec`), without torch modules.

Must not know: graphs, tiles, bundles.
"""
