"""``python -m groupio.cli`` is the program ``groupio``."""

from __future__ import annotations

from groupio.cli.main import main

if __name__ == "__main__":
    main()
