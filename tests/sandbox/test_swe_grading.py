"""Diffs out of real repositories in real sandboxes, and the tests that judge them.

The repository has a bug; what each agent does to it is a shell script.
"""

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from evaluators.base import RewardMissing
from evaluators.swe import SweEvaluator
from evaluators.unfit import TaskUnfit
from sandboxes.runtime.apptainer import ApptainerRuntime
from tests.sandbox.conftest import starter
from tests.sandbox.grading import Grader

pytestmark = pytest.mark.sandbox

SWE = SweEvaluator()
SITE = "/usr/lib/python3/dist-packages"
LEXERS = ("__init__.py", "_mapping.py", "diff.py", "python.py")
# The setup leaves changes of its own behind, as the images of data sets do.
PREPARE = r"""
cd /testbed && git init -q . && git config user.email a@b.c && git config user.name n
mkdir calc tests && touch tests/__init__.py
printf 'def add(a, b):\n    return a - b\n' > calc/__init__.py
cat > tests/test_calc.py <<'EOF'
import unittest

from calc import add


class TestAdd(unittest.TestCase):
    def test_zero(self):
        self.assertEqual(add(0, 0), 0)
EOF
printf 'one\r\ntwo\r\n' > crlf.txt; printf old > 'a name ü.txt'; printf x > gone.txt
ln -s calc/__init__.py link; printf 'build/\n' > .gitignore
git add -A && git commit -qm base && git rev-parse HEAD
printf 'from the setup\n' >> crlf.txt; mkdir build; echo 1 > build/out; echo egg > made.txt
"""
TEST_PATCH = """diff --git a/tests/test_calc.py b/tests/test_calc.py
--- a/tests/test_calc.py
+++ b/tests/test_calc.py
@@ -6,3 +6,6 @@
 class TestAdd(unittest.TestCase):
     def test_zero(self):
         self.assertEqual(add(0, 0), 0)
+
+    def test_two(self):
+        self.assertEqual(add(1, 1), 2)
"""
FIX = "cd /testbed && sed -i 's/a - b/a + b/' calc/__init__.py\n"
FAKE = "test_two (tests.test_calc.TestAdd.test_two) ... ok"


def installed(*packages: str) -> dict[str, tuple[bytes, int]]:
    """Return the modules of packages as files of the sandbox's own Python."""
    files = {}
    for package in packages:
        for path in importlib.metadata.files(package) or ():
            is_needed = "lexers/" not in str(path) or path.name in LEXERS
            is_text = path.suffix == ".py" or path.name == "METADATA"
            if is_text and ".." not in path.parts and is_needed:
                files[f"{SITE}/{path}"] = (Path(str(path.locate())).read_bytes(), 0o644)
    return files


@pytest.fixture(scope="module")
def grader(apptainer_runtime: ApptainerRuntime, base_image: Path) -> Iterator[Grader]:
    """Yield a grader over the repository; `commit` is its base commit."""
    made: list[str] = []
    grader = Grader(
        apptainer_runtime, starter(apptainer_runtime, str(base_image), made), "/testbed"
    )
    tools = installed("pytest", "pluggy", "iniconfig", "packaging", "pygments")
    grader.prepared, said = grader.layer(PREPARE, tools)
    grader.commit = said.split()[0]
    yield grader
    for name in made:
        apptainer_runtime.stop(name)


def payload(grader: Grader, **values: Any) -> dict[str, Any]:
    """Return the task's payload by unittest."""
    return {
        "base_commit": grader.commit,
        "test_patch": TEST_PATCH,
        "FAIL_TO_PASS": '["test_two (tests.test_calc.TestAdd.test_two)"]',
        "PASS_TO_PASS": ["test_zero (tests.test_calc.TestAdd.test_zero)"],
        "test_cmd": "python3 -m unittest -v",
        "log_parser": "unittest",
        **values,
    }


def by_pytest(grader: Grader, **values: Any) -> dict[str, Any]:
    """Return the task's payload by pytest."""
    test = "tests/test_calc.py::TestAdd::test_"
    return payload(
        grader,
        FAIL_TO_PASS=[f"{test}two"],
        PASS_TO_PASS=[f"{test}zero"],
        test_cmd="python3 -m pytest -rA tests/test_calc.py",
        log_parser="parse_log_pytest",
        **values,
    )


def test_a_fix_resolves_and_nothing_does_not(grader: Grader) -> None:
    fixed = grader.grade(SWE, payload(grader), FIX)
    assert (fixed.reward, fixed.rewards["patch_applied"]) == (1.0, 1.0)
    idle = grader.grade(SWE, payload(grader))
    assert idle.rewards == {
        "reward": 0.0,
        "resolved": 0.0,
        "fail_to_pass": 0.0,
        "pass_to_pass": 1.0,
        "patch_applied": 1.0,
    }


