"""Web search against a real HTTP server on the loopback, recorded and replayed."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest

from rollouts.tools.base import InvalidArguments, InvalidToolSettings, Tool, ToolContext
from rollouts.tools.cassettes import Cassettes, NotRecorded
from rollouts.tools.host import HostAccess
from rollouts.tools.registry import build_tools, check_tools
from rollouts.tools.search_providers import MAX_ANSWER_BYTES

CONTEXT = ToolContext(timeout_seconds=30)
HITS = [
    {"title": "First\n hit", "url": "https://a.example/1", "content": "About a."},
    {"title": "", "url": "https://b.example/", "content": ""},
    {"title": "no address"},
    {"title": "Third", "url": "https://c.example/", "content": "c" * 2000},
]


@dataclass
class SearchServer:
    """Answer each request with the next of `answers`, then with hits; `None` never answers."""

    answers: list[tuple[int, bytes] | None] = field(default_factory=list)
    asked: list[dict[str, list[str]]] = field(default_factory=list)
    url: str = ""
    over: threading.Event = field(default_factory=threading.Event)

    def answer(self, path: str) -> tuple[int, bytes] | None:
        parts = urlsplit(path)
        assert parts.path == "/search"
        self.asked.append(parse_qs(parts.query))
        if self.answers:
            return self.answers.pop(0)
        return 200, json.dumps({"results": HITS}).encode()


@pytest.fixture
def server() -> Iterator[SearchServer]:
    state = SearchServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            answer = state.answer(self.path)
            if answer is None:
                state.over.wait()
                return
            status, body = answer
            self.send_response(status)
            if status == 302:
                self.send_header("Location", "/search?q=elsewhere")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_arguments: object) -> None:
            return

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as serving:
        thread = threading.Thread(target=serving.serve_forever)
        thread.start()
        state.url = f"http://127.0.0.1:{serving.server_port}"
        yield state
        state.over.set()
        serving.shutdown()
        thread.join()


def search_tool(server: SearchServer, cassettes: Cassettes | None = None, **settings) -> Tool:
    host = HostAccess(search_url=server.url, cassettes=cassettes or Cassettes())
    return build_tools(["web_search"], {"web_search": settings}, host=host)["web_search"]


def test_hits_are_shown_within_their_number_and_length(server: SearchServer) -> None:
    tool = search_tool(server, results=2)
    long = search_tool(server, output_bytes=300)

    found = tool.call({"query": " what  is\na "}, CONTEXT)
    cut = long.call({"query": "c"}, CONTEXT)

    assert found.content == "1. First hit\nhttps://a.example/1\nAbout a.\n\n" + (
        "2. https://b.example/\nhttps://b.example/"
    )
    assert found.data == {
        "failed": False,
        "reason": "",
        "truncated": False,
        "calls": 1,
        "urls": ["https://a.example/1", "https://b.example/"],
    }
    assert server.asked[0] == {"q": ["what is a"], "format": ["json"]}
    assert cut.data["truncated"] is True
    assert cut.content.endswith("\n[truncated: 300 bytes of the answer are shown]")
    assert len(cut.content) < 450


def test_calls_are_counted_and_bounded(server: SearchServer) -> None:
    tool = search_tool(server, max_calls=2)
    answers = [tool.call({"query": "a"}, CONTEXT) for _ in range(3)]
    with pytest.raises(InvalidArguments, match="The query is empty"):
        tool.call({"query": " \n"}, CONTEXT)

    assert [answer.data["calls"] for answer in answers] == [1, 2, 2]
    assert answers[2].content == (
        "All 2 calls of web_search that this task allows are used; go on without it."
    )
    assert len(server.asked) == 2


@pytest.mark.parametrize(
    ("answers", "said", "requests"),
    [
        ([(503, b"")], "1. First hit", 2),
        ([(503, b""), (503, b"")], "The search server did not help: it answered 503.", 2),
        ([(403, b"")], "The search server did not help: it answered 403.", 1),
        ([(302, b"")], "The search server did not help: it answered 302.", 1),
        ([(200, b"<html>")], "The search server did not help: its answer is not JSON.", 1),
        ([(200, b"[" * 100_000)], "The search server did not help: its answer is not JSON.", 1),
        (
            [(200, b'{"results": 1}')],
            "The search server did not help: its answer holds no list of results.",
            1,
        ),
        (
            [(200, b" " * (MAX_ANSWER_BYTES + 1))],
            "The search server did not help: its answer is too long.",
            1,
        ),
        ([(200, b'{"results": []}')], "No results.", 1),
    ],
)
def test_what_goes_wrong_outside_is_told(server: SearchServer, answers, said, requests) -> None:
    server.answers = list(answers)
    answer = search_tool(server).call({"query": "a"}, CONTEXT)
    assert answer.content.startswith(said)
    assert len(server.asked) == requests


def test_a_silent_server_costs_no_more_than_the_call_may_last(server: SearchServer) -> None:
    server.answers = [None, None]
    late = search_tool(server, timeout_seconds=0.2).call({"query": "a"}, CONTEXT)
    stopped = search_tool(server).call(
        {"query": "a"}, ToolContext(timeout_seconds=60, cancelled=lambda: True)
    )
    assert late.content == "The search gave no answer in 0.2 seconds."
    assert stopped.data["reason"] == "cancelled"


def test_a_search_is_recorded_and_replayed_without_the_server(
    server: SearchServer, tmp_path: Path
) -> None:
    recorded = search_tool(server, Cassettes("record", tmp_path)).call({"query": "a"}, CONTEXT)
    asked = len(server.asked)
    server.url = "http://127.0.0.1:9"
    replay = search_tool(server, Cassettes("replay", tmp_path))

    assert replay.call({"query": "a"}, CONTEXT).content == recorded.content
    assert replay.call({"query": "b"}, CONTEXT).content == (
        "The search has no answer: no answer to this call of web_search was recorded."
    )
    assert len(server.asked) == asked == 1


def test_records_written_at_once_are_whole_and_unreadable_ones_are_none(tmp_path: Path) -> None:
    cassettes = Cassettes("record", tmp_path)
    texts = [letter * 100_000 for letter in "abcdefgh"]
    with ThreadPoolExecutor(8) as pool:
        list(
            pool.map(
                lambda text: cassettes.answer("t", {"b": 1, "a": [2]}, lambda: {"x": text}), texts
            )
        )
    replay = Cassettes("replay", tmp_path)

    (path,) = tmp_path.glob("**/*.json")
    assert replay.answer("t", {"a": [2], "b": 1}, dict)["x"] in texts
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]
    path.write_text("[")
    with pytest.raises(NotRecorded, match="is not readable"):
        replay.answer("t", {"a": [2], "b": 1}, dict)
    with pytest.raises(ValueError, match="it must be one of live, record, replay"):
        Cassettes("tape", tmp_path)
    with pytest.raises(ValueError, match="needs a folder"):
        Cassettes("replay")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({}, "set url, or PRORL_SEARCH_URL"),
        ({"url": "http://other.example"}, "other.example:80 is not among the hosts"),
        ({"url": "https://search.example:444"}, "search.example:444 is not among the hosts"),
        ({"url": "https://a:b@search.example"}, "write it like http://search:8080"),
        ({"url": "file:///etc/passwd"}, "write it like http://search:8080"),
        ({"url": "https://search.example", "provider": "oracle"}, "provider is 'oracle'"),
        ({"url": "https://search.example", "results": 21}, "results is 21; it must be 1 to 20"),
        ({"url": "https://search.example", "key": "x"}, "unknown setting 'key'"),
    ],
)
def test_only_listed_hosts_and_known_settings_are_taken(settings, reason) -> None:
    host = HostAccess(search_hosts=("search.example",))
    with pytest.raises(InvalidToolSettings, match=reason):
        check_tools(["web_search"], {"web_search": settings}, host=host)
    check_tools(["web_search"], {"web_search": {"url": "https://search.example"}}, host=host)
