"""Speak llama.cpp's own server: `/completion` with ids in, ids and probabilities out."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from rollouts.inference.answers import Answer, as_count, parse_object
from rollouts.inference.asking import Asker
from rollouts.inference.exceptions import InferenceFault
from rollouts.inference.protocol import (
    Cancelled,
    Generation,
    Health,
    SamplingParams,
    Server,
)
from rollouts.inference.statuses import check_context
from rollouts.inference.transport import Transport
from rollouts.inference.vllm import openai_health

STOP_TYPES = {"eos": "stop", "word": "stop", "limit": "length"}


class LlamaCppAdapter:
    """Generate through `llama-server`.

    `post_sampling_probs` asks for probabilities after temperature, top-k and top-p; without it
    they are of the raw logits. The server knows only the model's own end tokens: other stop
    tokens end the turn here, as they arrive. Of a token that ends inside a character it tells no
    probability, so such an answer is MalformedAnswer: some scripts and emoji cannot be sampled.
    Shapes: llama.cpp, tools/server/{server-context,server-task}.cpp (2026).
    """

    def __init__(self, transport: Transport | None = None) -> None:
        self._transport = transport or Transport()
        self._asker = Asker(self._transport)

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
        """Sample one turn, as TokenAdapter says; raise an InferenceFault.

        The server has no salts: with one, it keeps and uses no prefix at all.
        """
        check_context(server, prompt_ids, sampling)
        body: dict[str, Any] = {
            "model": server.model,
            "prompt": list(prompt_ids),
            "n_predict": sampling.max_tokens,
            # The whole chain, in vLLM's order: the server's defaults have min-p and more.
            "samplers": ["temperature", "top_k", "top_p"],
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or 0,
            "top_p": sampling.top_p,
            "seed": -1 if sampling.seed is None else sampling.seed,
            "n_probs": 1,
            "post_sampling_probs": True,
            "return_tokens": True,
            "cache_prompt": cache_salt is None,
        }
        return self._asker.ask(
            "/completion",
            body,
            LlamaCppAnswer(server, prompt_ids, sampling),
            timeout_seconds=timeout_seconds,
            cancelled=cancelled,
            interrupted=interrupted,
        )

    def health(self, server: Server, *, timeout_seconds: float) -> Health:
        """Ask whether the server answers, which model it serves and how long its context is."""
        health = openai_health(self._transport, server, timeout_seconds=timeout_seconds)
        if not health.ok:
            return health
        url = f"{server.url.rstrip('/')}/props"
        try:
            answer = self._transport.request("GET", url, timeout_seconds=timeout_seconds)
            settings = parse_object(answer.body).get("default_generation_settings")
        except InferenceFault:
            settings = None
        length = as_count(settings.get("n_ctx")) if isinstance(settings, dict) else None
        return replace(health, max_model_len=length, logprob_mode="processed_logprobs")


class LlamaCppAnswer(Answer):
    """Read a completion: whole, or one event a token and a last one without."""

    def read(self, body: dict[str, Any]) -> bool:
        """Take one body, as Answer says."""
        self.logprob_mode = "processed_logprobs"
        ids = body["tokens"]
        entries = body.get("completion_probabilities") or []
        if len(entries) != len(ids) or [entry["id"] for entry in entries] != ids:
            raise self.malformed(
                "told no probability of a token, as it does of those that end inside a character"
            )
        self.add(ids, [math.log(entry["prob"]) for entry in entries])
        if not body["stop"]:
            stopped = bool(ids) and ids[-1] in self.sampling.stop_token_ids
            if stopped:
                self.finish("stop")
            return stopped
        self.expect_count(body.get("tokens_predicted"))
        timings = body.get("timings") or {}
        self.cached_tokens = as_count(timings.get("cache_n"))
        self.finish(STOP_TYPES.get(body["stop_type"], body["stop_type"]))
        return True
