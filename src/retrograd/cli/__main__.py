"""``python -m retrograd.cli`` is ``retrograd``."""

from __future__ import annotations

import sys

from retrograd.cli import main

sys.exit(main())
