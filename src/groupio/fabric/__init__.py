"""Data paths between nodes: TCP, collectives of torch, transfer engines."""
