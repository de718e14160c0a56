"""The command line: what it asks is asked through the same interfaces that users have."""
