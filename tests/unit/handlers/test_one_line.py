"""Reading one line as a command or a submission."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollouts.handlers.base import Action
from rollouts.handlers.one_line import CUT_OFF, NO_COMMAND, parse_one_line


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("touch a", "command", "touch a"),
        ("  touch a  \n", "command", "touch a"),
        ("\n\ntouch a\nrm -rf /\n", "command", "touch a"),
        ("$ touch a", "command", "touch a"),
        ("$HOME/run", "command", "$HOME/run"),
        ("echo $ 5", "command", "echo $ 5"),
        ("```bash\ntouch a\n```", "command", "touch a"),
        ("```\n$ touch a\n```", "command", "touch a"),
        ("```sh", "malformed", NO_COMMAND),
        ("```bash touch a```", "command", "touch a"),
        ("```touch a```", "command", "touch a"),
        ("`touch a`", "command", "touch a"),
        ("`date` and `who`", "command", "`date` and `who`"),
        ("echo `date`", "command", "echo `date`"),
        ("submit", "submit", None),
        ("```\nsubmit\n```", "submit", None),
        ("$ submit", "submit", None),
        ("submit 42", "submit", "42"),
        ("submit  the answer \nmore", "submit", "the answer"),
        ("submit ", "submit", None),
        ("Submit", "command", "Submit"),
        ("submitted", "command", "submitted"),
        ("submit.sh", "command", "submit.sh"),
        ("", "malformed", NO_COMMAND),
        (" \n\t\n", "malformed", NO_COMMAND),
        ("```\n```", "malformed", NO_COMMAND),
        ("``````", "malformed", NO_COMMAND),
        ("`", "command", "`"),
    ],
)
def test_whole_texts(text: str, kind: str, value: str | None) -> None:
    action = parse_one_line(text, complete=True)
    assert (action.kind, action.text) == (kind, value)


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [
        ("rm -rf /app/tmp", "malformed", CUT_OFF),
        ("submit 4", "malformed", CUT_OFF),
        ("touch a\nrm", "command", "touch a"),
        ("touch a\n", "command", "touch a"),
        ("\n\n", "malformed", NO_COMMAND),
        ("```bash\ntouch a", "malformed", CUT_OFF),
    ],
)
def test_a_line_that_was_cut_is_not_trusted(text: str, kind: str, value: str) -> None:
    action = parse_one_line(text, complete=False)
    assert (action.kind, action.text) == (kind, value)


@given(text=st.text(max_size=80), complete=st.booleans())
def test_any_text_is_one_action_of_one_line(text: str, complete: bool) -> None:
    action = parse_one_line(text, complete=complete)
    assert Action.from_dict(action.as_dict()) == action
    if action.kind == "command":
        assert action.text
        assert "\n" not in action.text
        assert action.text.strip() == action.text
