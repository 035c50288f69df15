"""Self-checks of a build: rows, passes and tiles verified, and bisecting the pipeline.

Must not know: requests, schedulers.
"""
