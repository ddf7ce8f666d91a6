"""Take a repository's own diff out of one sandbox and bring it into another.

All that runs where the agent worked yields is a diff. In the prepared sandbox git puts the tree
that the diff describes together in an index of its own, made from `base_commit`: it therefore
applies whatever setups changed in the working tree, and git itself refuses paths that leave the
repository, lead through a symbolic link or into `.git`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

HEADER = b"prorl-patch "
# Modules that a test runner imports by these names: where the repository has none, a new one would
# take the place of the installed.
SHADOWS = tuple(
    f"{name}{end}"
    for name in ("pytest", "_pytest", "py", "pluggy", "iniconfig", "unittest", "nose", "xdist")
    for end in (".py", "/**")
)
_STEERING = re.compile(
    rb"PYTEST_[A-Z_]+|pytest_[a-z]+_\w+|\b_pytest\b|junitxml|TestReport|TestResult|os\._exit|"
    rb"sys\.settrace|/proc/self|/proc/\d+|getppid|LD_PRELOAD|sitecustomize|addopts|\.prorl"
)
_EXCUSE = re.compile(rb"xfail|SkipTest|skipTest|expectedFailure|importorskip|\bskip\w*\s*\(")
NO_WORKDIR, NO_REPOSITORY, NO_BASE, NO_TREE = 20, 21, 22, 23
PATCH_FAILED, TESTS_FAILED, WORKTREE_FAILED = 30, 32, 33
BEFORE_AGENT = (NO_WORKDIR, NO_REPOSITORY, NO_BASE, NO_TREE)
PREPARED_FAULTS: Mapping[int, str] = {
    NO_WORKDIR: "the prepared sandbox has no folder {workdir}; mend 'workdir'",
    NO_REPOSITORY: "the prepared sandbox has no git repository, or no git, at {workdir}; mend "
    "'workdir' or the image",
    NO_BASE: "the repository at {workdir} of the prepared sandbox has no commit {base}; mend "
    "'base_commit' or the image",
    NO_TREE: "git cannot read the tree of {base} in the prepared sandbox; mend the image",
    TESTS_FAILED: "the task's test_patch does not apply to {base}; mend the task",
    WORKTREE_FAILED: "git cannot write the working tree at {workdir} of the prepared sandbox",
}

# Configuration of the system, the account and the agent does as little as it can; the
# repository's own stays, because what it says of line ends and filters is part of its content.
_GIT = """
export HOME="$scratch" XDG_CONFIG_HOME="$scratch" LC_ALL=C TMPDIR="$scratch"
export GIT_CONFIG_NOSYSTEM=1 GIT_CONFIG_SYSTEM=/dev/null GIT_CONFIG_GLOBAL="$scratch/.gitconfig"
export GIT_TERMINAL_PROMPT=0 GIT_OPTIONAL_LOCKS=0 GIT_PAGER=cat GIT_LITERAL_PATHSPECS=0
unset GIT_DIR GIT_WORK_TREE GIT_EXTERNAL_DIFF GIT_CONFIG_COUNT GIT_CONFIG_PARAMETERS GIT_DIFF_OPTS
printf '[safe]\\n\\tdirectory = *\\n' > "$scratch/.gitconfig"
g() {
  git -c core.hooksPath=/dev/null -c core.fsmonitor=false -c core.untrackedCache=false \\
    -c core.checkStat=minimal -c core.trustctime=false -c core.autocrlf=false \\
    -c core.safecrlf=false -c core.quotePath=true -c core.sparseCheckout=false \\
    -c diff.external= -c diff.suppressBlankEmpty=false -c submodule.recurse=false \\
    -c advice.addEmbeddedRepo=false -c gc.auto=0 "$@"
}
changes() {
  g diff-index --cached -p --binary --full-index --no-renames --no-color --no-ext-diff \\
    --no-textconv --src-prefix=a/ --dst-prefix=b/ "$@"
}
"""

_TAKE = """
say() { printf 'prorl-patch %s\\n' "$1" > "$out"; exit 0; }
cd "$workdir" || say no_workdir
top=$(g rev-parse --show-toplevel) && cd "$top" || say no_repository
base=$(g rev-parse -q --verify "$base^{commit}") || say no_base
index=$(g rev-parse --git-path index)
[ -f "$index" ] && cp -p "$index" "$scratch/index"
export GIT_INDEX_FILE="$scratch/index"
if [ ! -f "$GIT_INDEX_FILE" ] || ! g ls-files > /dev/null; then
  rm -f "$GIT_INDEX_FILE"
  g read-tree "$base" || say no_base
