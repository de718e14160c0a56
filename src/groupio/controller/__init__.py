"""The controller of a job: how it is elected and found, and how agents talk to it."""
