"""Chooses tokens: sampling settings of rows, filters, logits processors.

Must not know: plans' order, grammars' libraries.
"""
