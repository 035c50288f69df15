"""From a model's files to a program that runs steps: specs, tracing, partition, tiles, bundles.

Must not know: passes, requests, schedulers.
"""
