"""The pass runner and the pipeline; the passes, builds and self-checks are in its parts.

Must not know: requests, devices other than through the target.
"""