def test_every_kind_of_change_is_carried_over(grader: Grader) -> None:
    agent = FIX + (
        "git commit -qam fix; git checkout -q -b other; rm gone.txt; chmod +x calc/__init__.py\n"
        "printf '\\000\\001\\377' > blob.bin; git add blob.bin; printf new > 'a name ü.txt'\n"
        "printf 'a\\nb' > \"$(printf 'tab\\there')\"; ln -sfn tests link\n"
        "printf 'one\\r\\nTWO\\r\\n' > crlf.txt; echo mine > made.txt; mkdir -p deep/er; "
        "echo d > deep/er/file; mkdir nested; cd nested; git init -q; echo inner > file\n"
        "echo ignored > /testbed/build/out"
    )
    look = (
        "git diff --stat HEAD > /dev/null; test ! -e gone.txt && test -x calc/__init__.py && "
        "od -An -tx1 blob.bin && cat 'a name ü.txt' && cat tab*here && readlink link && "
        "od -An -c crlf.txt && cat made.txt deep/er/file nested/file build/out; "
        "python3 -m unittest -v"
    )
    score = grader.grade(SWE, payload(grader, test_cmd=look), agent)
    shown = score.log.split("begin\n", 1)[1].split("test_two", 1)[0].split()
    assert " ".join(shown) == ("00 01 ff newa btests o n e \\r \\n T W O \\r \\n mine d inner 1")
    assert score.reward == 1.0


@pytest.mark.parametrize(
    ("agent", "reward"),
    [
        (FIX + "printf broken > tests/test_calc.py", 1.0),
        (FIX + "git rm -rqf tests; git commit -qm tidy", 1.0),
        ("cd /testbed && echo 'class TestAdd: pass' > tests/test_calc.py", 0.0),
        (
            "cd /testbed && printf 'import calc\\ncalc.add = lambda a, b: a + b\\n' "
            "> tests/__init__.py",
            0.0,
        ),
    ],
    ids=["edited", "deleted", "emptied", "steered"],
)
def test_the_tests_own_files_are_restored(grader: Grader, agent: str, reward: float) -> None:
    assert grader.grade(SWE, payload(grader), agent).reward == reward


@pytest.mark.parametrize(
    ("agent", "reason"),
    [
        ("rm -rf /testbed/.git", "no_repository"),
        (FIX + "rm -rf .git && git init -q . && git add -A", "no_base"),
        (FIX + "head -c 400000 /dev/urandom > big.bin", "too_large: more than 200000 bytes"),
        (FIX + "rm -rf tests && echo file > tests", "does_not_apply"),
    ],
)
def test_a_diff_that_cannot_be_used_is_worth_nothing(
    grader: Grader, agent: str, reason: str
) -> None:
    score = grader.grade(SWE, payload(grader), agent, settings={"patch_bytes": 200_000})
    assert (score.reward, score.details["patch_failed"]) == (0.0, reason)


def test_the_agent_s_configuration_and_programs_change_nothing(grader: Grader) -> None:
    agent = FIX + (
        "git config core.fsmonitor 'touch /testbed/ran'; git config diff.external /bin/false\n"
        "git config core.hooksPath /testbed/hooks; git config diff.noprefix true\n"
        "git config diff.x.textconv /bin/false; git config alias.diff-index '!false'\n"
        "git config core.untrackedCache true; git config diff.renames copies\n"
        "git config color.ui always; git config core.quotePath false\n"
        "git config apply.whitespace fix\n"
        "mkdir hooks; printf '#!/bin/sh\\ntouch /testbed/ran\\n' | tee hooks/post-index-change\n"
        "chmod +x hooks/*; echo '*.py diff=x' > .gitattributes; touch .git/index.lock\n"
        "printf '#!/bin/sh\\necho fake\\n' > /usr/bin/git; chmod +x /usr/bin/git\n"
        "printf '#!/bin/sh\\n' > /usr/bin/python3"
    )
    score = grader.grade(
        SWE, payload(grader, test_cmd="test ! -e ran; python3 -m unittest -v"), agent
    )
    assert score.reward == 1.0


def test_printed_verdicts_pay_nothing(grader: Grader) -> None:
    """The code under test knows the names of the hidden tests here, which no agent does."""
    lines = [FAKE, ">>>>> Start Test Output", FAKE, ">>>>> End Test Output", "OK"]
    agent = "cd /testbed && cat >> calc/__init__.py <<'EOF'\nimport atexit, sys\n"
    for line in lines:
        agent += f"print({line!r}, file=sys.stderr)\natexit.register(print, {line!r})\n"
    assert grader.grade(SWE, payload(grader), agent + "EOF").reward == 0.0

    lines = ["PASSED tests/test_calc.py::TestAdd::test_two"]
    agent = agent.replace(FAKE, lines[0])
    assert grader.grade(SWE, by_pytest(grader), agent + "EOF").reward == 0.0


