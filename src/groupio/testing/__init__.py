"""Tools to test against groupio: conformance suites, a simulated world, invariants.

Nothing here runs in production. The suites need pytest, which groupio does not install.
"""
