"""Servers drained, removed, cleared, registered again and added while rollouts generate."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from rollouts.inference.rendering import load_renderer
from tests.e2e.harness import WHOLE, Line, ModelServer, marker, wait_until, write_task

ImportFolder = Callable[..., None]
TURNS = ["echo one > /tmp/a", "cat /tmp/a", "submit done"]


@dataclass
class Site:
    """A policy of its own and scripted servers for it."""

    line: Line
    tokenizer: Path
    servers: list[ModelServer]
    policy: str = ""

    def begin(self, name: str, *, servers: int) -> None:
        """Make a policy with the first so many servers, all holding what they are asked."""
        body = {
            "name": name,
            "model": "scripted-not-a-model",
            "tokenizer": str(self.tokenizer),
            "context_tokens": 32768,
        }
        self.policy = self.line.trainer.call("POST", "/policies/", body)["id"]
        for server in self.servers:
            server.play({"marker": marker(name), "turns": TURNS})
        for server in self.servers[:servers]:
            self.register(server)
            server.control("hold")

    def register(self, server: ModelServer) -> None:
        """Register a server."""
        body = {"policy": self.policy, "url": server.url, "kind": "vllm", "max_in_flight": 8}
        self.line.trainer.call("POST", "/inference-servers/", body)

    def id_of(self, server: ModelServer) -> str:
        """Return the id of a registered server."""
        (found,) = self.line.sql(
            "SELECT id FROM rollouts_inferenceserver WHERE policy_id = %s AND url = %s "
            "AND state <> 'removed'",
            self.policy,
            server.url,
        )
        return str(found[0])

    def submit(
        self, name: str, ref: str, samples: int, *, attempts: int = 3, **budgets: float
    ) -> list[str]:
        """Submit rollouts that may wait for a server for long; return their ids."""
        experiment = self.line.experiment(
            name,
            policy=self.policy,
            max_attempts=attempts,
            budgets={"max_turns": 8, "tool_seconds": 60, "inference_wait_seconds": 120, **budgets},
        )
        return self.line.submit(experiment, [ref], samples=samples)

    def held(self) -> list[int]:
        """Return how many requests each server holds."""
        return [server.state()["in_flight"] for server in self.servers]

    def asked(self) -> list[int]:
        """Return how many requests each server ever got."""
        return [server.state()["requests"] for server in self.servers]

    def wait_held(self, total: int) -> list[int]:
        """Return what each holds once that are so many together."""
        try:
            wait_until(lambda: sum(self.held()) == total, f"{total} requests under way", 180)
        except AssertionError as error:
            stages = self.line.sql(
                "SELECT stage, state, failure_code, failure_detail FROM rollouts_attempt "
                "WHERE ended_at IS NULL OR failure_code <> '' ORDER BY created_at DESC LIMIT 20"
            )
            raise AssertionError(f"{error}: {self.held()}, {self.asked()}, {stages}") from None
        return self.held()

    def check_done(self, rollouts: list[str]) -> None:
        """Check that all are scored without a fault, with every token of every turn."""
        done = self.line.wait_done(rollouts, seconds=180)
        assert [(r["outcome"], r["reward"], r["turns"]) for r in done] == [
            ("scored", 1.0, len(TURNS))
        ] * len(rollouts)
        renderer = load_renderer(self.tokenizer)
        for rollout in done:
            assert "failed" not in [a["state"] for a in self.line.attempts(rollout["id"])]
            (segment,) = self.line.trajectory(rollout["id"])["segments"]
            turns = [segment["response_ids"][t["start"] : t["end"]] for t in segment["turns"]]
            assert [renderer.decode(ids) for ids in turns] == TURNS
            assert rollout["sampled_tokens"] == sum(segment["response_mask"])
            assert rollout["sampled_tokens"] == sum(map(len, turns))


@pytest.fixture(scope="module")
def servers(whole_line: Line, tokenizer_folder: Path) -> Iterator[list[ModelServer]]:
    """Start three scripted servers for the tests of this module."""
    assert whole_line
    started = [ModelServer(tokenizer_folder) for _ in range(3)]
    try:
        for server in started:
            server.start()
        yield started
    finally:
        for server in started:
            server.kill()


@pytest.fixture
def site(line: Line, servers: list[ModelServer], tokenizer_folder: Path) -> Iterator[Site]:
    """Yield the servers for one test, holding nothing in the end."""
    for server in servers:
        if server.process is None:
            server.start()
    yield Site(line, tokenizer_folder, servers)
    for server in servers:
        if server.process is not None:
            server.control()


def task(name: str, folder: Path, import_folder: ImportFolder) -> str:
    """Make and import a task of this name; return its reference."""
    test = "grep -q one /tmp/a && echo 1 > /logs/verifier/reward.txt"
    ref = write_task(folder, name, test=test, evaluator=WHOLE)
    import_folder(name, folder)
    return ref


def drain(site: Site, server: ModelServer) -> None:
    """Set a server to draining, as the admin's page of it does."""
    site.line.sql(
        "UPDATE rollouts_inferenceserver SET state = 'draining' WHERE id = %s", site.id_of(server)
    )


