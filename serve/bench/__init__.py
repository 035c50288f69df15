"""Load generator: timed requests against any OpenAI-compatible endpoint."""
