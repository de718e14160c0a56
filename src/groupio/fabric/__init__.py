"""How bytes move between nodes: TCP, collectives of torch, transfer engines."""
