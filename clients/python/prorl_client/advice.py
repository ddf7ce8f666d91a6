"""What to do about a refusal, by its code or its status."""

from __future__ import annotations

BY_CODE = {
    "auth.missing": "Set PRORL_TOKEN, or pass token=.",
    "auth.invalid": "Ask an operator for a new token.",
    "auth.bound_token": "Use a token that is not bound to experiments.",
    "batch.expired": "Drop what you computed from it and lease again: its groups come back. "
    "Keep leases alive by leaving `keep_alive` on.",
    "batch.returned": "It was given back before; lease again.",
    "batch.rewound": "The experiment went back to an older version; lease again.",
    "batch.acknowledged": "It was consumed before; nothing is left to do.",
    "experiment.stopped": "A stopped experiment stays so; create another.",
    "idempotency.conflict": "Use a new idempotency key for a new request.",
    "policy.control_not_allowed": "Begin the update with control=False.",
    "policy.shared": "Rewind with force=True if the others may lose what they sampled since.",
    "policy.update_open": "Complete or abandon the open update first: `policy.updates()` lists it.",
    "policy.version_mismatch": "Load the weights into every server, or remove the server.",
    "policy.version_not_newer": "Update to a higher version, or rewind the experiment.",
    "request.too_large": "Send fewer or smaller groups in one call.",
    "rollout.done": "It is over; read its trajectory.",
    "task.unknown": "Look at `prorl tasks list` for the references that there are.",
    "trajectory.none": "Wait until the rollout is done.",
}
BY_STATUS = {
    401: "Set PRORL_TOKEN, or pass token=; ask an operator for a token.",
    403: "Ask an operator for a token with the scope that this needs.",
    404: "Check the id, and that the token's user owns it.",
    422: "Use a new idempotency key for a new request.",
    429: "Send less at once.",
    500: "Tell the operator what you called and when; the service logged the error.",
    502: "Ask the operator whether the service is up.",
    503: "Ask the operator whether the service is up: /readyz says what is missing.",
    504: "Ask the operator whether the service is up.",
}


def advice_for(code: str, status: int) -> str:
    """Return a sentence that says what to do, '' when nobody knows."""
    return BY_CODE.get(code) or BY_STATUS.get(status, "")
