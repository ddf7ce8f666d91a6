"""Grade a script by running it on trees that it has not seen."""

import contextlib
import os
import signal
import subprocess
import tempfile
import traceback
from pathlib import Path

REWARD = Path("/logs/verifier/reward.txt")


TREES = [
    {"a.txt": "1", "b.md": "2", "deep/er/c.txt": "3"},
    {"my notes.txt": "1", "two  spaces/in here.txt": "2", "x.TXT": "3"},
    {"star*.txt": "1", "[a].txt": "2", "q?/r.txt": "3", "a.txt": "4"},
    {"only.md": "1", "txt": "2"},
    {"-n.txt": "1", "sub/-e.txt": "2", "back\\slash.txt": "3", " lead.txt": "4"},
]


def works(tree: dict[str, str], folder: Path) -> bool:
    """Say whether the script copies exactly the right files and prints their number."""
    source, target = folder / "the source", folder / "new" / "the target"
    for name, content in tree.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(content, encoding="utf-8")
    process = subprocess.Popen(
        ["/bin/bash", "-p", "/app/collect.sh", str(source), str(target)],
        cwd=folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        start_new_session=True,
        env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
    )
    try:
        printed, _ = process.communicate(timeout=8)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    expected = {name: content for name, content in tree.items() if name.endswith(".txt")}
    found = {
        str(path.relative_to(target)): path.read_text(encoding="utf-8")
        for path in target.rglob("*")
        if path.is_file()
    }
    return (process.returncode, printed.strip(), found) == (
        0,
        str(len(expected)).encode(),
        expected,
    )


def grade() -> float:
    """Pay a share for each tree that is collected as it should be."""
    done = 0
    for tree in TREES:
        with tempfile.TemporaryDirectory() as folder:
            try:
                done += works(tree, Path(folder))
            except Exception:
                traceback.print_exc()
    return done / len(TREES)


def main() -> None:
    """Write the reward; output that cannot even be looked at is worth nothing."""
    try:
        reward = grade()
    except Exception:
        traceback.print_exc()
        reward = 0.0
    REWARD.parent.mkdir(parents=True, exist_ok=True)
    for name in ("reward.json", "reward.txt"):
        REWARD.with_name(name).unlink(missing_ok=True)
    REWARD.write_text(f"{reward}\n", encoding="utf-8")
    print(f"reward {reward}")


main()
