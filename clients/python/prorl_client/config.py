"""Where the service is and who calls: arguments, the environment, then a configuration file."""

from __future__ import annotations

import os
import stat
from configparser import ConfigParser, Error
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

from prorl_client.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
EXAMPLE = "[default]\nurl = https://rollouts.example\ntoken = ..."


@dataclass(frozen=True)
class Address:
    """A service and the token to call it with."""

    url: str
    token: str = field(repr=False)


def config_path() -> Path:
    """Return where the configuration file is: PRORL_CONFIG, or below the user's folder."""
    named = os.environ.get("PRORL_CONFIG")
    if named:
        return Path(named).expanduser()
    base = os.environ.get("XDG_CONFIG_HOME") or "~/.config"
    return Path(base).expanduser() / "prorl" / "config.ini"


def find_address(
    url: str | None = None, token: str | None = None, *, profile: str | None = None
) -> Address:
    """Return address and token: as given, else PRORL_URL and PRORL_TOKEN, else from the file.

    A profile that is asked for by name goes before the environment. Raises ConfigError.
    """
    profile = profile or os.environ.get("PRORL_PROFILE")
    stored = {} if url and token and not profile else _read(config_path(), profile)
    environment = {"url": os.environ.get("PRORL_URL"), "token": os.environ.get("PRORL_TOKEN")}
    first, second = (stored, environment) if profile else (environment, stored)
    found_url = url or first.get("url") or second.get("url") or DEFAULT_URL
    found_token = token or first.get("token") or second.get("token")
    if not found_token:
        raise ConfigError(
            "There is no token. Set PRORL_TOKEN, pass token= or --token-file, or write "
            f"{config_path()}:\n{EXAMPLE}"
        )
    return Address(checked_url(found_url), _checked_token(found_token))


def checked_url(url: str) -> str:
    """Return the address without a slash or the API's prefix at its end. Raises ConfigError."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"{url!r} is no address of a service; write {DEFAULT_URL!r} for example.")
    if parts.username or parts.password or parts.query or parts.fragment:
        raise ConfigError("The service's address has neither user, password, query nor fragment.")
    return url.strip().rstrip("/").removesuffix("/api/v1").rstrip("/")


def _checked_token(token: str) -> str:
    token = token.strip()
    if not token or not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigError("The token has characters that no token has; copy it again.")
    return token


def _read(path: Path, profile: str | None) -> dict[str, str | None]:
    try:
        with path.open(encoding="utf-8") as stream:
            _refuse_readable(path, os.fstat(stream.fileno()))
            parser = ConfigParser(interpolation=None)
            parser.read_file(stream)
    except FileNotFoundError:
        if profile:
            raise ConfigError(f"There is no {path} that profile {profile!r} could be in.") from None
        return {}
    except (OSError, UnicodeDecodeError, Error) as fault:
        # A parser's own words quote the line that it does not understand: it may be the token.
        why = fault.strerror if isinstance(fault, OSError) else "it has another form"
        raise ConfigError(f"{path} cannot be read: {why}. It looks like:\n{EXAMPLE}") from None
    section = profile or "default"
    if not parser.has_section(section):
        if profile:
            known = ", ".join(parser.sections()) or "none"
            raise ConfigError(f"{path} has no profile {profile!r}; it has: {known}.")
        return {}
    return {name: parser.get(section, name, fallback=None) for name in ("url", "token")}


def _refuse_readable(path: Path, status: os.stat_result) -> None:
    if os.name == "posix" and status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(
            f"{path} holds a token and others may read it "
            f"(mode {stat.S_IMODE(status.st_mode):04o}). Run: chmod 600 {path}"
        )
