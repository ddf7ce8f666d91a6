"""Environments as TOML: written, read back the same, refused with where, and compared."""

import base64
import json
import tomllib
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as some

from rollouts.exceptions import InvalidValue, StateConflict
from rollouts.services.environment_files import (
    MAX_LINES,
    diff_environments,
    export_environment,
    import_environment,
)
from sandboxes.models import Environment, Image
from sandboxes.services.catalogue import ENVIRONMENT_VALUES, save_environment
from sandboxes.setup_files import MAX_FILES, file_errors, secret_errors
from tests import factories

pytestmark = pytest.mark.django_db

FILES = {
    "bin/tool": {"base64": base64.b64encode(b"#!/bin/sh\necho hi\n").decode(), "mode": 0o755},
    "data/blob": {"base64": base64.b64encode(bytes(range(256))).decode(), "mode": 0o600},
}
SECRETS = {
    "TOKEN": {"from": "env:TOKEN", "to": ["setup", "tools"]},
    "KEY": {"from": "file:/run/secrets/key", "to": ["evaluator"]},
}
MINIMAL = 'name = "sums"\nagent = "single_turn"\nevaluator = "exact"\n'


def whole() -> Environment:
    return save_environment(
        name="whole",
        description='Says "hello".\nTwice.\n',
        image=factories.make_image(
            name="built",
            source="definition:",
            definition="Bootstrap: localimage\nFrom: base\n\n%post\n  true\n",
            files={"a.txt": "x\ny\n"},
            parameters={"n": 1, "none": None},
            reuse="lock",
            lock="1",
        ),
        setup="#!/bin/bash\nset -e\nprintf '%s\\n' \"$TOKEN\" | sha256sum\n",
        files=FILES,
        workdir="/srv/work",
        agent="tools",
        agent_settings={"max_calls": 3, "instruction_template": "{{ instruction }}\nGo.\n"},
        system_prompt="  leading\n\ttab 'single' '''three''' \"\"\"\nend\\\n",
        prompt_format="jinja",
        tools=["bash", "submit"],
        tool_settings={"bash": {"timeout_seconds": 5.5}},
        network="allow_list",
        egress_hosts=["pypi.org"],
        gpu="nvidia",
        warm=3,
        limits={"memory_bytes": 2**40, "cpus": 0.5},
        evaluator="regex",
        evaluator_settings={"pattern": "(\\d+)\r\n"},
        secrets=SECRETS,
    )


def values_of(environment: Environment) -> dict[str, Any]:
    return {name: getattr(environment, name) for name in ENVIRONMENT_VALUES}


def test_a_version_comes_back_as_it_was() -> None:
    environment = whole()

    text = export_environment(environment=environment)
    again = import_environment(text=text)

    assert again == environment
    assert Environment.objects.count() == 1
    assert export_environment(environment=again) == text


def test_it_comes_back_where_nothing_is() -> None:
    environment = whole()
    before, text = values_of(environment), export_environment(environment=environment)
    image = Image.objects.values().get()
    Environment.objects.all().delete()
    Image.objects.all().delete()

    again = import_environment(text=text)

    assert {**values_of(again), "image": None} == {**before, "image": None}
    made = Image.objects.values().get()
    for name in ("name", "source", "definition", "files", "parameters", "reuse", "lock"):
        assert made[name] == image[name]


def test_the_file_is_for_people() -> None:
    text = export_environment(environment=whole())

    assert "setup = '''\n#!/bin/bash\nset -e\n" in text
    assert "[files.\"bin/tool\"]\ntext = '''\n#!/bin/sh\necho hi\n'''\nmode = 0o755\n" in text
    assert "mode = 0o600" in text
    assert "parameters_json = " in text  # TOML has no null
    assert "instruction_template = '''\n{{ instruction }}\nGo.\n'''\n" in text
    assert '[secrets.TOKEN]\nfrom = "env:TOKEN"\nto = ["setup", "tools"]\n' in text
    assert tomllib.loads(text)["image"]["name"] == "built"


texts = some.text(some.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=30)
json_values = some.recursive(
    some.none()
    | some.booleans()
    | some.integers(-(2**70), 2**70)
    | texts
    | some.floats(allow_nan=False, allow_infinity=False),
    lambda inner: some.lists(inner, max_size=4) | some.dictionaries(texts, inner, max_size=4),
    max_leaves=12,
)


@settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    setup=texts,
    prompt=texts,
    values=some.dictionaries(texts, json_values, max_size=4),
    data=some.binary(max_size=40),
    mode=some.integers(0, 0o777),
)
def test_whatever_the_catalogue_can_hold_comes_back(
    db: None, setup: str, prompt: str, values: dict[str, Any], data: bytes, mode: int
) -> None:
    environment = Environment(
        name="any",
        version=1,
        setup=setup,
        system_prompt=prompt,
        tool_settings=values,
        files={"f": {"base64": base64.b64encode(data).decode(), "mode": mode}},
    )

    table = tomllib.loads(export_environment(environment=environment))

    found = table.get("tool_settings", {})
    if "tool_settings_json" in table:
        found = json.loads(table["tool_settings_json"])
    assert table.get("setup", "") == setup
    assert table.get("system_prompt", "") == prompt
    assert json.dumps(found, sort_keys=True) == json.dumps(values, sort_keys=True)
    file = table["files"]["f"]
    encoded = file.get("base64") or base64.b64encode(file["text"].encode()).decode()
    assert (base64.b64decode(encoded), file["mode"]) == (data, mode)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("name = ", "It is no TOML"),
        ("x" * 10, "It is no TOML"),
        ("a = " + "[" * 20_000, "It is no TOML"),
        ("", "name is missing"),
        ("name = 3", "name is missing"),
        (MINIMAL + "colour = 1", "colour is no key of an environment"),
        (MINIMAL + "version = 3", "version is no key"),
        (MINIMAL + '[files."a"]\ntext = "x"\nowner = 1', 'files."a".owner is no key'),
        (MINIMAL + '[files."a"]\nmode = 1', 'files."a" needs either text or base64'),
        (MINIMAL + '[files."a"]\ntext = ""\nbase64 = ""', 'files."a" needs either'),
        (MINIMAL + 'files = "x"', "files must be tables"),
        (MINIMAL + '[files."../a"]\ntext = "x"', "'../a' is no plain relative path"),
        (MINIMAL + '[files."/a"]\ntext = "x"', "'/a' is no plain relative path"),
        (MINIMAL + '[files."a"]\nbase64 = "?"', "'a' is not base64"),
        (MINIMAL + '[files."a"]\ntext = "x"\nmode = 4095', "'a' has a mode"),
        (MINIMAL + "image = 3", "image must be a name"),
        (MINIMAL + 'image = "nowhere"', "There is no image 'nowhere'"),
        (MINIMAL + '[image]\nname = "i"\nlayers = 1', "image.layers is no key"),
        (MINIMAL + '[image]\nname = "i"\nlock = "1"', "image.source is missing"),
        (MINIMAL + '[image]\nname = "i"\nsource = "ftp://x"', "source"),
        (MINIMAL + "tools_json = '['", "tools_json is no JSON text"),
        (MINIMAL + "tools_json = '[]'\ntools = []", "Give either tools or tools_json"),
        (MINIMAL + "warm = true", "warm must be a whole number"),
        (MINIMAL + "warm = 300", "warm"),
        (MINIMAL + "setup = 3", "setup must be a text"),
        (MINIMAL + "description = 1979-05-27", "description must be a text"),
        (MINIMAL.replace("sums", "Sums"), "name"),
        (MINIMAL.replace("single_turn", "oracle"), "agent: no agent handler 'oracle'"),
        (MINIMAL.replace("single_turn", "noop"), "agent: no agent handler 'noop'"),
        (MINIMAL.replace("exact", "nobody"), "evaluator: no evaluator 'nobody'"),
        (MINIMAL + 'tools = ["hammer"]', "tools: no tool 'hammer'"),
        (MINIMAL + "[limits]\ncpu = 1", "limits"),
        (MINIMAL + "[limits]\ncpus = 2021-01-01", "limits"),
        (MINIMAL + "[evaluator_settings]\nx = nan", "evaluator_settings"),
        (MINIMAL + '[secrets.T]\nfrom = "hunter2"\nto = ["tools"]', "never the value"),
        (MINIMAL + '[secrets.T]\nfrom = "env:KEY"\nto = ["tools"]', "the service's own"),
        (MINIMAL + '[evaluator_settings]\nsource = {secret = "T"}', "the secret 'T'"),
    ],
)
def test_a_wrong_file_is_refused_with_where(text: str, said: str) -> None:
    with pytest.raises(InvalidValue) as refused:
        import_environment(text=text)

    assert said in str(refused.value)
    assert "hunter2" not in str(refused.value)
    assert refused.value.code == "environment.invalid_file"
    assert Environment.objects.count() == Image.objects.count() == 0


def test_an_image_that_is_made_from_other_things_is_not_changed() -> None:
    image = factories.make_image(name="base", source="base")
    text = MINIMAL + '[image]\nname = "base"\nsource = "{}"\n'

    with pytest.raises(StateConflict, match="its source is another") as refused:
        import_environment(text=text.format("other"))
    assert refused.value.code == "image.differs"
    assert Environment.objects.count() == 0

    assert import_environment(text=text.format("base")).image == image
    assert import_environment(text=MINIMAL + 'image = "base"').image == image


