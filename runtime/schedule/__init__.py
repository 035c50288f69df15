"""Decides what each step computes: queues, admission, block tables, the prefix cache.

Must not know: torch, tokens' text, how a plan is run.
"""