def test_pytest_s_own_report_decides(grader: Grader) -> None:
    score = grader.grade(SWE, by_pytest(grader), FIX)
    assert (score.reward, score.details["results_from"]) == (1.0, "report")
    # No report is left where the code under test ends the process: the untouched one decides.
    agent = "cd /testbed && cat > calc/__init__.py <<'EOF'\nimport os\n"
    agent += "os.write(1, b'\\nPASSED tests/test_calc.py::TestAdd::test_two\\n'); os._exit(0)\nEOF"
    with pytest.raises(RewardMissing, match="no report"):
        grader.grade(SWE, by_pytest(grader), agent)


def test_an_eval_script_in_the_form_of_swebench(grader: Grader) -> None:
    script = (
        "#!/bin/bash\nset -uxo pipefail\ncd /testbed\n"
        "git config --global --add safe.directory /testbed\ngit status\n"
        f"git checkout {grader.commit} tests/test_calc.py\n"
        f"git apply -v - <<'EOF_114329324912'\n{TEST_PATCH}EOF_114329324912\n"
        ": '>>>>> Start Test Output'\npython3 -m pytest -rA tests/test_calc.py\n"
        "SWEBENCH_TEST_EXIT_CODE=$?\n: '>>>>> End Test Output'\n"
        'echo ">>>>> Test Exit Code: $SWEBENCH_TEST_EXIT_CODE"\n'
        f"git checkout {grader.commit} tests/test_calc.py\n"
    )
    task = by_pytest(grader, eval_script=script)
    fixed = grader.grade(SWE, task, FIX)
    assert (fixed.reward, fixed.details["results_from"]) == (1.0, "report")
    idle = grader.grade(SWE, task, settings={"report": "never"})
    assert (idle.rewards["fail_to_pass"], idle.rewards["pass_to_pass"]) == (0.0, 1.0)
    assert idle.details["exit_code"] == 1


def test_files_that_steer_runners_are_not_taken(grader: Grader) -> None:
    hook = (
        "import pytest\n@pytest.hookimpl(hookwrapper=True)\ndef pytest_runtest_makereport():\n"
        "    outcome = yield\n    outcome.get_result().outcome = 'passed'\n"
    )
    agent = (
        f"cd /testbed && cat > conftest.py <<'EOF'\n{hook}EOF\ncp conftest.py tests/conftest.py\n"
        "printf '[pytest]\\naddopts = --collect-only\\n' > pytest.ini\n"
        "mkdir _pytest; echo 'raise SystemExit(0)' | tee pytest.py _pytest/__init__.py "
        "sitecustomize.py > unittest.py"
    )
    score = grader.grade(SWE, by_pytest(grader), agent)
    assert (score.reward, score.rewards["pass_to_pass"]) == (0.0, 1.0)
    # Who trusts the agent with them can say so.
    trusting = grader.grade(
        SWE, by_pytest(grader), agent[: agent.index("printf")], settings={"protect": []}
    )
    assert trusting.reward == 1.0


def test_what_the_image_lacks_is_no_fault_of_the_agent_s(grader: Grader) -> None:
    with pytest.raises(TaskUnfit, match="no folder /nowhere"):
        grader.grade(SWE, payload(grader, workdir="/nowhere"))
    with pytest.raises(TaskUnfit, match="no git repository"):
        grader.grade(SWE, payload(grader, workdir="/usr", base_commit=""))
    with pytest.raises(TaskUnfit, match="no commit deadbeef"):
        grader.grade(SWE, payload(grader, base_commit="deadbeef"))


def test_without_a_commit_the_prepared_head_is_the_base(grader: Grader) -> None:
    score = grader.grade(SWE, payload(grader, base_commit=""), FIX + "git commit -qam fix")
    assert score.reward == 1.0
    assert [each.name for each in grader.ran] == ["base", "patch", "tests"]


def test_a_parser_script_is_run_where_no_program_of_the_agent_s_was(grader: Grader) -> None:
    run = 'python3 -m unittest -v "$1" 2> err; cat err; rm err; printf x > /usr/bin/python3; true'
    parser = (
        "import json, sys\n"
        "lines = open(sys.argv[1]).read().split('\\n')\n"
        "tests = [line.split(' ... ') for line in lines if ' ... ' in line]\n"
        "named = {'ok': 'PASSED', 'FAIL': 'FAILED'}\n"
        "found = [{'name': a.split()[0], 'status': named[b]} for a, b in tests]\n"
        "json.dump({'tests': found}, open(sys.argv[3], 'w'))\n"
    )
    task = payload(
        grader,
        run_script=run,
        parser_script=parser,
        selected_test_files_to_run=["tests.test_calc"],
        FAIL_TO_PASS="['test_two']",
        PASS_TO_PASS="['test_zero']",
        before_tests="echo before > made.txt",
        test_files={"tests/test_extra.py": "x = 1\n"},
    )
    assert grader.grade(SWE, task, FIX).reward == 1.0
    assert grader.grade(SWE, task).rewards["pass_to_pass"] == 1.0
