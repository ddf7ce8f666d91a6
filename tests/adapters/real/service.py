"""The running service that the live tests are pointed at."""

from __future__ import annotations

import os
from dataclasses import dataclass

import pytest

live = pytest.mark.skipif(
    not os.environ.get("TEST_EXPERIMENT"),
    reason="no service: TEST_EXPERIMENT names no experiment (make test-adapters starts one)",
)


@dataclass(frozen=True)
class Service:
    """An experiment, the tasks that it has, and the folder of its policy's tokenizer."""

    experiment: str
    tasks: tuple[str, ...]
    tokenizer: str


def service() -> Service:
    """Return what the environment names."""
    return Service(
        experiment=os.environ["TEST_EXPERIMENT"],
        tasks=tuple(os.environ["TEST_TASKS"].split(",")),
        tokenizer=os.environ["TEST_TOKENIZER"],
    )
