"""Self-checks of a build: rows, passes and tiles against a reference, and bisecting the pipeline.

Must not know: requests, schedulers.
"""
