"""Rules that keep groups from the trainer: what each refuses, how they are found and read."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rollouts.exceptions import InvalidValue
from rollouts.filters.base import FinishedGroup, GroupFilter, InvalidFilter, Sample
from rollouts.filters.registry import RESERVED, FilterRegistry, make_rule
from rollouts.filters.rules import complete_needed
from rollouts.selection_options import (
    Accuracy,
    Selection,
    accuracy_of,
    parse_filters,
    stored_filters,
)


def group(*values: float | None, failed: int = 0, key: str = "reward") -> FinishedGroup:
    """Return a group whose complete samples have these values of a key, and failed samples."""
    samples = [
        Sample(number=place, outcome="scored", **_values(key, value))
        for place, value in enumerate(values)
    ]
    samples += [Sample(number=len(samples) + n, outcome="infra_failed") for n in range(failed)]
    return FinishedGroup(size=len(samples), samples=tuple(samples))


def _values(key: str, value: float | None) -> dict[str, Any]:
    return {"reward": value} if key == "reward" else {"reward": 0.5, "rewards": {key: value}}


REFUSED = [
    ({"rule": "no_variance"}, group(1.0, 1.0, 1.0), "reward is 1 in all 3 samples"),
    ({"rule": "no_variance"}, group(0.1, 0.1, 0.1), "reward is 0.1 in all 3 samples"),
    ({"rule": "no_variance"}, group(1.0, failed=1), "1 of 2 samples have a reward"),
    ({"rule": "no_variance"}, group(failed=2), "0 of 2 samples have a reward"),
    (
        {"rule": "no_variance", "key": "tests"},
        group(1.0, None, 1.0, key="tests"),
        "tests is 1 in all 2 samples",
    ),
    ({"rule": "no_variance", "key": "none"}, group(1.0, 0.0), "0 of 2 samples have a none"),
    ({"rule": "all_wrong"}, group(0.0, 0.9), "the best reward of 2 samples is 0.9"),
    ({"rule": "all_wrong", "threshold": 0.5}, group(0.4, 0.1, failed=1), "the best"),
    ({"rule": "all_right"}, group(1.0, 2.0), "the worst reward of 2 samples is 1"),
    ({"rule": "all_right", "threshold": 0.5}, group(0.5, 0.7, failed=1), "the worst"),
    ({"rule": "min_complete", "count": 2}, group(1.0, failed=3), "1 of 4 samples are complete, 2"),
    ({"rule": "min_complete", "fraction": 0.51}, group(1.0, 1.0, failed=2), "2 of 4 samples"),
]

PASSED = [
    ({"rule": "no_variance"}, group(1.0, 0.0)),
    ({"rule": "no_variance"}, group(0.1 + 0.2, 0.3)),
    ({"rule": "no_variance", "key": "tests"}, group(1.0, None, 0.0, key="tests")),
    ({"rule": "all_wrong"}, group(0.0, 1.0)),
    ({"rule": "all_wrong"}, group(failed=2)),
    ({"rule": "all_right"}, group(0.99, 1.0)),
    ({"rule": "all_right"}, group(failed=2)),
    ({"rule": "min_complete", "count": 8}, group(1.0, 0.0)),
    ({"rule": "min_complete", "fraction": 0.5}, group(1.0, 1.0, failed=2)),
    ({"rule": "min_complete", "fraction": 0}, group(failed=2)),
]


@pytest.mark.parametrize(("entry", "finished", "words"), REFUSED)
def test_what_each_rule_refuses(entry: Any, finished: FinishedGroup, words: str) -> None:
    refusal = make_rule(entry).refuse(finished)

    assert refusal is not None
    assert refusal.startswith(words)


@pytest.mark.parametrize(("entry", "finished"), PASSED)
def test_what_each_rule_lets_through(entry: Any, finished: FinishedGroup) -> None:
    assert make_rule(entry).refuse(finished) is None


def test_variance_is_of_the_named_accuracy_and_not_of_the_shaped_reward() -> None:
    shaped = FinishedGroup(
        size=2,
        samples=tuple(
            Sample(number=n, outcome="scored", reward=n / 10, rewards={"correct": 1.0})
            for n in range(2)
        ),
    )

    assert make_rule({"rule": "no_variance"}).refuse(shaped) is None
    assert make_rule({"rule": "no_variance", "key": "correct"}).refuse(shaped) is not None


def test_an_unscored_sample_has_no_value_even_where_it_has_rewards() -> None:
    half = FinishedGroup(
        size=2,
        samples=(
            Sample(number=0, outcome="scored", reward=1.0),
            Sample(number=1, outcome="timed_out", reward=0.0, rewards={"reward": 0.0}),
        ),
    )

    assert half.values("reward") == [1.0]


@pytest.mark.parametrize(
    ("fraction", "size", "needed"),
    [(1.0, 8, 8), (0.0, 8, 0), (0.5, 7, 4), (0.1, 30, 3), (0.7, 10, 7), (0.001, 8, 1)],
)
def test_a_fraction_is_rounded_up_but_not_beyond_what_was_meant(
    fraction: float, size: int, needed: int
) -> None:
    assert complete_needed(fraction, size) == needed


def test_stored_filters_have_their_defaults_filled_in() -> None:
    given = [{"rule": "no_variance"}, {"rule": "min_complete", "count": 2}]

    stored = parse_filters(given)

    assert stored == [
        {"rule": "no_variance", "key": "reward"},
        {"rule": "min_complete", "fraction": None, "count": 2},
    ]
    assert parse_filters(stored) == stored


@pytest.mark.parametrize(
    ("filters", "words"),
    [
        ("no_variance", "must be a list"),
        ({"rule": "no_variance"}, "must be a list"),
        (None, "must be a list"),
        (["no_variance"], "filters[0]: A filter is an object"),
        ([{"key": "reward"}], "filters[0]: A filter is an object"),
        ([{"rule": 5}], "filters[0]: A filter is an object"),
        ([{"rule": "dapo"}], "There is no filter 'dapo'; known are all_right, all_wrong"),
        ([{"rule": "too_stale"}], "There is no filter 'too_stale'"),
        ([{"rule": "no_variance", "min": 1}], "no_variance: unknown setting 'min'; known: key"),
        ([{"rule": "no_variance", "key": ""}], "key must name a reward"),
        ([{"rule": "no_variance", "key": None}], "key must name a reward"),
        ([{"rule": "no_variance", "key": "x" * 65}], "key must name a reward"),
        ([{"rule": "no_variance"}, {"rule": "all_wrong", "threshold": "1"}], "filters[1]: all_wr"),
        ([{"rule": "all_right", "threshold": float("nan")}], "threshold must be a number"),
        ([{"rule": "all_right", "threshold": True}], "threshold must be a number"),
        ([{"rule": "min_complete"}], "give either fraction or count"),
        ([{"rule": "min_complete", "fraction": 0.5, "count": 1}], "give either fraction or count"),
        ([{"rule": "min_complete", "fraction": 1.1}], "fraction must be a number from 0 to 1"),
        ([{"rule": "min_complete", "count": 0}], "count must be at least 1"),
        ([{"rule": "min_complete", "count": 1.5}], "count must be a whole number"),
        ([{"rule": "min_complete", "count": "2"}], "count must be a whole number"),
        ([{"rule": "no_variance"}] * 17, "at most 16 filters"),
    ],
)
def test_filters_that_are_refused(filters: Any, words: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        parse_filters(filters)

    assert words in str(refused.value)


def test_what_is_right_is_said_by_the_first_filter_that_has_a_key() -> None:
    few = {"rule": "min_complete", "count": 1}

    assert accuracy_of([]) == Accuracy("reward", 1.0)
    assert accuracy_of([few]) == Accuracy("reward", 1.0)
    assert accuracy_of([few, {"rule": "no_variance", "key": "tests"}]) == Accuracy("tests", 1.0)
    right = {"rule": "all_right", "key": "tests", "threshold": 0.5}
    assert accuracy_of([right, {"rule": "no_variance"}]) == Accuracy("tests", 0.5)


def test_stored_filters_of_another_release_are_left_out_and_said() -> None:
    rules, faults = stored_filters([{"rule": "gone"}, {"rule": "no_variance"}, "nonsense"])

    assert [rule.name for rule in rules] == ["no_variance"]
    assert [fault.split(";")[0] for fault in faults] == [
        "There is no filter 'gone'",
        'A filter is an object such as {"rule": "no_variance"}.',
    ]
    assert stored_filters("nonsense") == ((), ())
    assert stored_filters(None) == ((), ())


@dataclass(frozen=True)
class LongEnough(GroupFilter):
    """Refuse groups whose samples are short."""

    name: ClassVar[str] = "long_enough"
    description: ClassVar[str] = "samples are shorter than a number of turns"
    turns: int = 2

    def refuse(self, group: FinishedGroup) -> str | None:
        """Refuse groups with a sample of fewer turns."""
        short = sum(sample.turns < self.turns for sample in group.complete)
        return f"{short} samples have fewer than {self.turns} turns" if short else None


@dataclass(frozen=True)
class Taken(LongEnough):
    """A rule with the name of a built-in one."""

    name: ClassVar[str] = "no_variance"


@dataclass(frozen=True)
class Reserved(LongEnough):
    """A rule with a name that the service uses itself."""

    name: ClassVar[str] = "too_stale"


@dataclass(frozen=True)
class Nameless(LongEnough):
    """A rule without a name."""

    name: ClassVar[str] = ""


class Abstract(GroupFilter):
    """A rule that refuses nothing, not even that it is asked."""


def test_a_plug_in_is_found_by_its_path_and_its_fields_are_its_settings() -> None:
    registry = FilterRegistry(group="prorl.none")

    registry.configure([f"{__name__}.LongEnough"])

    assert sorted(registry) == [
        *("all_right", "all_wrong", "long_enough", "min_complete", "no_variance"),
    ]
    rule = registry["long_enough"].parse({"turns": 3})
    assert rule.stored() == {"rule": "long_enough", "turns": 3}
    assert rule.judges_task is True
    with pytest.raises(InvalidFilter, match="long_enough: unknown setting 'tokens'; known: turns"):
        registry["long_enough"].parse({"tokens": 3})


@pytest.mark.parametrize(
    ("path", "words"),
    [
        ("Taken", "the name 'no_variance' is taken by the service"),
        ("Reserved", "the name 'too_stale' is taken by the service"),
        ("Nameless", "its name is '', not a str"),
        ("Abstract", "is no class of a GroupFilter with a refuse method"),
        ("group", "is no class of a GroupFilter"),
        ("Nothing", "AttributeError"),
    ],
)
def test_a_plug_in_that_cannot_be_used_is_left_out_and_the_others_stay(
    path: str, words: str
) -> None:
    registry = FilterRegistry(group="prorl.none")

    registry.configure([f"{__name__}.{path}", f"{__name__}.LongEnough"])

    assert "long_enough" in registry
    assert len(registry) == 5
    (fault,) = registry.faults
    assert fault.startswith(f"setting GROUP_FILTERS, {__name__}.{path}: ")
    assert words in fault


def test_selection_has_defaults_and_keeps_what_it_is_given() -> None:
    assert Selection.parse({}).as_dict() == {
        "order": "start",
        "unfinished": "carry_over",
        "replace_failed": 0,
        "group_deadline_seconds": None,
        "min_complete_fraction": None,
    }
    given = {
        "order": "finished",
        "unfinished": "cancel",
        "replace_failed": 2,
        "group_deadline_seconds": 60.0,
        "min_complete_fraction": 0.5,
    }
    assert Selection.parse(given).as_dict() == given
    assert Selection.stored({**given, "colour": "red", "order": "random"}).as_dict() == {
        **given,
        "order": "start",
    }
    assert Selection.stored(None) == Selection()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ([], "selection must be an object"),
        ({"sort": "start"}, "Unknown selection key 'sort'; known: order"),
        ({5: "start"}, "Unknown selection key '5'"),
        ({"order": "random"}, "order must be start or finished, not 'random'"),
        ({"order": ["start"]}, "order must be start or finished"),
        ({"unfinished": None}, "unfinished must be carry_over or cancel"),
        ({"replace_failed": -1}, "replace_failed must be between 0 and 1024"),
        ({"replace_failed": 1.5}, "replace_failed must be a whole number"),
        ({"replace_failed": None}, "replace_failed must be a number"),
        ({"replace_failed": True}, "replace_failed must be a number"),
        ({"group_deadline_seconds": 0}, "group_deadline_seconds must be between 1 and 604800"),
        ({"group_deadline_seconds": float("inf")}, "group_deadline_seconds must be between"),
        ({"min_complete_fraction": 1.01}, "min_complete_fraction must be between 0 and 1"),
        ({"min_complete_fraction": "all"}, "min_complete_fraction must be a number"),
    ],
)
def test_selection_that_is_refused(values: Any, words: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        Selection.parse(values)

    assert words in str(refused.value)


@pytest.mark.parametrize(
    ("fraction", "feed", "needed"),
    [(None, "pull", 8), (None, "push", 0), (0.5, "pull", 4), (0.5, "push", 4), (0.0, "pull", 0)],
)
def test_who_sent_a_group_hears_of_it_unless_told_otherwise(
    fraction: float | None, feed: str, needed: int
) -> None:
    selection = Selection(min_complete_fraction=fraction)

    assert selection.complete_needed(size=8, feed=feed) == needed


PAGE = (Path(__file__).parents[2] / "docs" / "selection.md").read_text(encoding="utf-8")


def block(language: str) -> str:
    """Return the page's only block in this language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", PAGE, re.S | re.M)
    return str(found)


def test_the_rule_of_the_page_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "cut_off.py").write_text(block("python"))
    info = tmp_path / "cut_off-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cut-off\nVersion: 1.0\n")
    heading, line = block("toml").splitlines()
    assert heading == '[project.entry-points."prorl.group_filters"]'
    point = line.replace('"', "")
    (info / "entry_points.txt").write_text(f"[prorl.group_filters]\n{point}\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "cut_off", raising=False)
    registry = FilterRegistry()

    rule = registry["cut_off"].parse({"fraction": 0.25})

    assert registry.faults == ()
    assert rule.stored() == {"rule": "cut_off", "fraction": 0.25}
    short = Sample(number=0, outcome="scored", stop_reason="finished", reward=1.0)
    cut = Sample(number=1, outcome="scored", stop_reason="max_turns", reward=0.0)
    finished = FinishedGroup(size=2, samples=(short, cut))
    assert rule.refuse(finished) == "1 of 2 samples used up their turns"
    assert registry["cut_off"].parse({}).refuse(finished) is None


def test_the_page_names_every_rule_and_every_setting() -> None:
    for name in [*FilterRegistry(group="prorl.none"), *RESERVED, *Selection().as_dict()]:
        assert f"`{name}`" in PAGE
