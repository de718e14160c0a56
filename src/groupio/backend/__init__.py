"""Stores, behind one interface of blocking calls.

:mod:`groupio.backend.base` states the interface and what is durable when a call returns;
:mod:`groupio.backend.posix` is the store on a file system. Every backend passes the suite of
:mod:`groupio.testing.backend_suite`.
"""
