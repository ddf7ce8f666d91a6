"""Read rows as verl's data sets hold them.

Columns: `data_source`, `prompt` (messages), `ability`, `reward_model` (`style`, `ground_truth`),
`extra_info`, and optionally `agent_name`; see verl's documentation of data preparation.
"""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

from rollouts.importers.base import TaskRecord, TaskRejected
from rollouts.importers.checks import as_text, chosen_evaluator, content_ref, make_record
from rollouts.importers.evaluator_choice import NO_SETTINGS, Scoring, answer_scoring
from rollouts.importers.options import ReadOptions
from rollouts.importers.prompts import read_prompt

# Search-R1 compares as SQuAD does: without case, articles and punctuation around the answer.
_SEARCH: Mapping[str, Any] = {
    "pattern": r"(?s)<answer>(.*?)</answer>",
    "take": "last",
    **{"casefold": True, "collapse_whitespace": True, "strip_punctuation": True, "articles": True},
}
# By verl's own choice of scorers (verl/utils/reward_score), first match wins.
DATA_SOURCES: tuple[tuple[str, str, Mapping[str, Any]], ...] = (
    ("openai/gsm8k", "math", NO_SETTINGS),
    ("lighteval/MATH*", "math", NO_SETTINGS),
    ("DigitalLearningGmbH/MATH*", "math", NO_SETTINGS),
    ("HuggingFaceH4/MATH-500", "math", NO_SETTINGS),
    ("math_dapo*", "math", NO_SETTINGS),
    ("math", "math", NO_SETTINGS),
    ("aime*", "math", NO_SETTINGS),
    ("amc*", "math", NO_SETTINGS),
    ("numina_*", "math", NO_SETTINGS),
    ("codecontests", "code", NO_SETTINGS),
    ("apps", "code", NO_SETTINGS),
    ("codeforces", "code", NO_SETTINGS),
    ("taco", "code", NO_SETTINGS),
    ("livecodebench*", "code", NO_SETTINGS),
    ("searchR1_*", "regex", _SEARCH),
)
COLUMNS = frozenset({"data_source", "prompt", "ability", "reward_model", "extra_info"})
_ONE_ANSWER = (None, "", "single_turn_agent")


def is_verl(row: Mapping[str, Any]) -> bool:
    """Tell whether a row looks like one of verl's."""
    return {"data_source", "prompt", "reward_model"} <= set(row)


def read_verl_row(row: Mapping[str, Any], options: ReadOptions) -> TaskRecord:
    """Read one row; raise `TaskRejected`."""
    source = as_text(row.get("data_source"))
    extra = _object(row, "extra_info")
    reward = _object(row, "reward_model")
    if reward.get("ground_truth") is None:
        raise TaskRejected("reward_model.ground_truth is missing; a task needs its answer")
    for name in ("images", "videos"):
        if row.get(name):
            raise TaskRejected(f"the row has {name}, which agents here are not shown; remove them")
    instruction, messages = read_prompt(row.get("prompt"), "prompt")
    _refuse_tools(row, extra, options)
    scoring = _scoring(source, reward, options)
    rest = {name: row[name] for name in row if name not in COLUMNS}
    kept = {name: each for name, each in extra.items() if name not in ("split", "index")}
    return make_record(
        ref=_ref(row, source, extra),
        instruction=instruction,
        messages=messages,
        evaluator=scoring.evaluator,
        settings=scoring.settings,
        payload=scoring.payload,
        metadata={
            name: value
            for name, value in {
                "data_source": source,
                "ability": row.get("ability"),
                "split": extra.get("split"),
                "index": extra.get("index"),
            }.items()
            if value is not None
        },
        source={**rest, **({"extra_info": kept} if kept else {})},
        environment={"agent": "single_turn"},
    )


def _scoring(source: str, reward: Mapping[str, Any], options: ReadOptions) -> Scoring:
    truth = reward["ground_truth"]
    for pattern, rule in options.data_sources.items():
        if fnmatchcase(source, pattern):
            return answer_scoring(rule["evaluator"], rule.get("settings", NO_SETTINGS), truth)
    chosen = chosen_evaluator(options)
    if chosen is not None:
        return answer_scoring(*chosen, truth)
    if reward.get("style") == "model":
        raise TaskRejected(
            "reward_model.style is 'model': a reward model scored it there; name an evaluator "
            "for it, such as judge"
        )
    for pattern, evaluator, settings in DATA_SOURCES:
        if fnmatchcase(source, pattern):
            return answer_scoring(evaluator, settings, truth)
    raise TaskRejected(
        f"nothing says how data_source {source!r} is scored; give an evaluator for all rows, or "
        f'[data_sources."{source}"] evaluator = "…" in an option file'
    )


def _refuse_tools(row: Mapping[str, Any], extra: Mapping[str, Any], options: ReadOptions) -> None:
    if options.tools == "environment":
        return
    agent = row.get("agent_name")
    if agent not in _ONE_ANSWER or extra.get("need_tools_kwargs"):
        what = f"agent {agent!r}" if agent not in _ONE_ANSWER else "tools (need_tools_kwargs)"
        raise TaskRejected(
            f"the row asks for {what} of verl's own; choose an environment with an agent and "
            "tools that do the same, and say tools = environment"
        )


def _ref(row: Mapping[str, Any], source: str, extra: Mapping[str, Any]) -> str:
    index = as_text(extra.get("index"))
    if not index:
        return content_ref(row)
    parts = [source or "row", as_text(extra.get("split")), index]
    ref = "/".join(part for part in parts if part)
    return ref if len(ref) <= 200 else content_ref(row)


def _object(row: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = row.get(name)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise TaskRejected(f"{name} must be an object")
    return value
