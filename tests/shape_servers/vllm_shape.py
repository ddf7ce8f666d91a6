"""Answer as vLLM 0.33.0 does, through its own request and response classes."""

from typing import Any

from pydantic import ValidationError
from vllm.entrypoints.openai.completion.protocol import (  # type: ignore[import-not-found]
    CompletionLogProbs,
    CompletionRequest,
    CompletionResponse,
    CompletionResponseChoice,
    CompletionResponseStreamChoice,
    CompletionStreamResponse,
)
from vllm.entrypoints.scale_out.token_in_token_out.protocol import (  # type: ignore[import-not-found]
    GenerateRequest,
    GenerateTokensResponse,
    GenerateTokensStreamResponse,
)
from vllm.entrypoints.serve.engine.protocol import PromptTokenUsageInfo, UsageInfo  # type: ignore[import-not-found]
from vllm.exceptions import VLLMValidationError  # type: ignore[import-not-found]

from tests.shape_servers.made_up import MODEL, logprob, sampled

Answered = tuple[int, dict[str, Any] | list[str]]


class VllmShape:
    """Answer completions, the token interface and the control routes."""

    def __init__(self) -> None:
        self.version = "3"
        self.paused = False

    def get(self, path: str) -> dict[str, Any] | None:
        """Answer a GET."""
        answers: dict[str, dict[str, Any]] = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [{"id": MODEL, "max_model_len": 4096}]},
            "/weight_info": {"weight_version": self.version},
            "/is_paused": {"is_paused": self.paused},
        }
        return answers.get(path)

    def post(self, path: str, body: dict[str, Any]) -> Answered:
        """Answer a POST."""
        try:
            match path.partition("?")[0]:
                case "/v1/completions":
                    return self._complete(CompletionRequest.model_validate(body))
                case "/inference/v1/generate":
                    return self._generate(GenerateRequest.model_validate(body))
                case "/pause":
                    self.paused = True
                    return 200, {"status": "paused"}
                case "/resume":
                    self.paused = False
                    return 200, {"status": "resumed"}
                case "/update_weight_version":
                    self.version = body["new_version"]
                    return 200, {"success": True, "new_version": self.version}
                case "/reset_prefix_cache":
                    return 200, {}
        except (ValidationError, VLLMValidationError) as error:
            return 400, _error(str(error), "BadRequestError", 400)
        return 404, {"detail": "Not Found"}

    def _complete(self, asked: CompletionRequest) -> Answered:
        if asked.model_extra:
            return 400, _error(f"no such fields: {sorted(asked.model_extra)}", "Unknown", 400)
        if asked.model != MODEL:
            return 404, _error(f"The model `{asked.model}` does not exist.", "NotFoundError", 404)
        ids, reason = sampled(asked.prompt, asked.max_tokens, asked.stop_token_ids or [])
        usage = _usage(len(asked.prompt), len(ids))
        if not asked.stream:
            choice = CompletionResponseChoice(
                prompt_token_ids=asked.prompt if asked.return_token_ids else None,
                **self._choice(asked, ids, reason),
            )
            answer = CompletionResponse(model=MODEL, choices=[choice], usage=usage)
            return 200, answer.model_dump()
        events = []
        for place, token in enumerate(ids):
            last = place == len(ids) - 1
            fields = self._choice(asked, [token], reason if last else None, len(ids))
            choice = CompletionResponseStreamChoice(
                prompt_token_ids=None if place else asked.prompt, **fields
            )
            chunk = CompletionStreamResponse(id="cmpl-1", model=MODEL, choices=[choice])
            events.append(chunk.model_dump_json(exclude_unset=True))
        if asked.stream_options and asked.stream_options.include_usage:
            final = CompletionStreamResponse(id="cmpl-1", model=MODEL, choices=[], usage=usage)
            events.append(final.model_dump_json(exclude_none=True))
        return 200, events

    def _choice(
        self, asked: CompletionRequest, ids: list[int], reason: str | None, total: int = 0
    ) -> dict[str, Any]:
        values = [logprob(token, asked.temperature, raw=False) for token in ids]
        return {
            "index": 0,
            "text": "x" * len(ids),
            "token_ids": ids if asked.return_token_ids else None,
            "logprobs": CompletionLogProbs(
                tokens=["x"] * len(ids),
                token_logprobs=values,
                top_logprobs=[{"x": value} for value in values],
                text_offset=list(range(len(ids))),
            ),
            "finish_reason": reason,
            "weight_versions": self._spans(total or len(ids))
            if asked.return_weight_versions and reason
            else None,
        }

    def _generate(self, asked: GenerateRequest) -> Answered:
        how = asked.sampling_params
        ids, reason = sampled(asked.token_ids, how.max_tokens, how.stop_token_ids or [])
        usage = _usage(len(asked.token_ids), len(ids))

        def choice(some: list[int], why: str | None) -> dict[str, Any]:
            values = [
                {"token_id": token, "logprob": logprob(token, how.temperature, raw=False)}
                for token in some
            ]
            return {
                "index": 0,
                "token_ids": some,
                "finish_reason": why,
                "logprobs": {"content": values},
                "weight_versions": self._spans(len(ids)) if why else None,
            }

        common = {"request_id": asked.request_id}
        if not asked.stream:
            body = {**common, "model": MODEL, "usage": usage, "choices": [choice(ids, reason)]}
            if asked.return_token_ids:
                body["prompt_token_ids"] = asked.token_ids
            return 200, GenerateTokensResponse.model_validate(body).model_dump(mode="json")
        events = []
        for place, token in enumerate(ids):
            why = reason if place == len(ids) - 1 else None
            chunk = {**common, "choices": [choice([token], why)]}
            if place == 0 and asked.return_token_ids:
                chunk["prompt_token_ids"] = asked.token_ids
            answer = GenerateTokensStreamResponse.model_validate(chunk)
            events.append(answer.model_dump_json(exclude_unset=True))
        return 200, events

    def _spans(self, count: int) -> list[dict[str, Any]]:
        """Say that the weights changed after the first token."""
        first = {"version": str(int(self.version) - 1), "start": 0, "end": 1}
        return (
            [first, {"version": self.version, "start": 1, "end": count}] if count > 1 else [first]
        )


def _usage(prompt: int, count: int) -> UsageInfo:
    return UsageInfo(
        prompt_tokens=prompt,
        completion_tokens=count,
        total_tokens=prompt + count,
        prompt_tokens_details=PromptTokenUsageInfo(cached_tokens=prompt // 2),
    )


def _error(message: str, kind: str, code: int) -> dict[str, Any]:
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
