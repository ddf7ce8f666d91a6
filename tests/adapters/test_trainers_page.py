"""Every block of docs/trainers.md names what is there, and calls it as it can be called.

The trainers themselves are not installed here: what a block takes from them is left alone.
"""

import ast
import inspect
import re
import tomllib
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollouts.api.reference.surface import parse_surface

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "trainers.md").read_text()
BLOCKS = [
    pytest.param(language, text, id=f"line-{PAGE[: match.start()].count(chr(10)) + 1}")
    for match in re.finditer(r"^```(\w*)\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    for language, text in [match.groups()]
]
# Their module needs the trainer's package: their names are read from the source.
UNIMPORTABLE = {"prorl_client.adapters.verl_loop": "verl"}
NAMES = re.compile(r"prorl_client(?:\.\w+)+")


def source_of(module: str) -> Path:
    return ROOT / "clients" / "python" / f"{module.replace('.', '/')}.py"


def found(name: str) -> Any:
    """Return what a dotted name stands for; the name alone where its module needs a trainer."""
    module, _, member = name.rpartition(".")
    if module in UNIMPORTABLE:
        defined = {
            getattr(node, "name", "") for node in ast.parse(source_of(module).read_text()).body
        }
        assert member in defined, f"{module} has no {member}"
        return None
    return getattr(import_module(module), member)


@pytest.mark.parametrize(("language", "text"), BLOCKS)
def test_a_block_of_the_page_names_and_calls_what_is_there(language: str, text: str) -> None:
    if language == "python":
        check_python(text)
    elif language == "toml":
        assert parse_surface(tomllib.loads(text)).account == "verl"
    elif language == "yaml":
        assert isinstance(yaml.safe_load(text), dict | list)
    for name in NAMES.findall(text) if language != "python" else ():
        found(name)
    for path in re.findall(r"prorl_client(?:/\w+)+\.py", text):
        assert (ROOT / "clients" / "python" / path).is_file(), path


def check_python(text: str) -> None:
    """Check that imports from the client work, and that its calls fit their signatures."""
    tree = ast.parse(text)
    known: dict[str, Any] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and str(node.module).startswith("prorl_client"):
            for alias in node.names:
                known[alias.asname or alias.name] = found(f"{node.module}.{alias.name}")
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            called = known.get(node.func.id)
            if called is not None:
                named = {str(keyword.arg): None for keyword in node.keywords}
                inspect.signature(called).bind(*node.args, **named)


def test_the_page_has_blocks_of_every_adapter() -> None:
    adapters = {path.stem for path in source_of("prorl_client.adapters.x").parent.glob("[a-z]*.py")}
    shared = {"rows", "sampling", "turns", "verl"}  # what the others are made of
    named = set(re.findall(r"prorl_client[./]adapters[./](\w+)", PAGE))
    assert adapters - shared - named == {"nemo_gym"}  # `nemo_gym_agent` is its entry point
    assert named <= adapters
