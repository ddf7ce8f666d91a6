"""Modes of training: how far the policy that samples may be behind the one that is trained.

A mode is a name for two settings: the bound on lag, and what becomes of the groups that are
unfinished when a batch is full.
"""

from collections.abc import Mapping
from typing import Any

from rollouts.exceptions import InvalidValue
from rollouts.selection_options import CANCEL, CARRY_OVER

SYNCHRONOUS, ONE_STEP_OFF, ASYNCHRONOUS = "synchronous", "one-step-off", "asynchronous"
MODES = (SYNCHRONOUS, ONE_STEP_OFF, ASYNCHRONOUS)
DEFAULT_LAG = 4
_BOUND = {SYNCHRONOUS: 0, ONE_STEP_OFF: 1}


def mode_of(max_policy_lag: int | None) -> str:
    """Return the mode that a bound on lag makes; without one all is asynchronous."""
    names = {bound: mode for mode, bound in _BOUND.items()}
    return ASYNCHRONOUS if max_policy_lag is None else names.get(max_policy_lag, ASYNCHRONOUS)


def with_mode(changes: Mapping[str, Any], *, present_lag: int | None = None) -> dict[str, Any]:
    """Return changes of an experiment with `mode` replaced by what it stands for.

    What is given beside it stays, unless it contradicts the mode. `present_lag` is the bound that
    holds now. Raises InvalidValue.
    """
    values = dict(changes)
    mode = values.pop("mode", None)
    if mode is not None:
        lag = values.get("max_policy_lag", _default_lag(mode, present_lag))
        if mode_of(lag) != mode:
            raise InvalidValue(
                f"The mode {mode!r} does not go with max_policy_lag {lag}, which is "
                f"{mode_of(lag)!r}: leave one of them out.",
                code="experiment.mode_contradicted",
            )
        values["max_policy_lag"] = lag
        unfinished = CANCEL if mode == SYNCHRONOUS else CARRY_OVER
        values["selection"] = {"unfinished": unfinished, **values.get("selection", {})}
    return values


def check_carry_over(*, max_policy_lag: int | None, unfinished: str) -> None:
    """Refuse to carry unfinished groups over to a later batch at lag 0. Raises InvalidValue."""
    if max_policy_lag == 0 and unfinished == CARRY_OVER:
        raise InvalidValue(
            "max_policy_lag 0 forbids to carry unfinished groups over: they would enter the next "
            "batch with tokens of an older policy. Set selection.unfinished to 'cancel' as well, "
            "or use the mode 'synchronous', which does both.",
            code="experiment.carry_over_at_lag_zero",
        )


def _default_lag(mode: str, present: int | None) -> int | None:
    if mode != ASYNCHRONOUS:
        return _BOUND[mode]
    return present if present is not None and present not in _BOUND.values() else DEFAULT_LAG