def remove(site: Site, server: ModelServer) -> None:
    """Remove a server over the API."""
    site.line.trainer.call("DELETE", f"/inference-servers/{site.id_of(server)}/")


@pytest.mark.parametrize("way", [drain, remove])
def test_a_server_that_is_taken_out_ends_what_it_has_and_gets_nothing_new(
    way: Callable[[Site, ModelServer], None], site: Site, import_folder: Any, tmp_path: Path
) -> None:
    name = f"out-{way.__name__}"
    ref = task(name, tmp_path, import_folder)
    out, stays, _later = site.servers
    site.begin(name, servers=2)
    before = site.asked()
    rollouts = site.submit(name, ref, samples=8)
    assert site.wait_held(8) == [4, 4, 0]

    way(site, out)
    stays.control()

    def four_done() -> bool:
        rows = site.line.sql(
            "SELECT count(*) FROM rollouts_rollout WHERE id = ANY(%s) AND state = 'done'", rollouts
        )
        return bool(rows[0][0] == 4)

    wait_until(four_done, "the end of those on the other server", 120)
    assert out.state()["in_flight"] == 4
    out.control()

    site.check_done(rollouts)
    asked = [now - then for now, then in zip(site.asked(), before, strict=True)]
    assert asked == [4, 8 * len(TURNS) - 4, 0]


def test_a_server_that_is_removed_and_ended_at_once_loses_no_rollout(
    site: Site, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = task("ended", tmp_path, import_folder)
    out, stays, _later = site.servers
    site.begin("ended", servers=2)
    rollouts = site.submit("ended", ref, samples=8)
    assert site.wait_held(8) == [4, 4, 0]

    remove(site, out)
    out.kill()
    stays.control()

    site.check_done(rollouts)


def test_rollouts_outlive_the_clearing_of_all_servers_and_go_on_with_the_same_ones(
    site: Site, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = task("cleared", tmp_path, import_folder)
    site.begin("cleared", servers=2)
    rollouts = site.submit("cleared", ref, samples=8)
    assert site.wait_held(8) == [4, 4, 0]
    before = site.asked()

    cleared = site.line.trainer.call("POST", "/inference-servers/clear/", {"policy": site.policy})
    for server in site.servers:
        server.control()

    def all_wait() -> bool:
        """Every first turn was carried out, and no second one is asked for."""
        rows = site.line.sql(
            "SELECT count(*) FROM rollouts_journalentry "
            "WHERE rollout_id = ANY(%s) AND kind = 'observed'",
            rollouts,
        )
        return bool(rows[0][0] == 8)

    wait_until(all_wait, "the first turns", 120)
    assert (cleared, site.asked()) == ({"removed": 2}, before)
    for server in site.servers[:2]:
        site.register(server)

    site.check_done(rollouts)
    asked = [now - then for now, then in zip(site.asked(), before, strict=True)]
    assert (sum(asked), asked[2]) == (8 * (len(TURNS) - 1), 0)


def test_without_servers_the_wait_ends_with_its_budget(
    site: Site, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = task("nowhere", tmp_path, import_folder)
    site.begin("nowhere", servers=1)
    rollouts = site.submit("nowhere", ref, samples=2, attempts=1, inference_wait_seconds=2)
    assert site.wait_held(2) == [2, 0, 0]

    site.line.trainer.call("POST", "/inference-servers/clear/", {"policy": site.policy})
    site.servers[0].control()

    done = site.line.wait_done(rollouts)
    ends = [(r["outcome"], r["failure_code"], r["turns"]) for r in done]
    assert ends == [("infra_failed", "inference.no_server", 1)] * 2


def test_a_server_that_is_added_later_gets_its_share_and_no_more(
    site: Site, import_folder: ImportFolder, tmp_path: Path
) -> None:
    ref = task("later", tmp_path, import_folder)
    site.begin("later", servers=2)
    first = site.submit("later", ref, samples=6)
    assert site.wait_held(6) == [3, 3, 0]

    site.register(site.servers[2])
    site.servers[2].control("hold")
    second = site.submit("later", ref, samples=10)

    assert sorted(site.wait_held(16)) == [5, 5, 6]
    for server in site.servers:
        server.control()
    site.check_done([*first, *second])
