"""The passes that rewrite a graph, one file each; their order is in `passes/pipeline.py`.

Must not know: how a bundle is built, devices other than through the target.
"""
