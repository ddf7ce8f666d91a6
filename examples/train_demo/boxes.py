"""The tasks: open the box that holds a note, then do what the note says.

The note's code is made when the box is opened, so that the second turn can only be right by what
the command of the first one answered in the sandbox.
"""

import shutil
from pathlib import Path
from typing import Any

NAME = "boxes"
COLOURS = ("red", "blue", "green", "black", "white", "brown", "pink", "gold")
MIB = 1024 * 1024

# One episode as it should go, with a box and a word that no task has. Without it the model never
# opens anything, and there is nothing to learn from.
DEMONSTRATION = [
    {"role": "user", "content": "The note is in the grey box."},
    {"role": "assistant", "content": "open grey"},
    {"role": "user", "content": "The note says: stop\n[exit code: 0]"},
    {"role": "assistant", "content": "stop"},
]

SETUP = r"""set -euo pipefail
mkdir -p /var/lib/boxes
cat > /usr/local/bin/open <<'END'
#!/bin/bash
# open BOX: show the note, if it is in this box.
if [ "$*" != "$(cat /var/lib/boxes/note)" ]; then
    echo "Nothing here."
    exit 1
fi
code=$((RANDOM % 90 + 10))
echo "$* $code" > /var/lib/boxes/opened
echo "The note says: code $code"
END
cat > /usr/local/bin/code <<'END'
#!/bin/bash
# code NUMBER: say the code that the note gave.
echo "$*" > /var/lib/boxes/said
echo "Thank you."
END
chmod 755 /usr/local/bin/open /usr/local/bin/code
"""

CHECK = '''"""Half a point for the right box, half for the code that its note gave."""

import json
from pathlib import Path

BOXES = Path("/var/lib/boxes")
REWARDS = Path("/logs/verifier")


def words(name: str) -> list[str]:
    """Return the words of a file that the agent may have left, replaced or spoilt."""
    try:
        with (BOXES / name).open("rb") as file:
            return file.read(1000).decode("utf-8", "replace").split()
    except OSError:
        return []


def main() -> None:
    """Write the rewards."""
    wanted = Path("/tests/box.txt").read_text().strip()
    box, code = (words("opened") + ["", ""])[:2]
    opened = box == wanted
    said = opened and code != "" and words("said") == [code]
    rewards = {"reward": (opened + said) / 2, "opened": float(opened), "said": float(said)}
    REWARDS.mkdir(parents=True, exist_ok=True)
    (REWARDS / "reward.json").write_text(json.dumps(rewards))
    print(rewards)


main()
'''

TEST = """#!/bin/bash -p
# A clean environment and an isolated interpreter: nothing that the agent left is sourced.
exec /usr/bin/env -i PATH=/usr/sbin:/usr/bin:/sbin:/bin HOME=/nonexistent LANG=C.UTF-8 \\
    /usr/bin/python3 -I -S -B /tests/check.py
"""

TOML = """schema_version = "1.4"

[task]
name = "{name}/{colour}"
description = "Open the {colour} box and do what its note says"

[metadata.evaluator]
range = [0.0, 1.0]
workspace = ["/var/lib/boxes"]

[agent]
timeout_sec = 120.0

[verifier]
timeout_sec = 60.0

[environment]
network_mode = "no-network"
"""


def environment(image: str) -> dict[str, Any]:
    """Return the environment of all boxes, as the catalogue's call takes it."""
    return {
        "name": NAME,
        "description": "A box with a note in it: two turns of one short command each.",
        "image": image,
        "setup": SETUP,
        "agent": "command_line",
        "agent_settings": {"demonstrations": [DEMONSTRATION]},
        "tools": ["bash", "submit"],
        "limits": {"memory_bytes": 512 * MIB, "processes": 64, "disk_bytes": 64 * MIB},
        "evaluator": "script",
    }


def write_tasks(folder: Path) -> Path:
    """Write one task folder a colour in the Harbor layout, in place of what was there."""
    shutil.rmtree(folder, ignore_errors=True)
    for colour in COLOURS:
        files = {
            "task.toml": TOML.format(name=NAME, colour=colour),
            "instruction.md": f"The note is in the {colour} box.",
            "environment/setup.sh": f"set -euo pipefail\necho {colour} > /var/lib/boxes/note\n",
            "tests/test.sh": TEST,
            "tests/check.py": CHECK,
            "tests/box.txt": colour,
        }
        for name, content in files.items():
            path = folder / colour / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(content)
    return folder
