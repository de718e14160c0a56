"""A store as a program sees it; it needs no agent and no network."""
