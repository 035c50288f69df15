"""The engine core: requests in, one step at a time, outputs out.

Must not know: transports, HTTP, what a runner computes.
"""