@pytest.mark.parametrize(
    "change",
    [
        {"files": {"a": {"base64": "eA==", "mode": 0o644}}},
        {"secrets": {"T": {"from": "env:T", "to": ["tools"]}}},
    ],
)
def test_another_file_or_secret_is_another_version_and_rollouts_keep_theirs(
    change: dict[str, Any],
) -> None:
    first = save_environment(name="e", image=None)
    group = factories.make_group(task=factories.make_task(environment=first))
    rollout = factories.make_rollout(group=group)

    second = save_environment(name="e", image=None, **change)

    assert (second.version, save_environment(name="e", image=None, **change)) == (2, second)
    rollout.refresh_from_db()
    assert (rollout.environment, rollout.environment.files, rollout.environment.secrets) == (
        first,
        {},
        {},
    )


def test_what_was_found_out_about_a_version_makes_none() -> None:
    environment = save_environment(name="e", image=None)
    Environment.objects.update(verification="verified")

    assert save_environment(name="e", image=None).pk == environment.pk


def test_versions_are_compared_value_by_value() -> None:
    before = save_environment(name="e", image=None, setup="one\ntwo\nthree\n", warm=1)
    after = save_environment(
        name="e",
        image=factories.make_image(name="base", source="base"),
        setup="one\n2\nthree\n",
        warm=1,
        files={"bin/tool": FILES["bin/tool"]},
    )

    found = {each.name: each.lines for each in diff_environments(before=before, after=after)}

    assert found == {
        "image": [("place", "@@ -0,0 +1 @@"), ("added", "base from base")],
        "setup": [
            ("place", "@@ -1,3 +1,3 @@"),
            ("same", "one"),
            ("removed", "two"),
            ("added", "2"),
            ("same", "three"),
        ],
        "files": [
            ("place", "@@ -0,0 +1,3 @@"),
            ("added", "--- bin/tool (18 bytes, mode 755)"),
            ("added", "#!/bin/sh"),
            ("added", "echo hi"),
        ],
    }
    assert diff_environments(before=after, after=after) == []


def test_what_would_take_long_to_compare_is_said_to_differ() -> None:
    many = "\n".join(map(str, range(MAX_LINES + 1)))
    before, after = (
        Environment(name="e", version=version, setup=setup)
        for version, setup in ((1, many), (2, "-" * 5000))
    )

    (found,) = diff_environments(before=before, after=after)

    assert found.lines == [("place", f"{MAX_LINES + 1} and 1 lines: too many to compare")]
    nothing = Environment(name="e", version=1)
    (other,) = diff_environments(before=nothing, after=after)
    (line,) = [text for kind, text in other.lines if kind == "added"]
    assert line == "-" * 2000 + " [3000 more characters]"


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"": {"base64": "", "mode": 0}},
        {"a/": {"base64": "", "mode": 0}},
        {"a//b": {"base64": "", "mode": 0}},
        {"./a": {"base64": "", "mode": 0}},
        {"a\nb": {"base64": "", "mode": 0}},
        {"a": {"base64": "", "mode": True}},
        {"a": {"base64": "", "mode": 0o4755}},
        {"a": {"base64": 3, "mode": 0}},
        {"a": {"mode": 0}},
        {"a": {"base64": "", "mode": 0, "x": 1}},
        {"a": {"base64": "", "mode": 0}, "a/b": {"base64": "", "mode": 0}},
        {"a": {"base64": "AAAA" * (3 * 1024**2), "mode": 0}},
        {str(each): {"base64": "", "mode": 0} for each in range(MAX_FILES + 1)},
    ],
    ids=lambda value: str(value)[:30],
)
def test_files_that_no_sandbox_could_be_given(wrong: Any) -> None:
    (said,) = file_errors(wrong)

    assert said.endswith(".")


@pytest.mark.parametrize(
    "wrong",
    [
        [],
        {"A-B": {"from": "env:A", "to": ["tools"]}},
        {"": {"from": "env:A", "to": ["tools"]}},
        {"A": "env:A"},
        {"A": {"from": "env:A"}},
        {"A": {"from": "s3cret", "to": ["tools"]}},
        {"A": {"from": "env:", "to": ["tools"]}},
        {"A": {"from": "env:KEY", "to": ["tools"]}},
        {"A": {"from": ["env:A"], "to": ["tools"]}},
        {"A": {"from": "env:A", "to": []}},
        {"A": {"from": "env:A", "to": "tools"}},
        {"A": {"from": "env:A", "to": ["tools", "tools"]}},
        {"A": {"from": "env:A", "to": ["everything"]}},
        {"A": {"from": "env:A", "to": [{}]}},
        {f"A{each}": {"from": "env:A", "to": ["tools"]} for each in range(51)},
    ],
    ids=lambda value: str(value)[:40],
)
def test_secrets_that_no_worker_could_read(wrong: Any) -> None:
    (said,) = secret_errors(wrong)

    assert "s3cret" not in said
