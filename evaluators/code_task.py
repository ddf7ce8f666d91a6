"""Read what a programming task says: its tests, in the forms that data sets have."""

from __future__ import annotations

import json
import keyword
import posixpath
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from evaluators.answers import SOURCES
from evaluators.base import InvalidSettings, JsonMap
from evaluators.code_asserts import Assertion, called_name, imported_names, read_assertions
from evaluators.code_compare import COMPARISONS
from evaluators.scope import read_network
from evaluators.settings import finite, read_choice, refuse_unknown

REWARDS = ("all_pass", "pass_rate")
MAX_TESTS = 10_000
MAX_BYTES = 32_000_000


@dataclass(frozen=True)
class Language:
    """Say how programs of a language are found in an answer, built and run."""

    tags: tuple[str, ...]
    file: str
    compile: str = ""
    run: str = ""


LANGUAGES: Mapping[str, Language] = {
    "python": Language(("python", "py", "python3", ""), "main.py"),
    "cpp": Language(
        ("cpp", "c++", "cc", ""), "main.cpp", "g++ -O2 -std=c++17 -o main main.cpp", "{folder}/main"
    ),
    "c": Language(("c", ""), "main.c", "gcc -O2 -o main main.c -lm", "{folder}/main"),
    "rust": Language(("rust", "rs", ""), "main.rs", "rustc -O -o main main.rs", "{folder}/main"),
    "go": Language(
        ("go", "golang", ""),
        "main.go",
        "GOCACHE=$PWD/cache HOME=$PWD go build -o main main.go",
        "{folder}/main",
    ),
    "java": Language(("java", ""), "Main.java", "javac Main.java", "java -cp {folder} Main"),
    "javascript": Language(
        ("javascript", "js", "node", ""), "main.js", "", "node {folder}/main.js"
    ),
}
SETTINGS = frozenset(
    {
        "source",
        "path",
        "language",
        "file",
        "compile",
        "run",
        "test_seconds",
        "compile_seconds",
        "memory_bytes",
        "most_timeouts",
        "compare",
        "tolerance",
        "reward",
        "network",
    }
)


@dataclass(frozen=True)
class Test:
    """Hold one test: what goes in, and what must come out, in one of three kinds."""

    stdin: str = ""
    args: tuple[Any, ...] = ()
    expected: Any = None
    assertion: Assertion | None = None
    check: str = ""
    is_wrapped: bool = False  # APPS wraps a function's value in a list of one


@dataclass(frozen=True)
class Tests:
    """Hold tests of one kind (`stdin`, `call` or `check`) and the function that they call.

    `imports` are the modules that checks import.
    """

    kind: str
    name: str
    each: tuple[Test, ...]
    imports: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class CodeTask:
    """Say what is run and how its results are judged; fields as in `evaluators.code`."""

    kind: str
    name: str
    tests: tuple[Test, ...]
    imports: tuple[str, ...]
    prompt: str
    language: Language
    path: str
    compile: str
    run: str
    seconds: float
    compile_seconds: float
    memory: int | None
    most_timeouts: int
    comparison: str
    tolerance: float
    reward: str
    network: bool


def read_task(settings: JsonMap, payload: JsonMap) -> CodeTask:
    """Return the task; raise `InvalidSettings` that names the first wrong field."""
    refuse_unknown(settings, SETTINGS, evaluator="code")
    read_choice(settings, "source", "answer_or_last_message", SOURCES)
    language = LANGUAGES[read_choice(settings, "language", "python", LANGUAGES)]
    file = _setting(settings, "file", language.file)
    if not file or "/" in file:
        raise InvalidSettings(f"setting 'file' is {file!r}; it must be a file's name")
    body = _unwrapped(payload)
    tests = _tests(body)
    is_python = language is LANGUAGES["python"]
    if tests.kind != "stdin" and not is_python:
        raise InvalidSettings("code: tests that call a function are for language 'python' only")
    return CodeTask(
        kind=tests.kind,
        name=tests.name,
        tests=tests.each,
        imports=tests.imports,
        prompt=_payload_text(body, "prompt"),
        language=Language(language.tags, file, language.compile, language.run),
        path=_path(settings.get("path")),
        compile=_setting(settings, "compile", language.compile),
        run=_setting(settings, "run", language.run),
        seconds=_number(settings, "test_seconds", 10.0, 3600),
        compile_seconds=_number(settings, "compile_seconds", 60.0, 3600),
        memory=_memory(settings, is_python),
        most_timeouts=int(_number(settings, "most_timeouts", 3, MAX_TESTS)),
        comparison=read_choice(settings, "compare", "lines", COMPARISONS),
        tolerance=_number(settings, "tolerance", 1e-6, 1.0, least=0.0),
        reward=read_choice(settings, "reward", "all_pass", REWARDS),
        network=read_network(settings),
    )


