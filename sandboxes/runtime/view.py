"""Give a local sandbox's folders their own names: /app, /tests and /logs, without any isolation.

A tool of convenience, no boundary: in a user and mount namespace the host's directories are put
together anew, with those of the sandbox's folder in place of the host's. The host's own files stay
reachable and writable as far as the account may.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence

OWN_FOLDERS = ("app", "logs", "setup", "solution", "tests")

# $1 the sandbox's folder, $2 an empty folder to put the view together in, then the program.
# Its own folders, and what the host has no name for, come from the sandbox; the rest is the host's.
_SCRIPT = """
set -e
folder=$1 view=$2
shift 2
for name in OWN; do mkdir -p "$folder/$name"; done
mkdir -p "$view"
mount -t tmpfs -o mode=755 tmpfs "$view"
for path in "$folder"/*; do
  name=${path##*/}
  case " OWN " in *" $name "*) ;; *) [ ! -e "/$name" ] || continue ;; esac
  if [ -d "$path" ]; then mkdir "$view/$name"; else : > "$view/$name"; fi
  mount --bind "$path" "$view/$name"
done
for path in /*; do
  name=${path##*/}
  if [ -e "$view/$name" ]; then continue
  elif [ -L "$path" ]; then cp -P "$path" "$view/$name"
  elif [ -d "$path" ]; then mkdir "$view/$name"; mount --rbind "$path" "$view/$name"
  fi
done
exec chroot "$view" "$@"
""".replace("OWN", " ".join(OWN_FOLDERS))


def find_unshare() -> str | None:
    """Return util-linux's unshare, or None where there is none."""
    return shutil.which("unshare", path="/usr/sbin:/usr/bin:/sbin:/bin")


def probe_argv(unshare: str) -> list[str]:
    """Return the command line that ends with 0 where views can be made."""
    return [unshare, "-U", "-r", "-m", "--", "/bin/true"]


def view_argv(unshare: str, folder: str, view: str, argv: Sequence[str]) -> list[str]:
    """Return the command line that runs `argv` with the folder's directories at the root."""
    return [unshare, "-U", "-r", "-m", "--", "/bin/sh", "-c", _SCRIPT, "sh", folder, view, *argv]
