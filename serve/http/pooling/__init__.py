"""Routes of models that embed or classify: embeddings, scores, rankings, classes.

Must not know: routes that generate.
"""
