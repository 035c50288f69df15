"""Load generator: timed requests against any OpenAI-compatible endpoint.

Must not know: girih's own engine.
"""
