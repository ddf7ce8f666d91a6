"""Answer as SGLang 0.5.23 does, through its own JSON contract."""

import json
from typing import Any

from sglang.api.v1.api_types import GenerateRequest, GenerateResponse, JsonContractError  # type: ignore[import-not-found]

from tests.shape_servers.made_up import MODEL, logprob, sampled

Answered = tuple[int, dict[str, Any] | list[str]]


class SglangShape:
    """Answer `/generate` and the control routes; log-probabilities are raw at will."""

    def __init__(self) -> None:
        self.version = "5"
        self.mode = {"incremental": False, "raw": False}

    def get(self, path: str) -> dict[str, Any] | None:
        """Answer a GET."""
        answers: dict[str, dict[str, Any]] = {
            "/health": {"status": "ok"},
            "/v1/models": {"object": "list", "data": [{"id": MODEL, "max_model_len": 4096}]},
            "/model_info": {"model_path": MODEL, "weight_version": self.version},
        }
        return answers.get(path)

    def post(self, path: str, body: dict[str, Any]) -> Answered:
        """Answer a POST."""
        match path.partition("?")[0]:
            case "/generate":
                try:
                    # Unknown keys are ignored by the server; here they would hide a typing error.
                    known = GenerateRequest.from_json_value(body).to_json_value()
                    lost = sorted(set(body) - set(known))
                    lost += sorted(set(body["sampling_params"]) - set(known["sampling_params"]))
                    if lost:
                        return 400, {"error": f"no such fields: {lost}"}
                    return self._generate(known)
                except JsonContractError as error:
                    return 400, {"error": str(error)}
            case "/_mode":
                self.mode = {**self.mode, **body}
                return 200, {}
            case "/pause_generation":
                if body["mode"] not in ("abort", "retract", "in_place"):
                    return 422, {"error": "mode"}
                return 200, {"message": "Generation paused successfully.", "status": "ok"}
            case "/continue_generation":
                return 200, {"message": "Generation continued successfully.", "status": "ok"}
            case "/update_weight_version":
                self.version = body["new_version"]
                return 200, {"success": True, "message": "", "new_version": self.version}
            case "/flush_cache":
                return 200, {}
        return 404, {"detail": "Not Found"}

    def _generate(self, asked: dict[str, Any]) -> Answered:
        how = asked["sampling_params"]
        ids, reason = sampled(asked["input_ids"], how["max_new_tokens"], how["stop_token_ids"])
        ends = list(range(1, len(ids) + 1)) if asked.get("stream") else [len(ids)]
        events, sent = [], 0
        for end in ends:
            first = sent if self.mode["incremental"] else 0
            events.append(self._body(asked, ids, first, end, reason))
            sent = end
        if asked.get("stream"):
            return 200, [json.dumps(body) for body in events]
        return 200, events[0]

    def _body(
        self, asked: dict[str, Any], ids: list[int], first: int, end: int, reason: str
    ) -> dict[str, Any]:
        how, part, last = asked["sampling_params"], ids[first:end], end == len(ids)
        finish = {"type": "stop", "matched": ids[-1]}
        if reason == "length":
            finish = {"type": "length", "length": len(ids)}
        meta: dict[str, Any] = {
            "id": asked["rid"],
            "finish_reason": finish if last else None,
            "prompt_tokens": len(asked["input_ids"]),
            "completion_tokens": end,
            "cached_tokens": len(asked["input_ids"]) // 2,
            "weight_version": self.version,
            "output_token_logprobs": [
                [logprob(token, how["temperature"], raw=self.mode["raw"]), token, None]
                for token in part
            ],
        }
        if last and len(ids) > 1:
            old = str(int(self.version) - 1)
            meta["weight_versions"] = [
                {"version": old, "start": 0, "end": 1},
                {"version": self.version, "start": 1, "end": len(ids)},
            ]
        body = {"text": "x" * end, "output_ids": part, "meta_info": meta}
        # Decoding checks the shape; encoding gives it as SGLang would write it.
        checked: dict[str, Any] = GenerateResponse.from_json_value(body).to_json_value()
        return checked