def _unwrapped(payload: JsonMap) -> dict[str, Any]:
    """Return the fields of the tests, which data sets put into one another."""
    body = dict(payload)
    for name in ("verifier_metadata", "metadata", "unit_tests", "ground_truth"):
        inner = body.pop(name, None)
        if isinstance(inner, str):
            inner = _json(inner, name)
        if isinstance(inner, Mapping):
            body |= {key: value for key, value in inner.items() if value is not None}
            if isinstance(inner.get("unit_tests"), Mapping):
                body |= dict(inner["unit_tests"])
        elif inner is not None:
            raise InvalidSettings(f"code: the payload's {name!r} is no map")
    return body


def _tests(body: JsonMap) -> Tests:
    """Return the tests in the form that is there."""
    name = _name(body)
    if "inputs" in body:
        tests = _pairs(body, name)
    elif {"tests", "public_test_cases", "private_test_cases"} & set(body):
        tests = _cases(body, name)
    elif "test_list" in body or "test" in body:
        tests = _asserted(body, name)
    else:
        raise InvalidSettings(
            "code: the payload has no tests; give 'inputs' and 'outputs', 'tests', 'test_list' or "
            "'test' with 'entry_point'"
        )
    if not 0 < len(tests.each) <= MAX_TESTS:
        raise InvalidSettings(
            f"code: there are {len(tests.each)} tests; there must be 1 to {MAX_TESTS}"
        )
    if len(json.dumps(body)) > MAX_BYTES:
        raise InvalidSettings(f"code: the tests have more than {MAX_BYTES} bytes")
    return tests


def _pairs(body: JsonMap, name: str) -> Tests:
    inputs, outputs = body["inputs"], body.get("outputs")
    if not isinstance(inputs, list) or not isinstance(outputs, list):
        raise InvalidSettings("code: 'inputs' and 'outputs' must be lists")
    if len(inputs) != len(outputs):
        raise InvalidSettings(
            f"code: there are {len(inputs)} inputs and {len(outputs)} outputs; they must be as many"
        )
    pairs = zip(inputs, outputs, strict=True)
    if name:
        return Tests("call", name, tuple(_called(given, wanted) for given, wanted in pairs))
    return Tests("stdin", "", tuple(_read_and_printed(given, wanted) for given, wanted in pairs))


def _cases(body: JsonMap, name: str) -> Tests:
    cases: list[Any] = []
    for field in ("tests", "public_test_cases", "private_test_cases"):
        listed = body.get(field) or []
        if isinstance(listed, str):
            listed = _json(listed, field)
        if not isinstance(listed, list):
            raise InvalidSettings(f"code: {field!r} must be a list of tests")
        cases += listed
    kinds = set()
    for case in cases:
        if not isinstance(case, Mapping) or not {"input", "output"} <= set(case):
            raise InvalidSettings("code: each of 'tests' must have 'input' and 'output'")
        kinds.add(case.get("testtype", "functional" if name else "stdin"))
    if not kinds <= {"stdin", "functional"} or len(kinds) > 1:
        raise InvalidSettings(
            f"code: 'testtype' is {', '.join(sorted(map(str, kinds)))}; all must be 'stdin', or "
            "all 'functional'"
        )
    if kinds == {"stdin"}:
        each = (_read_and_printed(case["input"], case["output"]) for case in cases)
        return Tests("stdin", "", tuple(each))
    if cases and not name:
        raise InvalidSettings("code: functional tests need 'fn_name', the function's name")
    return Tests("call", name, tuple(_called(case["input"], case["output"]) for case in cases))


def _read_and_printed(given: Any, wanted: Any) -> Test:
    return Test(stdin=_printed(given, "inputs"), expected=_printed(wanted, "outputs"))


