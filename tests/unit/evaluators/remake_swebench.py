"""Write `logs/swebench.json` anew; look at what changed before it is kept.

Wants swebench beside it: `pip install --no-deps swebench`, then
`python -m tests.unit.evaluators.remake_swebench`.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from evaluators.parsers.base import clean
from evaluators.parsers.registry import PARSERS
from evaluators.parsers.swebench import load_registry, parse_with_swebench

LOGS = Path(__file__).parent / "logs"


def cases_of(log: Path) -> Iterator[dict[str, Any]]:
    """Yield what the parsers that we have too make of a log, parsers that agree together."""
    told: dict[str, list[str]] = {}
    for name in sorted(set(load_registry()) & set(PARSERS)):
        results = parse_with_swebench(name, clean(log.read_text(encoding="utf-8")))
        if results:
            told.setdefault(json.dumps(results, sort_keys=True), []).append(name)
    for results_text, names in told.items():
        yield {"parsers": names, "results": json.loads(results_text)}


if __name__ == "__main__":
    found = {log.name: list(cases_of(log)) for log in sorted(LOGS.glob("*.log"))}
    kept = {name: cases for name, cases in found.items() if cases}
    text = json.dumps(kept, indent=1, ensure_ascii=False, sort_keys=True)
    (LOGS / "swebench.json").write_text(text + "\n", encoding="utf-8")
