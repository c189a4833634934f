"""Random numbers that can be drawn again."""

from __future__ import annotations

import hashlib

from retrograd.rules.site_state import SiteState


def next_seed(seed: int, state: SiteState) -> int:
    """A new seed for each draw at each site: from the rule's seed, the site, and how often it has drawn there.

    So a draw does not depend on what other rules or the training draw, and a checkpoint needs one number to go on.
    """
    draws: int = state.get("draws", 0)
    state.put("draws", draws + 1)
    text = f"{seed} {draws} {state.site}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1