fi
# A repository made inside this one would be carried as the name of a commit: carry its files.
find . -mindepth 2 -name .git -not -path './.git/*' -prune > "$scratch/nested"
while IFS= read -r nested; do
  case "$(g ls-files -s -- ":(literal)${nested%/.git}")" in
    160000*) ;;
    *) rm -rf "$nested" ;;
  esac
done < "$scratch/nested"
g add -A . || g add -A --ignore-errors .
{ changes "$base" && touch "$scratch/complete"; } | head -c $((limit + 1)) > "$scratch/diff"
size=$(($(wc -c < "$scratch/diff")))
[ "$size" -le "$limit" ] || say "too_large $limit"
[ -e "$scratch/complete" ] || say git_failed
{ printf 'prorl-patch ok %s\\n' "$size"; cat "$scratch/diff"; } > "$out"
"""

_BRING = """
cd "$workdir" || exit 20
top=$(g rev-parse --show-toplevel) && cd "$top" || exit 21
base=$(g rev-parse -q --verify "$base^{commit}") || exit 22
export GIT_INDEX_FILE="$scratch/index"
g read-tree "$base" || exit 23
revert() {
  changes "$@" > "$scratch/unwanted" || return 1
  [ ! -s "$scratch/unwanted" ] && return 0
  grep -a '^diff --git ' "$scratch/unwanted" | sed 's/^/not taken: /'
  g apply --cached -R --whitespace=nowarn "$scratch/unwanted"
}
if [ -s "$scratch/agent.diff" ]; then
  g apply --cached --whitespace=nowarn "$scratch/agent.diff" || exit 30
  revert_all || exit 30
fi
if [ -s "$scratch/tests.diff" ]; then
  g apply --cached --whitespace=nowarn "$scratch/tests.diff" ||
    g apply --cached --recount --ignore-whitespace --whitespace=nowarn "$scratch/tests.diff" ||
    exit 32
