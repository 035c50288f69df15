"""The custom ops of namespace `girih`: schema, shape rule (fake) and torch reference of each.

Must not know: models, steps, which library computes an op.
"""
