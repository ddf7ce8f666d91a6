"""Carry the phases of a grading out on a real runtime, without the service around it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from evaluators.base import Artefacts, Base, Evaluator, Phase, PhaseResult, Ran, Score
from sandboxes.runtime.apptainer import ApptainerRuntime
from sandboxes.runtime.exceptions import FileFault, FileMissing, OutputTooLarge
from sandboxes.runtime.protocol import SandboxHandle
from tests.sandbox.conftest import Start

SECONDS = 120.0


class Grader:
    """Keep a prepared layer, make agents' layers above it and grade them.

    `ran` are the phases of the last grading.
    """

    def __init__(self, runtime: ApptainerRuntime, start: Start, workdir: str) -> None:
        self._runtime, self._start, self._workdir = runtime, start, workdir
        self.prepared: tuple[str, ...] = ()
        self.commit = ""
        self.ran: tuple[PhaseResult, ...] = ()

    def layer(
        self, script: str, files: Mapping[str, tuple[bytes, int]] | None = None
    ) -> tuple[tuple[str, ...], str]:
        """Return the layers that a script leaves over the prepared one, and what it printed."""
        handle = self._start(layers=self.prepared, workdir=self._workdir)
        self._runtime.write_files(handle, files or {})
        result = self._runtime.exec(handle, ["bash", "-ec", script], timeout_seconds=SECONDS)
        assert result.exit_code == 0, result.stdout + result.stderr
        return (self._runtime.freeze(handle), *self.prepared), result.stdout.decode()

    def grade(
        self,
        evaluator: Evaluator,
        payload: Mapping[str, Any],
        agent: str = "",
        *,
        settings: Mapping[str, Any] | None = None,
        answer: str | None = None,
    ) -> Score:
        """Grade what an agent's script leaves, or answers; raises the evaluator's faults."""
        chosen = settings or {}
        layers = self.layer(agent)[0] if agent else self.prepared
        artefacts = Artefacts(answer=answer)
        evaluator.validate(chosen, payload)
        while (phase := evaluator.next_phase(chosen, payload, artefacts)) is not None:
            left = self._carry_out(phase, layers)
            artefacts = Artefacts(answer=answer, phases=(*artefacts.phases, left))
        self.ran = artefacts.phases
        return evaluator.score(chosen, payload, artefacts)

    def _carry_out(self, phase: Phase, agent: tuple[str, ...]) -> PhaseResult:
        layers: Sequence[str] = self.prepared
        if phase.base is Base.AGENT and agent != self.prepared:
            folders = phase.workspace or (self._workdir,)
            cut = self._runtime.cut_layers(agent[:1], folders=folders, sealed=("/tests",))
            layers = (*cut, *self.prepared)
        handle = self._start(layers=tuple(layers), workdir=self._workdir)
        self._runtime.write_files(handle, phase.files)
        ran = []
        for each in phase.commands:
            result = self._runtime.exec(
                handle,
                each.argv,
                stdin=each.stdin,
                env=each.env,
                cwd=each.cwd,
                timeout_seconds=min(each.seconds or SECONDS, SECONDS),
                output_bytes=each.output_bytes,
            )
            ran.append(
                Ran(
                    exit_code=result.exit_code,
                    stdout=result.stdout,
                    stderr=result.stderr,
                    seconds=result.duration_seconds,
                    timed_out=result.timed_out,
                    truncated=result.truncated,
                )
            )
        files = {path: self._read(handle, path, most) for path, most in phase.collect.items()}
        self._runtime.stop(handle.name)
        return PhaseResult(name=phase.name, commands=tuple(ran), files=files)

    def _read(self, handle: SandboxHandle, path: str, most: int) -> bytes | None:
        try:
            return self._runtime.read_file(handle, path, max_bytes=most)
        except FileMissing:
            return None
        except (OutputTooLarge, FileFault):
            return b""


MakeGrader = Callable[[str], Grader]
