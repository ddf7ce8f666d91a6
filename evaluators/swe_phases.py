"""The sandboxes in which a repository task's diff is taken, tested and its log read."""

from __future__ import annotations

import hashlib
import re
import shlex

from evaluators.base import Artefacts, Base, Command, Phase
from evaluators.parsers.registry import OF_PYTEST
from evaluators.swe_patch import Taken, bring_script, read_taken, take_script
from evaluators.swe_results import Ended
from evaluators.swe_task import SweTask

BASE_PHASE, PATCH_PHASE, TESTS_PHASE, PARSE_PHASE = "base", "patch", "tests", "parse"
SCRATCH = "/tmp/.prorl-"  # noqa: S108 -- in the sandbox, and followed by what nobody can guess
_RUNS_PYTEST = re.compile(r"(?:^|[\s/;&|(])(?:py\.test|pytest)(?=$|[\s;&|)])", re.MULTILINE)
_INSTALLS = re.compile(r"\b(?:install|uninstall|pip3? (?:list|show|freeze)|poetry add)\b")
_SWEBENCH_MARKS = re.compile(r">>>>> (?:Start Test Output|End Test Output|Test Exit Code)")


def _scratch(task: SweTask, *parts: bytes) -> str:
    """Return a word that nobody can guess who does not know the payload."""
    return hashlib.sha256(b"\0".join([task.secret.encode(), *parts])).hexdigest()[:32]


def _folder(task: SweTask, phase: bytes) -> str:
    return SCRATCH + _scratch(task, phase)


def _sh(path: str, seconds: float | None, output_bytes: int) -> Command:
    argv = ("/bin/sh", path)
    return Command(argv=argv, cwd="/", seconds=seconds, output_bytes=output_bytes)


def base_phase(task: SweTask) -> Phase:
    script = "cd {} && git -c safe.directory='*' rev-parse --verify 'HEAD^{{commit}}'\n"
    path = f"{_folder(task, b'base')}/base.sh"
    return Phase(
        name=BASE_PHASE,
        base=Base.PREPARED,
        files={path: (script.format(shlex.quote(task.workdir)).encode(), 0o700)},
        commands=(_sh(path, task.patch_seconds, 64 * 1024),),
    )


def found_base(artefacts: Artefacts) -> str | None:
    """Return the commit that the base phase found."""
    found = artefacts.phase(BASE_PHASE)
    if found is None or not found.commands or found.commands[0].exit_code != 0:
        return None
    commit = found.commands[0].stdout.decode(errors="replace").strip()
    return commit if re.fullmatch(r"[0-9a-f]{40,64}", commit) else None


def _patch_folder(task: SweTask) -> str:
    return _folder(task, b"patch")


def patch_phase(task: SweTask, base: str) -> Phase:
    folder = _patch_folder(task)
    out = f"{folder}/out"
    script = take_script(
        scratch=folder, workdir=task.workdir, base=base, out=out, limit=task.patch_bytes
    )
    return Phase(
        name=PATCH_PHASE,
        base=Base.AGENT,
        workspace=(task.workdir,),
        files={f"{folder}/take.sh": (script, 0o700)},
        commands=(_sh(f"{folder}/take.sh", task.patch_seconds, 64 * 1024),),
        collect={out: task.patch_bytes + 1024},
    )


def taken_diff(task: SweTask, artefacts: Artefacts) -> Taken:
    left = artefacts.phase(PATCH_PHASE)
    return read_taken(left.files.get(f"{_patch_folder(task)}/out") if left else None)


def mark_of(task: SweTask, taken: Taken) -> str:
    return _scratch(task, b"tests", taken.diff)


def tests_phase(task: SweTask, base: str, taken: Taken) -> Phase:
    """Return the phase that tests; without a diff it only looks whether it could have been one."""
    mark = mark_of(task, taken)
    folder = f"{SCRATCH}{mark}"
    bring = bring_script(
        scratch=folder,
        workdir=task.workdir,
        base=base,
        restored=task.restored,
        protect=task.protect,
    )
    tests = task.test_patch if task.applies_test_patch else ""
    files = {
        f"{folder}/bring.sh": (bring, 0o700),
        f"{folder}/agent.diff": (taken.diff, 0o600),
        f"{folder}/tests.diff": (tests.encode(), 0o600),
    }
    commands = [_sh(f"{folder}/bring.sh", task.patch_seconds, 256 * 1024)]
    report = f"{folder}/report.xml"
    if not taken.trouble:
        files |= _run_files(task, folder, mark)
        commands.append(_sh(f"{folder}/run.sh", task.test_seconds, task.log_bytes))
    return Phase(
        name=TESTS_PHASE,
        base=Base.PREPARED,
        files=files,
        commands=tuple(commands),
        collect={report: task.log_bytes} if wants_report(task) else {},
        network=task.network,
    )


