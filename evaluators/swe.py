"""Grade a repository task: the agent's diff, the tests of the task, and what they say.

Payload (hidden; names are read without regard to case, so `FAIL_TO_PASS` of a data set's row fits):

- `workdir`: folder of the repository (default `/testbed`); `base_commit`: what the diff is taken
  against (without it: HEAD of the prepared sandbox, found by one more sandbox). `instance_id`,
  `repo`, `version` are told to parsers that want them.
- `fail_to_pass`, `pass_to_pass`: lists of test names, or the JSON or Python text of one.
- One of `test_cmd` (text, or list of commands; may also stand in the settings, `{test_files}` is
  replaced by the files that `test_patch` touches), `eval_script` (text; it applies the test patch
  itself, as SWE-bench's do, or `apply_test_patch` is true), or `run_script` with `parser_script`
  and `selected_test_files_to_run` (SWE-bench-Pro).
- `log_parser`: a name of `evaluators.parsers.registry` (`pytest`, `unittest`, `django`, `go`,
  `go_json`, `jest`, `vitest`, `mocha`, `cargo`, `maven`, `gradle`, `r2e`, …) or one of swebench's
  (`parse_log_pytest_v2`, …). Not with `run_script`.
- `test_patch`: diff of the tests against `base_commit`; `test_files`: map of path in the
  repository to text, put there as well. Both stand over whatever the agent did to these files.
- `install`, `before_tests`: commands (text or list) run after the patches and before the tests,
  whose failure does not matter.
- `expected`: map, or JSON text of one, of test name to status; `mode`: `tests` (the default),
  `exact_map` (R2E-Gym: the parsed map equals it; the default when there is `expected` and no
  list) or `expected_passed` (each test that it calls PASSED must pass; SWE-Next).
- `eval_type`: `pass_and_fail` or `fail_only` (a test that is not reported as failed passed).

Settings: `workdir`, `test_cmd`, `install`, `before_tests`, `log_parser`, `eval_type`, `mode` are
defaults for payloads without them. `protect`: patterns of files that the agent's diff must not
change (default: `conftest.py` and what else steers test runners). `report`: `auto`, `always`,
`never` take pytest's results from a report file instead of the log. `exit_code`: `check` or
`ignore`. `reward`: `resolved` or `fail_to_pass`. `patch_bytes`, `log_bytes`, `patch_seconds`,
`test_seconds`, `network`.

Rewards: `resolved`, `fail_to_pass`, `pass_to_pass` (fractions), `patch_applied`.
"""

from __future__ import annotations

from evaluators.base import (
    Artefacts,
    Evaluator,
    JsonMap,
    Phase,
    PhaseResult,
    RewardMissing,
    Score,
)
from evaluators.parsers.base import Results
from evaluators.swe_patch import (
    BEFORE_AGENT,
    NO_REPOSITORY,
    PATCH_FAILED,
    PREPARED_FAULTS,
    Taken,
    brings_excuses,
    steering_words,
)
from evaluators.swe_phases import (
    BASE_PHASE,
    PARSE_PHASE,
    PATCH_PHASE,
    TESTS_PHASE,
    base_phase,
    ended_tests,
    found_base,
    parse_phase,
    patch_phase,
    taken_diff,
    tests_phase,
)
from evaluators.swe_results import LISTED, Ended, judge, read_parsed, read_results
from evaluators.swe_task import SweTask, read_task
from evaluators.unfit import TaskUnfit


