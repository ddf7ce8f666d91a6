"""Turn a Dockerfile and its context into a definition that an image is built from.

What a definition cannot say is refused with its line. Commands and files travel beside the
definition, as texts: nothing in them can be taken for a section or a variable of its own. See
https://docs.docker.com/reference/dockerfile/ for what the instructions mean.
"""

from __future__ import annotations

import base64
import json
import posixpath
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NoReturn

from rollouts.importers.base import FileContent, Files, ImageBuild, TaskRejected
from rollouts.importers.dockerfile import Instruction, read_instructions
from sandboxes.images.references import parse_source
from sandboxes.images.specs import ImageSpec
from sandboxes.runtime.exceptions import SandboxFault

FOLDER = "/.prorl-build"
DEFAULT_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
NOTED = frozenset(
    {"CMD", "ENTRYPOINT", "EXPOSE", "LABEL", "MAINTAINER", "STOPSIGNAL", "HEALTHCHECK", "VOLUME"}
)
_VARIABLE = re.compile(r"\\(\$)|\$(?:([A-Za-z_]\w*)|\{([A-Za-z_]\w*)(?:(:[-+])([^}]*))?\})")
_FLAG = re.compile(r"^--([a-z]+)(?:=(\S*))?\s+")
_ONLY_HEREDOC = re.compile(r"<<-?[\"']?\w+[\"']?")
_ARCHIVE = re.compile(r"\.(tar|tgz|tbz2|txz|tar\.(gz|bz2|xz|zst))$")
_ROOT = frozenset({"root", "0", "root:root", "0:0", "root:0", "0:root"})


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Hold what a Dockerfile became: the build, its last WORKDIR, its ENV, what it ignores."""

    build: ImageBuild
    workdir: str | None
    env: Mapping[str, str]
    ignored: tuple[str, ...]


def convert_dockerfile(text: str, context: Files) -> Converted:
    """Return the build that does what a Dockerfile says; raise `TaskRejected`."""
    if ".dockerignore" in context:
        raise TaskRejected("environment/.dockerignore is not read; remove it, and what it names")
    if re.match(r"\s*#\s*escape\s*=\s*`", text):
        raise TaskRejected("environment/Dockerfile has another escape character; use the usual one")
    return _Converter(context).convert(text)


@dataclass
class _Converter:
    context: Files
    origin: str = ""
    shell: list[str] = field(default_factory=lambda: ["/bin/sh"])
    env: dict[str, str] = field(default_factory=dict)
    args: dict[str, str] = field(default_factory=dict)
    outer_args: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"
    has_workdir: bool = False
    post: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    ignored: list[str] = field(default_factory=list)

    def convert(self, text: str) -> Converted:
        for each in read_instructions(text):
            self._take(each)
        if not self.origin:
            raise TaskRejected("environment/Dockerfile has no FROM; say which image it starts from")
        self.files["build/post.sh"] = "\n".join([*self.post, ""])
        definition = (
            f"Bootstrap: docker\nFrom: {self.origin}\n\n%files\n    build {FOLDER}\n\n"
            f"%post\n    /bin/sh -e {FOLDER}/post.sh\n    rm -rf {FOLDER}\n"
        )
        build = ImageBuild(definition=definition, files=self.files)
        try:
            ImageSpec(
                name=build.name, source="definition:", definition=definition, files=build.files
            ).check()
        except SandboxFault as fault:
            raise TaskRejected(
                f"environment/Dockerfile: {fault}; put large files into an image of their own"
            ) from fault
        return Converted(
            build=build,
            workdir=self.workdir if self.has_workdir else None,
            env=self.env,
            ignored=tuple(self.ignored),
        )

    def _take(self, each: Instruction) -> None:
        if not each.rest:
            _refuse(each, "is no instruction with something to do; mend the line")
        if each.word == "ARG":
            self._arg(each)
        elif each.word == "FROM":
            self._from(each)
        elif not self.origin:
            _refuse(each, "stands before FROM")
        elif each.word in NOTED:
            self.ignored.append(f"line {each.line}: {each.word}")
        else:
            take = {
                "RUN": self._run,
                "COPY": self._copy,
                "ADD": self._copy,
                "WORKDIR": self._change_workdir,
                "ENV": self._set_env,
                "USER": self._user,
                "SHELL": self._change_shell,
            }.get(each.word)
            if take is None:
                _refuse(each, "is not supported")
            take(each)

    def _from(self, each: Instruction) -> None:
        if self.origin:
            _refuse(
                each,
                "begins a second stage, and only one is built here: build the image "
                "elsewhere and name it as [environment] docker_image",
            )
        rest = each.rest
        while (flag := _FLAG.match(rest)) is not None:
            if flag[1] != "platform" or self._filled(flag[2] or "") not in ("linux/amd64", ""):
                _refuse(each, f"has --{flag[1]}={flag[2]}; only linux/amd64 is built here")
            rest = rest[flag.end() :]
        origin = self._filled(rest.split()[0]).removeprefix("docker://")
        if origin == "scratch":
            _refuse(each, "starts from nothing; start from an image that has a shell")
        try:
            parse_source(f"docker://{origin}")
        except SandboxFault as fault:
            _refuse(each, f"names no image: {fault}")
        self.origin = origin
        # What stands before FROM is known behind it only where ARG names it again.
        self.outer_args, self.args = self.args, {}

    def _arg(self, each: Instruction) -> None:
        for word in self._words(each):
            name, equals, value = word.partition("=")
            if not equals and name not in self.outer_args:
                continue  # nobody gives build arguments here: it stays unset
            self.args[name] = self._filled(value) if equals else self.outer_args[name]
            if self.origin and name not in self.env:
                self.post.append(f"export {_name(each, name)}={shlex.quote(self.args[name])}")

    def _set_env(self, each: Instruction) -> None:
        first = each.rest.split(None, 1)
        if "=" not in first[0]:  # the old form: a name, and all the rest is its value
            pairs = {first[0]: self._filled(first[1] if len(first) > 1 else "")}
        else:
            pairs = {}
            for word in self._words(each):
                name, equals, value = word.partition("=")
                if not equals:
                    _refuse(each, f"has {word!r}; write name=value")
                pairs[name] = self._filled(value)
        for name, value in pairs.items():
            self.env[_name(each, name)] = value
            self.post.append(f"export {name}={shlex.quote(value)}")

    def _change_workdir(self, each: Instruction) -> None:
        path = self._filled(each.rest.strip("\"'"))
        self.workdir = posixpath.normpath(posixpath.join(self.workdir, path))
        self.has_workdir = True
        self.post.append(f"mkdir -p {shlex.quote(self.workdir)}")

    def _user(self, each: Instruction) -> None:
        if self._filled(each.rest) not in _ROOT:
            _refuse(each, f"is {each.rest}; only root is supported")

    def _change_shell(self, each: Instruction) -> None:
        words = _json_words(each.rest)
        if not words or words[-1] != "-c":
            _refuse(each, 'must be a list that ends with "-c"')
        self.shell = words[:-1]

    def _run(self, each: Instruction) -> None:
        command = each.rest
        while (flag := _FLAG.match(command)) is not None:
            if flag[1] != "mount" or "type=cache" not in (flag[2] or ""):
                _refuse(each, f"has --{flag[1]}={flag[2]}, which a build here cannot give")
            command = command[flag.end() :]
        words = _json_words(command)
        script = command if words is None else shlex.join(words)
        shell = self.shell
        if each.heredocs and _ONLY_HEREDOC.fullmatch(command):
            script = each.heredocs[0].text
            if script.startswith("#!"):
                shell = shlex.split(script.splitlines()[0][2:])
        else:
            for doc in each.heredocs:
                script += "\n" + "\n".join([*doc.lines, doc.word])
        name = self._lay(f"{script}\n".encode())[0]
        place = shlex.quote(self.workdir)
        self.post.append(f"cd {place} && {shlex.join(shell)} {FOLDER}/{name}")

    def _copy(self, each: Instruction) -> None:
        rest, mode = each.rest, None
        while (flag := _FLAG.match(rest)) is not None:
            mode = self._copy_flag(each, flag[1], flag[2] or "") or mode
            rest = rest[flag.end() :]
        words = _json_words(rest) or [self._filled(word) for word in _split(each, rest)]
        if len(words) < 2:
            _refuse(each, "needs what to copy and where to")
        *sources, target = words
        into = target.endswith("/") or target in (".", "..") or len(sources) > 1
        target = posixpath.normpath(posixpath.join(self.workdir, target))
        documents = iter(each.heredocs)
        for source in sources:
            if source.startswith("<<"):
                document = next(documents)
                name = document.word if into else ""
                self._put(
                    posixpath.join(target, name).rstrip("/"), document.text.encode(), mode or 0o644
                )
                continue
            for path, content in self._found(each, source, into).items():
                self._put(
                    posixpath.join(target, path).rstrip("/"), content.data, mode or content.mode
                )

    def _copy_flag(self, each: Instruction, name: str, value: str) -> int | None:
        if name == "chmod" and re.fullmatch(r"0?[0-7]{3}", value):
            return int(value, 8)
        if name != "link" and not (name == "chown" and value in _ROOT):
            _refuse(each, f"has --{name}={value}, which a build here cannot give")
        return None

    def _found(self, each: Instruction, source: str, into: bool) -> dict[str, FileContent]:
        """Return the files that a source names, by their path below the target."""
        if re.match(r"(https?|git|ssh)://|git@", source):
            _refuse(each, f"fetches {source}; use RUN with a program that fetches it")
        wanted = posixpath.normpath(source.lstrip("/") or ".")
        if wanted.startswith(".."):
            _refuse(each, f"copies {source} from outside environment/")
        found: dict[str, FileContent] = {}
        for path, content in self.context.items():
            if wanted == "." or path.startswith(f"{wanted}/"):
                found[path if wanted == "." else path[len(wanted) + 1 :]] = content
            elif path == wanted or _matches(path, wanted):
                if each.word == "ADD" and _ARCHIVE.search(path):
                    _refuse(each, f"unpacks {path}; use COPY and RUN tar")
                found[posixpath.basename(path) if into or path != wanted else ""] = content
        if not found:
            _refuse(each, f"copies {source}, which is not in environment/")
        return found

    def _put(self, target: str, data: bytes, mode: int) -> None:
        name, encoded = self._lay(data)
        place = shlex.quote(target)
        self.post.append(f"mkdir -p {shlex.quote(posixpath.dirname(target))}")
        read = f"base64 -d {FOLDER}/{name} >" if encoded else f"cp {FOLDER}/{name}"
        self.post.append(f"{read} {place} && chmod {mode:o} {place}")

    def _lay(self, data: bytes) -> tuple[str, bool]:
        """Lay a file beside the definition; return its name and whether it is encoded."""
        try:
            text, encoded = data.decode(), b"\0" in data
        except UnicodeDecodeError:
            text, encoded = "", True
        if encoded:
            text = base64.encodebytes(data).decode()
        name = f"f/{len(self.files):04}"
        self.files[f"build/{name}"] = text
        return name, encoded

    def _words(self, each: Instruction) -> list[str]:
        return _split(each, each.rest)

    def _filled(self, text: str) -> str:
        """Return a text with its variables put in, as Docker does outside RUN."""
        known = {"PATH": DEFAULT_PATH, **self.args, **self.env}

        def put(match: re.Match[str]) -> str:
            if match[1]:
                return "$"
            value = known.get(match[2] or match[3], "")
            if match[4] == ":-":
                return value or match[5]
            if match[4] == ":+":
                return match[5] if value else ""
            return value

        return _VARIABLE.sub(put, text)


def _refuse(each: Instruction, why: str) -> NoReturn:
    raise TaskRejected(f"environment/Dockerfile line {each.line}: {each.word} {why}")


def _name(each: Instruction, name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_]\w*", name):
        _refuse(each, f"has {name!r}, which is no name of a variable")
    return name


def _split(each: Instruction, text: str) -> list[str]:
    try:
        return shlex.split(text)
    except ValueError as fault:
        _refuse(each, f"cannot be read: {fault}")


def _json_words(text: str) -> list[str] | None:
    """Return the words of the exec form, None where it is not in that form."""
    if not text.startswith("["):
        return None
    try:
        words: Any = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return words if words and all(isinstance(word, str) for word in words) else None


def _matches(path: str, pattern: str) -> bool:
    """Match as Docker does: a star stays within one part of a path."""
    parts, wanted = path.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))
