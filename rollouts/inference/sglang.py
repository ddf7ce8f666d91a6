"""Speak SGLang's `/generate`: ids in, ids and log-probabilities out."""

import threading
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollouts.inference.answers import Answer, as_count, as_version, parse_object
from rollouts.inference.asking import Asker
from rollouts.inference.exceptions import InferenceFault
from rollouts.inference.logprob_probe import LogprobProbe
from rollouts.inference.protocol import (
    Cancelled,
    Generation,
    Health,
    SamplingParams,
    Server,
)
from rollouts.inference.statuses import check_context, fault_of_status
from rollouts.inference.trace import UNKNOWN_POLICY_VERSION
from rollouts.inference.transport import Transport
from rollouts.inference.vllm import openai_health

# Each event repeats all tokens unless the server was started to send increments: at one event a
# token an answer of 4,000 tokens would be 300 MB. This many events keep it below 10 MB.
CUMULATIVE_EVENTS = 64
WITHOUT_ORIGINAL = "Start SGLang without SGLANG_RETURN_ORIGINAL_LOGPROB."


class SglangAdapter:
    """Generate through SGLang's own interface.

    Start it with `--incremental-streaming-output`: then every token comes as it is sampled, else
    about 64 times a turn. Shapes: SGLang 0.5.23, sglang/srt/managers/{io_struct,
    tokenizer_manager}.py.
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self._transport = transport or Transport()
        self._asker = Asker(self._transport)
        self._probe = LogprobProbe()
        self._lock = threading.Lock()
        self._incremental: set[str] = set()

    def generate(
        self,
        server: Server,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        *,
        timeout_seconds: float,
        cancelled: Cancelled | None = None,
        interrupted: Cancelled | None = None,
        cache_salt: str | None = None,
    ) -> Generation:
        """Sample one turn, as TokenAdapter says; raise an InferenceFault."""
        check_context(server, prompt_ids, sampling)
        interval = 1
        if server.url not in self._incremental:
            interval = max(1, sampling.max_tokens // CUMULATIVE_EVENTS)
        answer = SglangAnswer(server, prompt_ids, sampling)
        generation = self._asker.ask(
            "/generate",
            _request_body(prompt_ids, sampling, interval, cache_salt),
            answer,
            timeout_seconds=timeout_seconds,
            cancelled=cancelled,
            interrupted=interrupted,
        )
        if answer.incremental:
            with self._lock:
                self._incremental.add(server.url)
        return generation

    def health(self, server: Server, *, timeout_seconds: float) -> Health:
        """Ask whether the server answers, which model and version, what its logprobs are of."""
        health = openai_health(self._transport, server, timeout_seconds=timeout_seconds)
        if health.ok:
            version = self._version(server, timeout_seconds)
            health = replace(health, policy_version=version)
        return self._probe.add_mode(
            self.generate, server, health, advice=WITHOUT_ORIGINAL, timeout_seconds=timeout_seconds
        )

    def _version(self, server: Server, timeout_seconds: float) -> int | None:
        url = f"{server.url.rstrip('/')}/model_info"
        try:
            answer = self._transport.request("GET", url, timeout_seconds=timeout_seconds)
            return as_version(parse_object(answer.body).get("weight_version"))
        except InferenceFault:
            return None


class SglangAnswer(Answer):
    """Read an answer: whole, or events that hold all tokens so far or only the new ones."""

    incremental = False

    def read(self, body: dict[str, Any]) -> bool:
        """Take one body, as Answer says."""
        meta = body["meta_info"]
        ids, triples = body["output_ids"], meta.get("output_token_logprobs") or []
        if not isinstance(ids, list) or len(triples) != len(ids):
            raise self.malformed("sent log-probabilities that do not match the ids")
        if [triple[1] for triple in triples] != ids:
            raise self.malformed("sent log-probabilities of other tokens")
        known = len(self.ids)
        self._place(ids, meta.get("completion_tokens"))
        self.add(ids, [triple[0] for triple in triples])
        self._stamp(known, as_version(meta.get("weight_version")))
        if meta.get("prompt_tokens") not in (None, len(self.prompt_ids)):
            raise self.malformed("understood another prompt than the one sent")
        self.cached_tokens = as_count(meta.get("cached_tokens"))
        if meta.get("finish_reason") is not None:
            self.spans = meta.get("weight_versions")
            self._end(meta["finish_reason"])
            self.expect_count(meta.get("completion_tokens"))
        return False

    def _place(self, ids: list[Any], total: Any) -> None:
        """Find out whether the ids are all or the new ones; forget the old where they are all."""
        if total == len(ids) and self.ids:
            if ids[: len(self.ids)] != self.ids:
                raise self.malformed("changed tokens that it had sent before")
            self.ids, self.logprobs = [], []
        elif total is not None and self.ids and total == len(self.ids) + len(ids):
            self.incremental = True
        elif total is not None and total != len(ids):
            raise self.malformed(f"sampled {total} tokens and sent {len(self.ids) + len(ids)}")

    def _stamp(self, known: int, version: int | None) -> None:
        """Stamp the tokens after the first `known` with the version that this event tells.

        It tells which weights are there now. Where the event before told others, or none, they
        were exchanged somewhere among these tokens, and nobody knows where.
        """
        same = not known or self.version == version
        stamp = version if same and version is not None else UNKNOWN_POLICY_VERSION
        self.stamps += [stamp] * (len(self.ids) - len(self.stamps))
        self.version = version

    def _end(self, reason: dict[str, Any]) -> None:
        kind, status = reason["type"], reason.get("status_code")
        if kind == "abort" and status is not None and int(status) >= 400:
            said = f"{self.server.url} gave up with {int(status)}: {reason.get('message')}"
            raise fault_of_status(int(status), said)
        self.finish(kind)


def _request_body(
    prompt_ids: Sequence[int], sampling: SamplingParams, interval: int, cache_salt: str | None
) -> dict[str, Any]:
    how: dict[str, Any] = {
        "max_new_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": -1 if sampling.top_k is None else sampling.top_k,
        "stop_token_ids": list(sampling.stop_token_ids),
        # Else the token that ended the turn is taken off the ids.
        "no_stop_trim": True,
        "stream_interval": interval,
    }
    if sampling.seed is not None:
        how["sampling_seed"] = sampling.seed
    body: dict[str, Any] = {
        "rid": uuid.uuid4().hex,
        "input_ids": list(prompt_ids),
        "sampling_params": how,
        "return_logprob": True,
        "logprob_start_len": -1,
    }
    if cache_salt:
        body["cache_salt"] = cache_salt
    return body
