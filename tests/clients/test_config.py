"""Where address and token come from."""

from __future__ import annotations

from pathlib import Path

import pytest
from prorl_client import ConfigError
from prorl_client.config import Address, find_address

TWO = """[default]
url = https://a.example/
token = ta%x
[lab]
url = https://b.example
token = tb
"""


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "config.ini"
    path.write_text(TWO)
    path.chmod(0o600)
    monkeypatch.setenv("PRORL_CONFIG", str(path))
    return path


def test_file_is_read(config: Path) -> None:
    assert find_address() == Address("https://a.example", "ta%x")


def test_profile(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRORL_URL", "http://c.example")
    monkeypatch.setenv("PRORL_TOKEN", "tc")

    assert find_address(profile="lab") == Address("https://b.example", "tb")
    with pytest.raises(ConfigError, match="no profile 'none'; it has: default, lab"):
        find_address(profile="none")


def test_arguments_go_before_the_environment_and_that_before_the_file(
    config: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PRORL_URL", "http://c.example")

    assert find_address() == Address("http://c.example", "ta%x")
    assert find_address("http://d.example", "td") == Address("http://d.example", "td")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o601])
def test_file_that_others_may_read_is_refused(config: Path, mode: int) -> None:
    config.chmod(mode)

    with pytest.raises(ConfigError, match=f"chmod 600 {config}"):
        find_address()


def test_file_that_is_none(config: Path) -> None:
    config.write_text("token: very-secret\nno section")

    with pytest.raises(ConfigError, match=r"(?s)cannot be read.*like:\n\[default\]") as caught:
        find_address()

    assert "very-secret" not in str(caught.value)
    assert caught.value.__cause__ is None


def test_nothing_is_set() -> None:
    with pytest.raises(ConfigError, match="Set PRORL_TOKEN"):
        find_address("http://a.example")


@pytest.mark.parametrize("url", ["a.example", "ftp://a", "http://", "http://u:p@a", "http://a/?b"])
def test_address_that_is_none(url: str) -> None:
    with pytest.raises(ConfigError, match="address"):
        find_address(url, "t")


@pytest.mark.parametrize("token", ["two words", "a\nb", "\u00e4", "a\x00"])
def test_token_that_cannot_be_sent(token: str) -> None:
    with pytest.raises(ConfigError, match="copy it again"):
        find_address("http://a", token)


@pytest.mark.parametrize("url", ["http://a", "http://a/", "http://a/api/v1", " http://a/api/v1/ "])
def test_prefix_and_slash_do_not_matter(url: str) -> None:
    assert find_address(url, " t\n") == Address("http://a", "t")
