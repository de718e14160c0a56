"""``python -m groupio.demo``."""

from __future__ import annotations

import sys

from groupio.demo.command import main

sys.exit(main())
