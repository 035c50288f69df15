"""The `girih` command: verbs, their help, completion in a shell.

Hydra is used here only, through `conf/`. Must not know: how a verb does its work.
"""
