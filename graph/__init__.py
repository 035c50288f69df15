"""Model specs, tracing, partition, tiles, bundles and weights."""
