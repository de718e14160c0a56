"""Who runs a job's groups, where it is found, and how agents talk to it."""
