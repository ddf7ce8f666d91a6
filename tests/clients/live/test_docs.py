"""The page about the client: each of its code blocks runs against the service."""

from __future__ import annotations

import re
import shlex
from configparser import ConfigParser
from pathlib import Path
from typing import Any

import pytest
from prorl_client.cli.main import main, make_parser
from prorl_client.errors import NothingLeft, ProblemError, ProrlError

from tests import factories
from tests.api.callers import Caller
from tests.clients.live.line import playing

PAGE = Path(__file__).parents[3] / "docs" / "client.md"
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(language: str) -> list[str]:
    """Return the page's code blocks of a language."""
    return [body for name, body in BLOCK.findall(PAGE.read_text()) if name == language]


@pytest.mark.broker
def test_every_block_runs(
    address: str,
    trainer: Caller,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("pyarrow")
    task_set = factories.make_task_set(name="math")
    environment = factories.make_environment(name="calc")
    for number in range(1, 5):
        factories.make_task(task_set=task_set, environment=environment, ref=f"sum-{number}")
    policy = factories.make_policy(name="tiny")
    monkeypatch.setenv("PRORL_URL", address)
    monkeypatch.setenv("PRORL_TOKEN", trainer.text)
    monkeypatch.chdir(tmp_path)
    trained: list[tuple[Any, ...]] = []
    pushed: list[int] = []
    names: dict[str, Any] = {
        "train_on": lambda *arrays: trained.append(arrays),
        "push_weights": lambda: pushed.append(policy.pk),
    }

    with playing():
        for block in blocks("python"):
            exec(compile(block, str(PAGE), "exec"), names)
        names["client"].close()
        for command in (line for block in blocks("sh") for line in block.splitlines()):
            words = shlex.split(command)
            assert words[0] == "prorl"
            assert main(words[1:]) == 0, capsys.readouterr().err

    policy.refresh_from_db()
    assert (len(trained), len(pushed), policy.version) == (16, 2, 5)
    assert {tuple(arrays[-1]) for arrays in trained} == {(1.0, 0.0, 1.0, 0.0)}
    assert names["answers"] == [1.0, 0.0]
    assert names["pass_at_1"]["value"] == 0.5
    assert names["sampled"] == 4
    assert names["refused"][0] == "task.unknown"
    assert names["seen"][0] in ("group.ready", "batch.acknowledged")
    assert names["shape"] == (2,)
    assert names["count"] == 20
    assert sorted(path.name for path in Path("out").iterdir()) == [
        "all.jsonl",
        "all.parquet",
        "atif",
        "cli.jsonl",
    ]


def test_configuration_on_the_page_is_one() -> None:
    (block,) = blocks("ini")
    parser = ConfigParser(interpolation=None)
    parser.read_string(block)

    assert parser.sections() == ["default", "lab"]


def test_page_names_each_error_and_each_command() -> None:
    text = PAGE.read_text()
    kinds = {
        kind.__name__ for kind in _below(ProrlError) if kind.__module__ == ProrlError.__module__
    }

    assert [kind for kind in sorted(kinds) if f"`{kind}`" not in text] == []
    assert {NothingLeft.__name__, ProblemError.__name__} <= kinds
    commands = make_parser()._subparsers
    assert commands is not None
    (choices,) = (action.choices for action in commands._actions if action.choices)
    assert [name for name in choices or () if f"prorl {name}" not in text] == []


def _below(kind: type[Any]) -> set[type[Any]]:
    return {each for below in kind.__subclasses__() for each in ({below} | _below(below))}
