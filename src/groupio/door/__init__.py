"""Doors: views of a committed epoch in another format, made from its manifest and segments.

:mod:`.publish` makes one; :mod:`.contents` finds what it shows, :mod:`.pieces` where the bytes
already lie in a form that torch reads, :mod:`.side` copies the rest, :mod:`.values` pickles values.
"""
