"""verifiers parses our traces, and its branches are our rows."""

from __future__ import annotations

import pytest

vf = pytest.importorskip("verifiers.v1", reason="verifiers is not installed here: test-adapters")

from prorl_client.adapters.rows import is_scored, rows_of  # noqa: E402
from prorl_client.adapters.verifiers import trace_of  # noqa: E402

from tests.adapters.made import every_kind  # noqa: E402

KINDS = every_kind()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_a_trace_whose_branches_are_its_rows(kind: str) -> None:
    each = KINDS[kind]
    trace = vf.WireTrace.model_validate(trace_of(each))
    assert trace.has_error is not is_scored(each)
    rows = rows_of(each) if is_scored(each) else []
    branches = trace.branches
    assert [branch.token_ids for branch in branches] == [row.token_ids for row in rows]
    for branch, row in zip(branches, rows, strict=True):
        padding = len(row.prompt_ids)
        assert branch.sampled_mask == [False] * padding + [bool(m) for m in row.mask]
        assert branch.logprobs == [0.0] * padding + row.logprobs
        assert branch.trainable
    back = vf.WireTrace.model_validate_json(trace.model_dump_json())
    assert [branch.token_ids for branch in back.branches] == [row.token_ids for row in rows]
