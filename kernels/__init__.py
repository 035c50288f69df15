"""Custom operators, attention backends, the KV cache's layout and the CPU kernel library.

Must not know: models, graphs, requests.
"""
