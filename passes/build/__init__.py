"""From a spec to a bundle: the key, the build, building behind a serving engine.

Must not know: requests, schedulers.
"""
