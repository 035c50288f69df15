"""From a configuration to a running engine: program, binding, assembly.

Must not know: HTTP, Hydra.
"""
