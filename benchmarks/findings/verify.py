"""Whether the answers are right: healthy scripts train well, and faulty ones worse, or they say why that is silent.

python benchmarks/findings/verify.py --only 'dead-units/*' --cache /tmp/verified
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

from children import load_first, run_in_child
from corpus import HERE, Case, choose_cases, read_corpus

LIMIT_SECONDS = 120


def run_plainly(case: Case, cache: Path) -> dict[str, object]:
    """Exit code and output of the script, as it is."""
    kept = cache / f"{hashlib.sha256(case.text.encode()).hexdigest()[:20]}.json"
    if not kept.exists():
        folder = Path(tempfile.mkdtemp())  # a TemporaryDirectory would be emptied when the child ends
        script, log = folder / "train.py", folder / "log.txt"
        script.write_text(case.text)
        code = run_in_child(script, log, lambda: None, LIMIT_SECONDS)
        kept.write_text(json.dumps({"code": code, "printed": log.read_text(errors="replace")[-300:]}))
        shutil.rmtree(folder)
    read: dict[str, object] = json.loads(kept.read_text())
    return read


def judge(case: Case, found: dict[str, object]) -> str:
    """What is wrong with the answer; empty when nothing is."""
    good = found["code"] == 0 and case.trained_well(str(found["printed"]))
    if not case.slug:
        return "" if good else "does not train well"
    if good and not case.silent:
        return "trains well, and no reason is given why it is a fault"
    return "is said to be silent, and trains badly" if case.silent and not good else ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", default=["*"], help="patterns of names")
    parser.add_argument("--corpus", type=Path, default=HERE, help="folder of scripts and answers")
    parser.add_argument("--cache", type=Path, default=Path(tempfile.gettempdir()) / "verified")
    arguments = parser.parse_args()
    arguments.cache.mkdir(parents=True, exist_ok=True)
    cases = choose_cases(read_corpus(arguments.corpus), arguments.only)
    load_first(case.text for case in cases)
    wrong = 0
    for case in cases:
        found = run_plainly(case, arguments.cache)
        said = judge(case, found)
        last = (str(found["printed"]).strip().splitlines() or [""])[-1]
        died = f"exit code {found['code']}" if found["code"] else ""
        print(f"{'WRONG' if said else 'ok   '} {case.name:50s} {last[-100:]} {died} {said}", flush=True)
        wrong += bool(said)
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main()
