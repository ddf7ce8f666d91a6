"""Speak vLLM's `/inference/v1/generate`: ids alone, nothing is turned into text."""

import uuid
from collections.abc import Sequence
from typing import Any

from rollouts.inference.protocol import Cancelled, Generation, SamplingParams, Server
from rollouts.inference.statuses import check_context
from rollouts.inference.vllm import VllmAdapter, VllmAnswer, sampling_body


class VllmGenerateAdapter(VllmAdapter):
    """Generate through vLLM's token interface.

    A kind of its own instead of a guess: the route exists only where the operator started vLLM
    with `--enable-scale-out` (403 otherwise), and finding that out would cost every server a
    request that fails. Shapes: vLLM 0.33.0, vllm/entrypoints/scale_out/token_in_token_out.
    """

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
        body: dict[str, Any] = {
            "request_id": uuid.uuid4().hex,
            "model": server.model,
            "token_ids": list(prompt_ids),
            "sampling_params": {"logprobs": 0, **sampling_body(sampling)},
            "return_token_ids": True,
        }
        if cache_salt:
            body["cache_salt"] = cache_salt
        return self._asker.ask(
            "/inference/v1/generate",
            body,
            VllmGenerateAnswer(server, prompt_ids, sampling),
            timeout_seconds=timeout_seconds,
            cancelled=cancelled,
            interrupted=interrupted,
        )


class VllmGenerateAnswer(VllmAnswer):
    """Read an answer in the mode `tokens`; the prompt's ids are beside the choices."""

    def read(self, body: dict[str, Any]) -> bool:
        """Take one body, as Answer says."""
        self.expect_prompt(body.get("prompt_token_ids"))
        return super().read(body)

    def logprobs_of(self, choice: dict[str, Any]) -> Any:
        """Return the log-probabilities of a choice's tokens, which name their tokens."""
        given: Any = choice.get("logprobs")
        ids: list[Any] = choice["token_ids"]
        if given is None and not ids:
            return []
        entries = given["content"]
        named = [entry.get("token_id", token) for entry, token in zip(entries, ids, strict=True)]
        if named != ids:
            raise self.malformed("sent log-probabilities of other tokens")
        return [entry["logprob"] for entry in entries]
