"""The reference solution of a task: hidden files, or the answer that its evaluator knows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from evaluators.base import EvaluatorFault
from evaluators.registry import get_evaluator
from rollouts.handlers.oracle import SCRIPT
from rollouts.importers.base import decode_files
from rollouts.models import Task
from rollouts.services.grading_settings import grading_settings
from sandboxes.models import Environment

ROLE = "verification"  # in a group's metadata: which of the two its rollouts are
ORACLE = "oracle"
NOOP = "noop"


@dataclass(frozen=True, kw_only=True)
class Solution:
    """Files below /solution by path, and what to answer; neither where the task has none."""

    files: Mapping[str, tuple[bytes, int]] = field(default_factory=dict)
    answer: str | None = None

    def fits(self, *, has_sandbox: bool) -> bool:
        """Tell whether it can be carried out."""
        return self.answer is not None or (has_sandbox and SCRIPT in self.files)


def solution_of(task: Task, environment: Environment) -> Solution:
    """Return the solution of a task; `hidden` must have been read along."""
    files = decode_files(task.hidden.get("solution") or {})
    return Solution(
        files={path: (content.data, content.mode) for path, content in files.items()},
        answer=_answer(task, environment),
    )


def _answer(task: Task, environment: Environment) -> str | None:
    name, settings, payload = grading_settings(environment=environment, task=task)
    try:
        return get_evaluator(name).reference_answer(settings, payload)
    except EvaluatorFault:  # it will be said by the grading itself
        return None