class SweEvaluator(Evaluator):
    """Carry the agent's diff into the prepared sandbox and run the task's tests there.

    The module says what settings and payload hold.
    """

    name = "swe"
    description = "The tests of a repository's task decide on the agent's diff."
    needs_sandbox = True

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        """Raise `InvalidSettings` for the first wrong field."""
        read_task(settings, payload)

    def next_phase(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Phase | None:
        """Return the sandbox that takes the diff, then the one that tests it."""
        task = read_task(settings, payload)
        base = task.base_commit or found_base(artefacts)
        if base is None:
            return base_phase(task) if artefacts.phase(BASE_PHASE) is None else None
        if artefacts.phase(PATCH_PHASE) is None:
            return patch_phase(task, base)
        taken = taken_diff(task, artefacts)
        if artefacts.phase(TESTS_PHASE) is None:
            return None if taken.trouble == "too_large" else tests_phase(task, base, taken)
        ended = ended_tests(task, taken, artefacts)
        waits = task.parser_script and artefacts.phase(PARSE_PHASE) is None
        return parse_phase(task, ended) if waits and ended.finished else None

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        """Score what the tests said; raise `RewardMissing` when they said nothing.

        A diff that cannot be taken, is too large or does not apply scores 0. `TaskUnfit` says what
        cannot be the diff's doing, such as no repository in the prepared sandbox.
        """
        task = read_task(settings, payload)
        base = task.base_commit or found_base(artefacts)
        if base is None:
            fault = PREPARED_FAULTS[NO_REPOSITORY].format(workdir=task.workdir)
            raise TaskUnfit(fault, log=_said(artefacts.phase(BASE_PHASE)))
        taken = taken_diff(task, artefacts)
        if taken.trouble == "too_large":
            return _unpatched(f"too_large: more than {task.patch_bytes} bytes", taken, log="")
        left = artefacts.phase(TESTS_PHASE)
        brought = left.commands[0].exit_code if left and left.commands else None
        if brought == PATCH_FAILED:
            return _unpatched("does_not_apply", taken, log=_said(left))
        if brought != 0:
            why = PREPARED_FAULTS.get(brought or 0, "the diffs could not be brought to {workdir}")
            kind = TaskUnfit if brought in BEFORE_AGENT else RewardMissing
            raise kind(why.format(workdir=task.workdir, base=base), log=_said(left))
        if taken.trouble:
            return _unpatched(taken.trouble, taken, log=_said(artefacts.phase(PATCH_PHASE)))
        ended = ended_tests(task, taken, artefacts)
        return _scored(task, taken, ended, _results(task, ended, artefacts))


def _results(task: SweTask, ended: Ended, artefacts: Artefacts) -> Results:
    if not task.run_script or not ended.finished:
        return read_results(task, ended)
    left = artefacts.phase(PARSE_PHASE)
    data = next(iter(left.files.values()), None) if left else None
    return read_parsed(data, log=_said(left))


def _scored(task: SweTask, taken: Taken, ended: Ended, results: Results) -> Score:
    is_strict = brings_excuses(taken.diff)
    verdict = judge(task, ended, results, is_strict=is_strict)
    rewards = {**verdict.rewards, "patch_applied": 1.0}
    return Score(
        reward=rewards[task.reward],
        rewards={"reward": rewards[task.reward], **rewards},
        details={
            **verdict.details,
            "patch_bytes": len(taken.diff),
            "excuses_count": not is_strict,
            "steering_words": list(steering_words(taken.diff))[:LISTED],
            "results_from": "report" if ended.wants_report else "log",
            "exit_code": ended.exit_code,
            "timed_out": ended.timed_out,
            "log_truncated": ended.truncated,
            "seconds": round(ended.seconds, 3),
        },
        log=ended.log,
    )


def _unpatched(reason: str, taken: Taken, *, log: str) -> Score:
    names = ("reward", "resolved", "fail_to_pass", "pass_to_pass", "patch_applied")
    return Score(
        reward=0.0,
        rewards=dict.fromkeys(names, 0.0),
        details={"resolved": False, "patch_failed": reason, "patch_bytes": len(taken.diff)},
        log=log,
    )


def _said(left: PhaseResult | None) -> str:
    ran = left.commands if left else ()
    return "".join((each.stdout + each.stderr).decode(errors="replace") for each in ran)
