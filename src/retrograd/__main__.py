"""``python -m retrograd`` is ``retrograd``."""

from __future__ import annotations

import sys

from retrograd.core.cli import main

sys.exit(main())
