"""The reference's sampling parameters: which are used, which are known and left aside, and why."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rollouts.exceptions import InvalidValue
from rollouts.options import Budgets, Sampling

# Known and left aside; what is not known at all is left aside too.
IGNORED: Mapping[str, str] = {
    "api_key": "inference servers are registered by address; no key of a request is sent on",
    "base_url": "servers are registered by /add_llm_server",
    "native_tool_calling": "the environment's agent decides how tools are called",
    "modify_params": "no parameter is rewritten on its way to the server",
    "log_completions": "every trajectory is kept",
    "log_completions_folder": "every trajectory is kept",
    "ensure_thinking_end_properly": "sampled ids are never edited",
    "strict_loop_detector": "the environment's agent has its own limit on repetition",
    "enable_thinking": "the policy's chat template decides",
    "enable_vision": "episodes are of text",
    "enable_a11y_tree": "episodes are of text",
    "is_reasoning_task": "the data source decides the environment",
    "num_retries": "the service tries again by class of fault",
    "retry_min_wait": "the service tries again by class of fault",
    "retry_max_wait": "the service tries again by class of fault",
    "retry_multiplier": "the service tries again by class of fault",
    "timeout": "the surface's timeout_seconds holds",
    "seed": "one seed for every turn and sample would make a group's samples equal",
    "max_input_tokens": "the policy's context holds",
}
USED = (
    *("model", "custom_tokenizer", "temperature", "top_p", "top_k", "max_output_tokens"),
    *("max_model_len", "max_iterations", "token_level_generation"),
)
# The reference's own defaults of `max_iterations` and `max_output_tokens`.
DEFAULT_TURNS = 2
DEFAULT_TURN_TOKENS = 4096


@dataclass(frozen=True, kw_only=True)
class JobSettings:
    """What a request's sampling parameters come to."""

    model: str
    tokenizer: str
    sampling: dict[str, Any]
    budgets: dict[str, Any]
    with_tokens: bool


def read_sampling(given: Mapping[str, Any], *, timeout_seconds: float) -> JobSettings:
    """Return what the parameters come to; a null is as if it were not there. Raises InvalidValue.

    At token level a turn may be as long as `max_model_len` lets it, as in the reference, and
    `max_output_tokens` has no say; otherwise it bounds a turn.
    """
    values = {name: value for name, value in given.items() if value is not None}
    with_tokens = values.get("token_level_generation", False)
    if not isinstance(with_tokens, bool):
        raise InvalidValue("token_level_generation must be true or false.")
    model, tokenizer = values.get("model", ""), values.get("custom_tokenizer", "")
    if not isinstance(model, str) or not isinstance(tokenizer, str):
        raise InvalidValue("model and custom_tokenizer must be texts.")
    sampling: dict[str, Any] = {
        name: values[name] for name in ("temperature", "top_p", "top_k") if name in values
    }
    if sampling.get("top_k") == 0:
        sampling["top_k"] = -1
    longest = values.get("max_model_len")
    turn = values.get("max_output_tokens", DEFAULT_TURN_TOKENS)
    sampling["max_tokens"] = longest if with_tokens and longest is not None else turn
    budgets = {
        "max_turns": values.get("max_iterations", DEFAULT_TURNS),
        "init_seconds": timeout_seconds,
        "run_seconds": timeout_seconds,
        "eval_seconds": timeout_seconds,
        **({} if longest is None else {"max_sampled_tokens": longest}),
    }
    return JobSettings(
        model=model,
        tokenizer=tokenizer,
        sampling=Sampling.parse(sampling).as_dict(),
        budgets=Budgets.parse(budgets).as_dict(),
        with_tokens=with_tokens,
    )
