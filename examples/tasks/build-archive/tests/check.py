"""Grade a zip application by its members and by running it."""

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import traceback
import zipfile
from pathlib import Path

REWARD = Path("/logs/verifier/reward.json")


def output(path: str) -> str:
    """Return the text of a plain file that the agent left; empty when there is none."""
    file = Path(path)
    if not file.is_file() or file.stat().st_size > 1_000_000:
        return ""
    return file.read_bytes().decode("utf-8", errors="replace")


ARCHIVE = "/app/dist/greet.pyz"
SOURCES = {
    f"greet/{name}": Path("/tests/expected", name).read_text(encoding="utf-8")
    for name in ("__init__.py", "cli.py", "words.py")
}


def members() -> dict[str, str]:
    """Return the archive's files by name; empty when there is no sane archive."""
    file = Path(ARCHIVE)
    if not file.is_file() or file.stat().st_size > 1_000_000:
        return {}
    with zipfile.ZipFile(file) as archive:
        entries = [entry for entry in archive.infolist() if not entry.is_dir()]
        if len(entries) > 50 or sum(entry.file_size for entry in entries) > 1_000_000:
            return {}
        return {
            entry.filename: archive.read(entry).decode("utf-8", errors="replace")
            for entry in entries
        }


def run(*arguments: str) -> str:
    """Return what the archive prints; empty when it fails or does not end."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.Popen(
            ["/usr/bin/python3", "-I", "-S", "-B", ARCHIVE, *arguments],
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            start_new_session=True,
            env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"},
        )
        try:
            printed, _ = process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            return ""
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
    return printed.decode("utf-8", errors="replace") if process.returncode == 0 else ""


def grade() -> dict[str, float]:
    """Pay in full when all holds, a quarter for each part otherwise."""
    held = members()
    expected = {*SOURCES, "greet/_version.py", "__main__.py"}
    unchanged = all(output(f"/app/src/{name}") == text for name, text in SOURCES.items())
    unchanged = unchanged and not Path("/app/src/greet/_version.py").exists()
    parts = {
        "members": float(set(held) == expected),
        "sources": float(all(held.get(name) == text for name, text in SOURCES.items())),
        "version": float(held.get("greet/_version.py", "").strip() == 'VERSION = "1.4.2"'),
        "runs": float(
            run("--version") == "greet 1.4.2\n" and run("Ada", "Bo") == "Hello, Ada!\nHello, Bo!\n"
        ),
    }
    reward = sum(parts.values()) / len(parts) if unchanged else 0.0
    return {"reward": reward, **parts}


def main() -> None:
    """Write the rewards; output that cannot even be looked at is worth nothing."""
    try:
        rewards = grade()
    except Exception:
        traceback.print_exc()
        rewards = {"reward": 0.0}
    REWARD.parent.mkdir(parents=True, exist_ok=True)
    for name in ("reward.json", "reward.txt"):
        REWARD.with_name(name).unlink(missing_ok=True)
    REWARD.write_text(json.dumps(rewards) + "\n", encoding="utf-8")
    print(f"rewards {rewards}")


main()