def _run_files(task: SweTask, folder: str, mark: str) -> dict[str, tuple[bytes, int]]:
    given = {f"{folder}/put/{path}": (text, 0o644) for path, text in task.test_files.items()}
    if task.run_script:
        tests = f"bash {folder}/run_script.sh {shlex.quote(task.selected)}"
        given[f"{folder}/run_script.sh"] = (task.run_script, 0o700)
    else:
        tests = f"$shell {folder}/eval.sh"
        # Marks that anybody knows get the word that nobody can guess.
        marked = _SWEBENCH_MARKS.sub(lambda found: f"{found[0]} {mark}", task.script)
        given[f"{folder}/eval.sh"] = (marked + "\n", 0o700)
    lines = [
        f"[ -e {folder}/ready ] || exit 97",
        f"cd {shlex.quote(task.workdir)} || exit 97",
        "command -v bash > /dev/null && shell=bash || shell=sh",
    ]
    if task.test_files:
        lines.append(f"cp -a {folder}/put/. . || exit 97")
    if not task.run_script:
        lines.append("exec 2>&1")
    if task.before_tests:
        given[f"{folder}/before.sh"] = (task.before_tests + "\n", 0o700)
        lines.append(f"$shell {folder}/before.sh < /dev/null")
    if wants_report(task):
        options = f"--junitxml={folder}/report.xml -o junit_family=xunit1"
        lines.append(f'export PYTEST_ADDOPTS="{options} ${{PYTEST_ADDOPTS-}}"')
    lines += [
        f"printf '\\n%s begin\\n' {mark}",
        f"{tests} < /dev/null",
        f"printf '\\n%s end %s\\n' {mark} $?",
    ]
    given[f"{folder}/run.sh"] = ("\n".join(lines) + "\n", 0o700)
    return {path: (text.encode(), mode) for path, (text, mode) in given.items()}


def wants_report(task: SweTask) -> bool:
    """Tell whether pytest's own report is the source: one plain run of pytest, or by setting."""
    if task.run_script or task.report == "never":
        return False
    if task.report == "always":
        return True
    marks = [found.start() for found in _SWEBENCH_MARKS.finditer(task.script)]
    script = task.script[marks[0] : marks[1]] if len(marks) > 1 else task.script
    runs = [
        part
        for part in re.split(r"\n|&&|\|\||;", script)
        if _RUNS_PYTEST.search(part) and not _INSTALLS.search(part) and not part.startswith("#")
    ]
    return task.log_parser in OF_PYTEST and len(runs) == 1


def parse_phase(task: SweTask, ended: Ended) -> Phase:
    """Return a sandbox of its own for the task's parser: nothing of the agent's ran in it."""
    folder = _folder(task, b"parse")
    command = (
        f"cd {folder} && for python in python3 python; do command -v $python > /dev/null && "
        "exec $python -I parser.py stdout.log stderr.log output.json; done; exit 127"
    )
    return Phase(
        name=PARSE_PHASE,
        base=Base.PREPARED,
        files={
            f"{folder}/parser.py": (task.parser_script.encode(), 0o600),
            f"{folder}/stdout.log": (ended.output.encode(errors="replace"), 0o600),
            f"{folder}/stderr.log": (ended.errors.encode(errors="replace"), 0o600),
        },
        commands=(Command(argv=("/bin/sh", "-c", command), seconds=task.patch_seconds),),
        collect={f"{folder}/output.json": task.log_bytes},
    )


def ended_tests(task: SweTask, taken: Taken, artefacts: Artefacts) -> Ended:
    """Return how the run of the tests ended."""
    left = artefacts.phase(TESTS_PHASE)
    mark = mark_of(task, taken)
    return Ended.read(
        left.commands[1] if left and len(left.commands) > 1 else None,
        mark=mark,
        report=left.files.get(f"{SCRATCH}{mark}/report.xml") if left else None,
        wants_report=wants_report(task),
    )
