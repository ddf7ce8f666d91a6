"""Score an answer that must be JSON: does it fit a schema, and does it say what is expected?"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

from evaluators.answers import REWARDS, choose
from evaluators.base import Artefacts, Evaluator, InvalidSettings, JsonMap, Score
from evaluators.bounded import tell_within
from evaluators.final_answer import last_part
from evaluators.settings import read_choice, read_flag, read_number, refuse_unknown

FORMATS = ("any", "bare", "fenced")
SCALARS = ("all", "fraction")
KNOWN = {
    "source",
    "format",
    "schema",
    "scalar",
    "formats",
    "skip_thinking",
    "seconds",
    *REWARDS,
}
MAX_DEPTH = 64
RECURSION_LIMIT = 6_000  # a level takes up to some dozens of calls
MAX_ANSWER_CHARACTERS = 1_000_000
MAX_SCHEMA_CHARACTERS = 1_000_000
MAX_STARTS = 50
_FENCE = re.compile(r"^[ \t]*```[ \t]*(\w*)[^\n]*\n(.*?)^[ \t]*```", re.MULTILINE | re.DOTALL)
_MISSING = object()


class _Unreadable(Exception):
    """Say why a text is no JSON that counts."""


class JsonSchemaEvaluator(Evaluator):
    """Pay when the answer is JSON that fits a schema and has the expected values.

    The payload's `schema` wins over the setting's; `answer` in the payload is the whole expected
    value, `expected` an object of JSON pointers (`/items/0/name`) and values. Settings: `source`;
    `format`: `bare` (the whole text is JSON), `fenced` (the last fenced block) or `any` (these,
    else the last object or list in the text); `scalar`: `all` pays `correct_reward` when
    everything holds, `fraction` the part of the expected values that do, in a valid answer;
    `formats`: `format` in the schema is checked too; `seconds` of processor time.
    References out of the schema are refused, nothing is ever fetched.
    """

    name = "json_schema"
    description = "The answer is JSON that fits a schema and has the expected values."
    needs_sandbox = False

    def sample_payload(self, settings: JsonMap) -> JsonMap:
        """Return a payload with a schema where the settings have none."""
        return {} if "schema" in settings else {"schema": True}

    def reference_answer(self, settings: JsonMap, payload: JsonMap) -> str | None:
        """Return the whole expected value; None where only parts of it are known."""
        if "answer" not in payload:
            return None
        value = json.dumps(payload["answer"])
        is_fenced = read_choice(settings, "format", "any", FORMATS) == "fenced"
        return f"```json\n{value}\n```" if is_fenced else value

    def validate(self, settings: JsonMap, payload: JsonMap) -> None:
        """Check names, the schema, its references and the pointers."""
        refuse_unknown(settings, KNOWN, evaluator=self.name)
        choose(settings, Artefacts())
        for name in REWARDS:
            read_number(settings, name, 0.0)
        read_choice(settings, "format", "any", FORMATS)
        read_choice(settings, "scalar", "all", SCALARS)
        read_flag(settings, "formats", False)
        read_flag(settings, "skip_thinking", True)
        _seconds(settings)
        _schema(settings, payload)
        _expected(payload)

    def score(self, settings: JsonMap, payload: JsonMap, artefacts: Artefacts) -> Score:
        """Read, validate and compare; what cannot be read is wrong: a score and no fault."""
        schema, expected = _schema(settings, payload), _expected(payload)
        text = last_part(
            choose(settings, artefacts) or "",
            tail_characters=0,
            skip_thinking=read_flag(settings, "skip_thinking", True),
        )
        # What happens before the answer is looked at is the schema's doing.
        told = tell_within(
            _seconds(settings),
            lambda: _steps(settings, schema, expected, text),
        )
        if not told.values:
            raise InvalidSettings(
                f"json_schema: the schema cannot be used ({told.trouble}); correct its references "
                "and patterns"
            )
        found: dict[str, Any] = {"parsed": False, "valid": False, "matched": [], "wrong": ""}
        for each in told.values[1:]:
            found.update(each)
        if found.get("schema_fault"):
            raise InvalidSettings(f"json_schema: {found['schema_fault']}")
        return _score(settings, found, told.trouble, len(expected))


def _score(settings: JsonMap, found: Mapping[str, Any], trouble: str, expected: int) -> Score:
    matched = sum(found["matched"])
    fraction = matched / expected if expected else 1.0
    correct = bool(found["valid"]) and matched == expected
    low = read_number(settings, "incorrect_reward", 0.0)
    high = read_number(settings, "correct_reward", 1.0)
    if read_choice(settings, "scalar", "all", SCALARS) == "fraction" and found["valid"]:
        reward = low + (high - low) * fraction
    else:
        reward = high if correct else low
    wrong = found["wrong"] or (f"the answer took too much ({trouble})" if trouble else "")
    return Score(
        reward=reward,
        rewards={
            "reward": reward,
            "accuracy": float(correct),
            "format": float(found["parsed"]),
            "valid": float(found["valid"]),
            "expected": fraction if found["valid"] else 0.0,
        },
        details={
            "parsed": found["parsed"],
            "valid": found["valid"],
            "wrong": wrong,
            "matched": found["matched"],
            "correct": correct,
        },
        log=wrong or "the answer is valid JSON by the schema",
    )


def _steps(
    settings: JsonMap, schema: Any, expected: Mapping[str, Any], text: str
) -> Iterator[dict[str, Any] | bool]:
    """Yield what is found about the schema, then about the answer."""
    import jsonschema
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    checker = kind.FORMAT_CHECKER if read_flag(settings, "formats", False) else None
    # An empty registry: references lead nowhere outside of the schema.
    validator = kind(schema, registry=Registry(), format_checker=checker)
    yield True
    try:
        value = _read(text, read_choice(settings, "format", "any", FORMATS))
    except _Unreadable as error:
        yield {"wrong": str(error)}
        return
    yield {"parsed": True}
    # Room for an answer that is as deep as it may be: what then has no end is the schema.
    sys.setrecursionlimit(RECURSION_LIMIT)
    try:
        wrong = next(iter(validator.iter_errors(value)), None)
    except Unresolvable as fault:
        yield {"schema_fault": f"a reference leads nowhere: {str(fault)[:300]}"}
        return
    except RecursionError:
        yield {"schema_fault": "the schema refers to itself without end"}
        return
    except re.error as fault:
        yield {"schema_fault": f"the pattern {str(fault.pattern)[:200]!r} is wrong: {fault}"}
        return
    if wrong is not None:
        where = "/".join(str(part) for part in wrong.absolute_path)
        yield {"wrong": f"at /{where[:300]}: {wrong.message[:700]}"}
        return
    yield {"valid": True}
    matched = [_equal(_at(value, pointer), wanted) for pointer, wanted in expected.items()]
    missed = [pointer for pointer, same in zip(expected, matched, strict=True) if not same]
    other = f"not the expected value at {missed[0][:300] or 'the root'!r}" if missed else ""
    yield {"matched": matched, "wrong": other}


def _read(text: str, wanted: str) -> Any:
    if len(text) > MAX_ANSWER_CHARACTERS:
        raise _Unreadable(f"the answer has more than {MAX_ANSWER_CHARACTERS} characters")
    if not text.strip():
        raise _Unreadable("there is no answer")
    blocks = _FENCE.findall(text) if wanted != "bare" else []
    blocks = [body for language, body in blocks if language.lower() in ("", "json", "jsonc")]
    if blocks:
        return _loaded(blocks[-1])
    if wanted == "fenced":
        raise _Unreadable("there is no fenced block of JSON")
    try:
        return _loaded(text)
    except _Unreadable:
        if wanted == "bare":
            raise
        return _embedded(text)


def _embedded(text: str) -> Any:
    """Return the last object or list that stands in prose, the outermost of what is nested."""
    decoder = json.JSONDecoder(parse_constant=_refuse, object_pairs_hook=_unique)
    position, last, reason = 0, _MISSING, "there is no JSON in the answer"
    for _ in range(MAX_STARTS):
        start = re.compile(r"[{\[]").search(text, position)
        if start is None:
            break
        try:
            last, position = decoder.raw_decode(text, start.start())
        except _Unreadable as fault:
            position, reason = start.end(), str(fault)
        except (ValueError, RecursionError):
            position = start.end()
    if last is _MISSING:
        raise _Unreadable(reason)
    return _shallow(last)


def _loaded(text: str) -> Any:
    try:
        value = json.loads(text, parse_constant=_refuse, object_pairs_hook=_unique)
    except RecursionError as error:
        raise _Unreadable(f"the answer is nested deeper than {MAX_DEPTH}") from error
    except ValueError as error:
        raise _Unreadable(f"the answer is no JSON: {str(error)[:200]}") from error
    return _shallow(value)


def _shallow(value: Any) -> Any:
    level, depth = [value], 0
    while level:
        depth += 1
        if depth > MAX_DEPTH:
            raise _Unreadable(f"the answer is nested deeper than {MAX_DEPTH}")
        below: list[Any] = []
        for each in level:
            if isinstance(each, dict):
                below.extend(each.values())
            elif isinstance(each, list):
                below.extend(each)
        level = [each for each in below if isinstance(each, dict | list)]
    return value


def _refuse(constant: str) -> NoReturn:
    raise _Unreadable(f"the answer holds {constant}, which is no JSON")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        raise _Unreadable("the answer has an object with the same name twice")
    return value


def _at(value: Any, pointer: str) -> Any:
    """Return what a JSON pointer (RFC 6901) names, `_MISSING` when there is nothing."""
    for part in pointer.split("/")[1:]:
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(value, dict) and name in value:
            value = value[name]
        elif isinstance(value, list) and re.fullmatch(r"0|[1-9]\d{0,8}", name):
            value = value[int(name)] if int(name) < len(value) else _MISSING
        else:
            return _MISSING
    return value


def _equal(given: Any, wanted: Any) -> bool:
    """Compare as JSON does: 1 equals 1.0, and neither equals true."""
    if isinstance(given, bool) or isinstance(wanted, bool):
        return given is wanted
    if isinstance(given, dict) and isinstance(wanted, dict):
        return given.keys() == wanted.keys() and all(_equal(given[k], wanted[k]) for k in wanted)
    if isinstance(given, list) and isinstance(wanted, list):
        return len(given) == len(wanted) and all(map(_equal, given, wanted))
    return bool(given == wanted)


def _expected(payload: JsonMap) -> dict[str, Any]:
    expected = payload.get("expected", {})
    if not isinstance(expected, Mapping) or any(
        not isinstance(pointer, str) or (pointer and not pointer.startswith("/"))
        for pointer in expected
    ):
        raise InvalidSettings(
            "json_schema: the payload's 'expected' must be an object of JSON pointers such as "
            '"/items/0/name" and values'
        )
    if len(expected) > 1000:
        raise InvalidSettings("json_schema: the payload's 'expected' has more than 1000 pointers")
    whole = {"": payload["answer"]} if "answer" in payload else {}
    return {**whole, **expected}


def _schema(settings: JsonMap, payload: JsonMap) -> Any:
    schema = payload.get("schema", settings.get("schema", _MISSING))
    if schema is _MISSING:
        raise InvalidSettings("json_schema: neither the payload nor the settings have a 'schema'")
    if isinstance(schema, str):  # as rows of data sets often carry it
        try:
            schema = json.loads(schema[: MAX_SCHEMA_CHARACTERS + 1])
        except (ValueError, RecursionError) as error:
            raise InvalidSettings(f"json_schema: the 'schema' text is no JSON: {error}") from error
    if not isinstance(schema, Mapping | bool):
        raise InvalidSettings("json_schema: the 'schema' must be an object, true or false")
    _check_schema(schema)
    return schema


def _check_schema(schema: Any) -> None:
    import jsonschema

    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        where = "/".join(str(part) for part in error.absolute_path)
        raise InvalidSettings(
            f"json_schema: the schema is wrong at /{where[:300]}: {error.message[:300]}"
        ) from error
    except RecursionError as error:
        raise InvalidSettings("json_schema: the schema is nested too deep") from error
    known = set(_values(schema, ("$id", "id")))
    for reference in _values(schema, ("$ref", "$dynamicRef")):
        document = reference.partition("#")[0]
        if document and document not in known:
            raise InvalidSettings(
                f"json_schema: the reference {reference[:200]!r} leads out of the schema; put what "
                "it names under $defs"
            )


def _values(schema: Any, names: tuple[str, ...]) -> Iterator[str]:
    waiting = [schema]
    while waiting:
        each = waiting.pop()
        if isinstance(each, Mapping):
            yield from (each[name] for name in names if isinstance(each.get(name), str))
            waiting.extend(each.values())
        elif isinstance(each, list):
            waiting.extend(each)


def _seconds(settings: JsonMap) -> float:
    seconds = read_number(settings, "seconds", 5.0)
    if not 0.1 <= seconds <= 600:
        raise InvalidSettings(f"setting 'seconds' is {seconds:g}; it must be 0.1 to 600")
    return seconds
