"""Runs plans: the persistent batch, step inputs, shape buckets, generating and pooling runners.

Must not know: queues, blocks' owners, transports.
"""
