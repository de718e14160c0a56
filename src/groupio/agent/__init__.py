"""The one process per node and user that stages, hashes and flushes what its ranks save."""
