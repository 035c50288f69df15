"""What every folder may use: errors, progress events, the cache directory, the target.

Must not know: anything else of girih.
"""