def _called(given: Any, wanted: Any) -> Test:
    """Return a test of a function: arguments are a list, or text with one JSON value a line."""
    if isinstance(given, str):
        args = tuple(_json(line, "inputs") for line in given.split("\n") if line.strip())
        expected = _json(wanted, "outputs") if isinstance(wanted, str) else wanted
        return Test(args=args, expected=expected)
    if not isinstance(given, list):
        raise InvalidSettings("code: a function's input must be a list of arguments, or their JSON")
    return Test(args=tuple(given), expected=wanted, is_wrapped=isinstance(wanted, list))


def _asserted(body: JsonMap, name: str) -> Tests:
    """Return tests from assertions; those that are no plain comparisons are run as they are."""
    setup = "\n".join(
        part
        for field in ("test_imports", "test_setup_code")
        for part in _texts(body.get(field, []), field)
    )
    sources = _texts(body.get("test_list", []), "test_list")
    sources += [_payload_text(body, "test")] if "test" in body else []
    try:
        name = name or next((found for each in sources if (found := called_name(each))), "")
        modules = imported_names("\n".join([setup, *sources]))
        plain = [read_assertions(each, name) for each in sources]
    except SyntaxError as error:
        raise InvalidSettings(f"code: the tests are no Python: {error}") from error
    if not name:
        raise InvalidSettings("code: the tests call no function; name it in 'entry_point'")
    if all(plain) and not setup:
        each = (Test(args=one.args, assertion=one) for group in plain for one in group or ())
        return Tests("call", name, tuple(each))
    checks = (Test(check=f"{setup}\n{each}\n{_start_of(each)}") for each in sources)
    return Tests("check", name, tuple(checks), tuple(sorted(modules)))


def _start_of(source: str) -> str:
    """Return what starts a `check` that is only defined."""
    return "check(candidate)\n" if "def check(" in source and "\ncheck(" not in source else ""


def _name(body: JsonMap) -> str:
    name = body.get("fn_name") or body.get("func_name") or body.get("entry_point") or ""
    if name and (not isinstance(name, str) or not name.isidentifier() or keyword.iskeyword(name)):
        raise InvalidSettings(f"code: {name!r} is no name of a function")
    return str(name)


def _json(text: str, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InvalidSettings(
            f"code: {name!r} is no JSON; tests that are packed with pickle, as LiveCodeBench's "
            "private ones, are not read, because unpickling runs code: convert them to JSON first"
        ) from error


def _printed(value: Any, name: str) -> str:
    """Return what a program reads or prints; a list is its lines."""
    lines = value if isinstance(value, list) else [value]
    if not all(isinstance(line, str) for line in lines):
        raise InvalidSettings(f"code: {name!r} of a stdin test must be text, or a list of lines")
    return "\n".join(lines)


def _texts(value: Any, name: str) -> list[str]:
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(each, str) for each in texts):
        raise InvalidSettings(f"code: {name!r} must be text or a list of texts")
    return [each for each in texts if each.strip()]


def _payload_text(body: JsonMap, name: str) -> str:
    value = body.get(name, "")
    if not isinstance(value, str):
        raise InvalidSettings(f"code: {name!r} must be text")
    return value


def _setting(settings: JsonMap, name: str, default: str) -> str:
    value = settings.get(name, default)
    if not isinstance(value, str) or "\0" in value:
        raise InvalidSettings(f"setting {name!r} is {value!r:.200}; it must be text")
    return value


def _path(value: object) -> str:
    if value is None:
        return ""
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value:
        raise InvalidSettings(f"setting 'path' is {value!r:.200}; it must be an absolute path")
    return posixpath.normpath(value)


def _memory(settings: JsonMap, is_python: bool) -> int | None:
    """Return the address space that a test may have; runtimes that reserve much have no limit."""
    if settings.get("memory_bytes") is None:
        return 1024**3 if is_python else None
    return int(_number(settings, "memory_bytes", 0, 2**45))


def _number(
    settings: JsonMap, name: str, default: float, most: float, *, least: float | None = None
) -> float:
    value = finite(settings.get(name, default), f"setting {name!r}")
    if value > most or (value <= 0 if least is None else value < least):
        raise InvalidSettings(
            f"setting {name!r} is {value:g}; it must be above 0, at most {most:g}"
        )
    return value
