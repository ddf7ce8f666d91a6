"""Let a language model judge the answer by a rubric.

The only evaluator that reaches out of its process: to the server that its settings name. What
fails there is the grader's fault (`evaluator.judge_unavailable`) and never a score; what the
server refuses to look at, or is not agreed about, is decided like every other grading that
failed: by whether the same grading works without the policy's answer.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

from evaluators.answers import choose
from evaluators.base import Artefacts, Evaluator, InvalidSettings, JsonMap, JudgeAbstained, Score
from evaluators.judge_cache import VoteCache
from evaluators.judge_prompt import messages, validate_prompt, wants_conversation
from evaluators.judge_verdict import (
    AGGREGATES,
    KINDS,
    Judge,
    Outcome,
    Vote,
    put_together,
    read_agreement,
    read_scale,
    read_vote,
)
from evaluators.settings import (
    read_choice,
    read_count,
    read_flag,
    read_number,
    read_text,
    refuse_unknown,
)
from evaluators.surroundings import judges, remaining_seconds

KNOWN = {
    *(
        "url",
        "model",
        "api_key",
        "temperature",
        "top_p",
        "max_tokens",
        "request_seconds",
        "retries",
    ),
    *("source", "template", "system", "rubric", "question", "max_answer_characters"),
    *("votes", "seed", "verdict", "scale", "aggregate", "agreement", "abstain_reward"),
    *("seconds", "cache", "price_in", "price_out"),
}
MAX_VOTES = 32
RAW_BYTES = 32 * 1024  # of all votes together in the details
PER = 1_000_000  # prices are for so many tokens


class JudgeEvaluator(Evaluator):
    """Pay what a model's votes say, from 0 to 1.

    Settings: `url` of an OpenAI-compatible server, such as `http://judge:8000/v1`, `model`,
    `api_key` (`{"secret": "NAME"}`); `rubric` or a whole `template` with `{question}`, `{answer}`,
    `{reference}`, `{rubric}`, `{conversation}`, `{verdict}`, and `system`, which must name
    `{nonce}`; `source`, `max_answer_characters`; `votes`, `seed` of the first, `temperature`,
    `top_p`, `max_tokens`; `verdict`: `score` (`[[7]]` on `scale` [low, high]), `yes_no` or `json`;
    `aggregate`: `mean`, `median`, `majority` or `min`; `agreement`: the share of votes that must
    stand behind a result, else the judge abstains: a fault, or `abstain_reward`; `seconds` for all
    votes, `request_seconds` for one request, `retries` of each; `price_in`, `price_out` for a
    million tokens; `cache`. Payload: `reference` or `answer`, and where they differ by task
    `rubric`, `question`.
    """

    name = "judge"
    description = "A language model judges the answer by a rubric."
    needs_sandbox = False

    def wants_messages(self, settings: JsonMap) -> bool:
        """Tell whether the prompt shows the conversation."""
        return wants_conversation(settings)

    def sample_payload(self, settings: JsonMap) -> JsonMap:  # noqa: ARG002
        """Return the empty payload: a rubric needs no reference."""
        return {}

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        """Check names, the server's address, the prompt, sampling and how votes are counted."""
        refuse_unknown(settings, KNOWN, evaluator=self.name)
        choose(settings, Artefacts())
        _url(settings)
        if not read_text(settings, "model", "", most=200):
            raise InvalidSettings("judge: the settings have no 'model'")
        _check_key(settings)
        validate_prompt(settings, payload)
        _sampling(settings)
        read_choice(settings, "verdict", "score", KINDS)
        read_choice(settings, "aggregate", "mean", AGGREGATES)
        read_scale(settings)
        read_agreement(settings)
        read_flag(settings, "cache", True)
        _retries(settings)
        if settings.get("abstain_reward") is not None:
            read_number(settings, "abstain_reward", 0.0)

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        """Ask for the votes and put them together; an absent answer is judged as such."""
        from evaluators.judge_client import ask  # HTTP, which other evaluators' processes spare

        judge = _judge(settings)
        kind, scale = read_choice(settings, "verdict", "score", KINDS), read_scale(settings)
        given = choose(settings, artefacts)
        asked = messages(settings, payload, artefacts, given, verdict=kind, scale=scale)
        first = read_count(settings, "seed", 0, least=0, most=2**31)
        count = read_count(settings, "votes", 1, least=1, most=MAX_VOTES)
        known = judges()
        is_kept = read_flag(settings, "cache", True)
        votes = ask(
            judge,
            asked,
            range(first, first + count),
            cache=VoteCache(known.cache if is_kept else None, known.cache_bytes),
            seconds=_seconds(settings),
        )
        read = [read_vote(kind, vote.text, scale) for vote in votes]
        outcome = put_together(settings, read)
        details = _details(settings, judge, asked, votes, read, outcome)
        return _score(settings, outcome, details, votes)


def _score(
    settings: JsonMap, outcome: Outcome, details: dict[str, Any], votes: Sequence[Vote]
) -> Score:
    reward = outcome.score
    if reward is None:
        if settings.get("abstain_reward") is None:
            raise JudgeAbstained(
                f"the judge abstains: {outcome.reason}; give it more votes or a clearer rubric, or "
                "set 'abstain_reward'",
                log=json.dumps(details)[:20_000],
            )
        reward = read_number(settings, "abstain_reward", 0.0)
    cached = sum(vote.cached for vote in votes)
    return Score(
        reward=reward,
        rewards={
            "reward": reward,
            "agreement": outcome.agreement,
            "abstained": float(outcome.score is None),
        },
        details=details,
        log=f"{len(votes)} votes, {cached} of them kept; {outcome.reason or f'score {reward:g}'}",
    )