fi
tree=$(g write-tree --missing-ok) || exit 33
g read-tree "$base" || exit 23
g read-tree --reset -u "$base" "$tree" || exit 33
touch "$scratch/ready"
"""


@dataclass(frozen=True, kw_only=True)
class Taken:
    """Hold the diff that was taken, or say in one word why there is none."""

    diff: bytes = b""
    trouble: str = ""


def take_script(*, scratch: str, workdir: str, base: str, out: str, limit: int) -> bytes:
    """Return the shell script that writes the diff against `base`, below a first line, to `out`."""
    values = {"scratch": scratch, "workdir": workdir, "base": base, "out": out}
    return _script(values, f"limit={limit}\n", _GIT, _TAKE)


def bring_script(
    *, scratch: str, workdir: str, base: str, restored: Sequence[str], protect: Sequence[str]
) -> bytes:
    """Return the script that brings `agent.diff`, then `tests.diff`, into the working tree.

    What the agent's diff says of `restored` paths and `protect` patterns is undone before. It ends
    with one of the codes above, or 0 when the file `ready` says that all is in place.
    """
    values = {"scratch": scratch, "workdir": workdir, "base": base}
    calls = []
    whole = [f":(literal){path}" for path in restored] + [f":(glob){each}" for each in protect]
    if whole:
        calls.append(f'  revert "$base" -- {_quote(whole)} || return 1')
    if protect:
        shadows = _quote(f":(glob){each}" for each in SHADOWS)
        calls.append(f'  revert --diff-filter=A "$base" -- {shadows} || return 1')
    body = "\n".join([*calls, "  return 0"])
    return _script(values, _GIT, f"revert_all() {{\n{body}\n}}\n", _BRING)


def read_taken(data: bytes | None) -> Taken:
    """Return what the script wrote; bytes that are not of its form are `git_failed`."""
    if data is None:
        return Taken(trouble="git_failed")
    if not data:
        return Taken(trouble="too_large")
    first, _, diff = data.partition(b"\n")
    words = first.removeprefix(HEADER).decode(errors="replace").split()
    if not first.startswith(HEADER) or not words:
        return Taken(trouble="git_failed")
    if words == ["ok", str(len(diff))]:
        return Taken(diff=diff)
    known = {"no_workdir", "no_repository", "no_base", "too_large"}
    return Taken(trouble=words[0] if words[0] in known else "git_failed")


def steering_words(diff: bytes) -> tuple[str, ...]:
    """Return words in added lines that few fixes need and most tries to steer a runner do.

    They decide nothing: they say which diffs a person should look at.
    """
    added = (line for line in diff.split(b"\n") if line.startswith(b"+"))
    found = {match[0].decode() for line in added for match in _STEERING.finditer(line)}
    return tuple(sorted(found))


def brings_excuses(diff: bytes) -> bool:
    """Tell whether added lines could have a test skipped, or failed as expected, from within."""
    return any(line.startswith(b"+") and _EXCUSE.search(line) for line in diff.split(b"\n"))


def paths_of(patch: str) -> tuple[str, ...]:
    """Return the paths that a diff made by git touches, old names and new ones, in order."""
    found: list[str] = []
    for section in re.split(r"^(?=diff --git )", patch, flags=re.MULTILINE):
        head = section.split("\n@@", 1)[0].split("\nGIT binary patch", 1)[0]
        found += _named(head.splitlines())
    return tuple(dict.fromkeys(found))


def _named(lines: Iterable[str]) -> list[str]:
    named: list[str] = []
    both: list[str] = []
    for line in lines:
        if line.startswith("diff --git "):
            both = _both(line.removeprefix("diff --git "))
        for start, prefix in (
            ("--- ", "a/"),
            ("+++ ", "b/"),
            ("rename from ", ""),
            ("rename to ", ""),
            ("copy to ", ""),
        ):
            if line.startswith(start):
                name = _unquoted(line.removeprefix(start).split("\t")[0].rstrip("\r"))
                if name != "/dev/null":
                    named.append(name.removeprefix(prefix))
    return named or both


def _both(names: str) -> list[str]:
    """Return the two names of a header, which are the same wherever only they stand."""
    names = names.rstrip("\r")
    if names.startswith('"'):
        return [_unquoted(names[: names.index('"', 1) + 1]).removeprefix("a/")]
    half = (len(names) - 1) // 2
    return [names[:half].removeprefix("a/")]


_ESCAPES = {"a": 7, "b": 8, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13, '"': 34, "\\": 92}


def _unquoted(name: str) -> str:
    """Return a name without git's C-style quotes, whose octal numbers are bytes of UTF-8."""
    if not (name.startswith('"') and name.endswith('"') and len(name) > 1):
        return name
    raw = bytearray()
    for match in re.finditer(r"\\([0-7]{3}|.)|([^\\]+)", name[1:-1]):
        escape, plain = match.groups()
        if plain is not None:
            raw += plain.encode()
        elif escape in _ESCAPES:
            raw.append(_ESCAPES[escape])
        elif escape.isdigit() and len(escape) == 3:
            raw.append(int(escape, 8) & 255)
    return raw.decode(errors="replace")


def _quote(words: Iterable[str]) -> str:
    return " ".join(shlex.quote(word) for word in words)


def _script(values: Mapping[str, str], *parts: str) -> bytes:
    given = "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())
    return ("#!/bin/sh\n" + given + "".join(parts)).encode()
