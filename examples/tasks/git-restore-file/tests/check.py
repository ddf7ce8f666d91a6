"""Grade a repository through git's plumbing, without trusting its configuration."""

import subprocess
import traceback
from pathlib import Path

REWARD = Path("/logs/verifier/reward.txt")


def output(path: str) -> str:
    """Return the text of a plain file that the agent left; empty when there is none."""
    file = Path(path)
    if not file.is_file() or file.stat().st_size > 1_000_000:
        return ""
    return file.read_bytes().decode("utf-8", errors="replace")


OLD_HEAD = "b6ff1e71c4843802416dbfe2dbcba39263cd08fc"
CONTENT = b"[limits]\nconnections = 50\ntimeout = 30\n"


def git(*arguments: str) -> bytes:
    """Return what git's plumbing prints about the repository; empty when it fails."""
    command = [
        "/usr/bin/git",
        "-c",
        "safe.directory=*",
        "-c",
        "core.fsmonitor=false",
        "-c",
        "core.hooksPath=/dev/null",
        "--no-replace-objects",
        "-C",
        "/app/repo",
    ]
    environment = {
        "PATH": "/usr/bin:/bin",
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CONFIG_GLOBAL": "/dev/null",
        "HOME": "/nonexistent",
    }
    done = subprocess.run(
        [*command, *arguments], env=environment, capture_output=True, timeout=20, check=False
    )
    return done.stdout if done.returncode == 0 else b""


def grade() -> float:
    """Pay half for the file in the working tree, in full for the clean commit."""
    restored = output("/app/repo/config/limits.ini").encode() == CONTENT
    committed = git("cat-file", "blob", "main:config/limits.ini") == CONTENT
    kept = git("merge-base", OLD_HEAD, "main").decode().strip() == OLD_HEAD
    changed = git("diff-tree", "-r", "--no-ext-diff", "--name-only", OLD_HEAD, "main").split()
    if restored and committed and kept and changed == [b"config/limits.ini"]:
        return 1.0
    return 0.5 if restored and kept else 0.0


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