def _details(
    settings: JsonMap,
    judge: Judge,
    asked: Sequence[Mapping[str, str]],
    votes: Sequence[Vote],
    read: Sequence[float | None],
    outcome: Outcome,
) -> dict[str, Any]:
    room = RAW_BYTES // len(votes)
    fresh = [vote for vote in votes if not vote.cached]
    tokens_in = sum(vote.tokens_in or 0 for vote in fresh)
    tokens_out = sum(vote.tokens_out or 0 for vote in fresh)
    price_in, price_out = (read_number(settings, f"price_{way}", 0.0) for way in ("in", "out"))
    return {
        "url": judge.url,
        "model": judge.model,
        "prompt_sha256": hashlib.sha256(json.dumps(list(asked)).encode()).hexdigest(),
        "sampling": {
            "temperature": judge.temperature,
            "top_p": judge.top_p,
            "max_tokens": judge.max_tokens,
        },
        "votes": [
            {
                "score": score,
                "raw": _cut(vote.text, room),
                "seed": vote.seed,
                "finish_reason": vote.finish_reason,
                "tokens_in": vote.tokens_in,
                "tokens_out": vote.tokens_out,
                "cached": vote.cached,
                "requests": vote.requests,
            }
            for vote, score in zip(votes, read, strict=True)
        ],
        "unreadable": sum(score is None for score in read),
        "agreement": outcome.agreement,
        "abstained": outcome.reason if outcome.score is None else "",
        "tokens_in": tokens_in,
        "tokens_out": tokens_out,
        "cost": (tokens_in * price_in + tokens_out * price_out) / PER,
    }


def _cut(text: str, most_bytes: int) -> str:
    """Return the end of a text, where the verdict stands, in so many bytes of JSON."""
    while len(json.dumps(text)) > most_bytes:
        text = text[-(len(text) // 2) :]
    return text


def _judge(settings: JsonMap) -> Judge:
    temperature, top_p, max_tokens, request_seconds = _sampling(settings)
    key = settings.get("api_key", "")
    if not isinstance(key, str):
        raise InvalidSettings("judge: the secret of 'api_key' was not filled in on this node")
    return Judge(
        url=_url(settings),
        model=read_text(settings, "model", "", most=200),
        api_key=key,
        temperature=temperature,
        top_p=top_p,
        max_tokens=max_tokens,
        request_seconds=request_seconds,
        retries=_retries(settings),
    )


def _url(settings: JsonMap) -> str:
    url = read_text(settings, "url", "", most=500)
    try:
        parts = urlsplit(url)
        plain = not (parts.username or parts.password or parts.query or parts.fragment)
        usable = plain and parts.scheme in {"http", "https"} and parts.port != 0
        host = parts.hostname or ""
    except ValueError:
        usable, host = False, ""
    if not usable or not host or any(each.isspace() for each in url):
        raise InvalidSettings(
            "judge: 'url' must be the address of an OpenAI-compatible server such as "
            "http://judge:8000/v1, without user, query or fragment"
        )
    known = judges()
    if not known.allow(host):
        raise InvalidSettings(
            f"judge: this deployment takes judges on {', '.join(known.hosts)} alone: an operator "
            "sets PRORL_JUDGE_HOSTS"
        )
    return url


def _check_key(settings: JsonMap) -> None:
    key = settings.get("api_key", "")
    reference = isinstance(key, Mapping) and set(key) == {"secret"}
    if not reference and not (isinstance(key, str) and len(key) < 10_000 and key.isprintable()):
        raise InvalidSettings(
            'judge: \'api_key\' must be {"secret": "NAME"}, the name of a secret of the environment'
        )


def _sampling(settings: JsonMap) -> tuple[float, float, int, float]:
    temperature = read_number(settings, "temperature", 0.0)
    top_p = read_number(settings, "top_p", 1.0)
    request_seconds = read_number(settings, "request_seconds", 60.0)
    bounds = (
        ("temperature", temperature, 0.0, 5.0),
        ("top_p", top_p, 0.0, 1.0),
        ("request_seconds", request_seconds, 0.05, 3600.0),
        ("seconds", read_number(settings, "seconds", 300.0), 0.05, 3600.0),
        ("price_in", read_number(settings, "price_in", 0.0), 0.0, 1e6),
        ("price_out", read_number(settings, "price_out", 0.0), 0.0, 1e6),
    )
    for name, value, low, high in bounds:
        if not low <= value <= high:
            raise InvalidSettings(f"setting {name!r} is {value:g}; it must be {low:g} to {high:g}")
    read_count(settings, "seed", 0, least=0, most=2**31)
    votes = read_count(settings, "votes", 1, least=1, most=MAX_VOTES)
    if votes > 1 and temperature == 0:
        raise InvalidSettings(
            "judge: several 'votes' with temperature 0 are one vote; set a 'temperature'"
        )
    max_tokens = read_count(settings, "max_tokens", 1024, least=1, most=100_000)
    return temperature, top_p, max_tokens, request_seconds


def _retries(settings: JsonMap) -> int:
    return read_count(settings, "retries", 10, least=0, most=1000)


def _seconds(settings: JsonMap) -> float:
    """Return the time for all votes: the setting, or what is left of this grading's."""
    left = remaining_seconds()
    wanted = read_number(settings, "seconds", 300.0)
    return wanted if left is None else min(wanted, left)
