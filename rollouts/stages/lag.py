"""Hold a rollout to its experiment's bound on how many policy versions its tokens may span."""

from collections.abc import Iterable
from dataclasses import dataclass

from rollouts.inference.protocol import VersionRun
from rollouts.inference.trace import UNKNOWN_POLICY_VERSION
from rollouts.stages.stamping import Partial, within_lag
from rollouts.states import LagAction


class PolicyLagDrop(Exception):
    """The rollout spans too many policy versions and its experiment drops it."""

    code = "policy.lag_exceeded"


@dataclass
class Lag:
    """Know the versions of a rollout's tokens, those that earlier workers left included.

    `bound` is None where any number of versions will do. `oldest` and `newest` are None without
    tokens; `unknown` says that nobody knows which weights sampled some of them, `cut` that the
    rollout ends, or its last turn was shortened, for the bound.
    """

    bound: int | None
    action: str
    oldest: int | None = None
    # Nobody tells of earlier workers' tokens more than the oldest.
    newest: int | None = None
    unknown: bool = False
    cut: bool = False

    def ends(self, version: int) -> bool:
        """Tell whether one more token would span too many, and the rollout ends for it.

        `version` is the policy's. Raises PolicyLagDrop.
        """
        bound, oldest = self.bound, self.oldest
        newest = max(version, self.newest or 0)
        if bound is not None and self.unknown:
            self.drop_unknown()
        elif bound is None or oldest is None or newest - oldest <= bound:
            return False
        elif self.action == LagAction.DROP:
            raise PolicyLagDrop(
                f"Its oldest token is of policy version {oldest}, the policy is at {newest}; "
                f"max_policy_lag is {bound}."
            )
        self.cut = self.action == LagAction.CUT
        return self.cut

    def drop_unknown(self) -> None:
        """Raise PolicyLagDrop where the bound cannot be shown to hold and lag is dropped."""
        if self.bound is not None and self.unknown and self.action == LagAction.DROP:
            raise PolicyLagDrop(
                "Nobody knows which policy version sampled some of its tokens, so that it cannot "
                f"be shown to keep max_policy_lag, which is {self.bound}."
            )

    def note(self, runs: Iterable[VersionRun], asked: int) -> None:
        """Remember the versions of tokens; those of an unknown one count as `asked`."""
        told = [stamp for stamp, _run in runs]
        self.unknown |= UNKNOWN_POLICY_VERSION in told
        stamps = [asked if stamp == UNKNOWN_POLICY_VERSION else stamp for stamp in told]
        if stamps:
            self.oldest = min(stamps) if self.oldest is None else min(self.oldest, *stamps)
            self.newest = max(self.newest or 0, *stamps)

    def shorten(self, partial: Partial, asked: int) -> bool:
        """Drop a turn's tokens from where the rollout's would span too many; tell whether.

        Raises PolicyLagDrop. Those of an unknown version are `ends`'s to judge.
        """
        if self.bound is None or self.action == LagAction.KEEP:
            return False
        kept = within_lag(partial.versions, self.bound, (self.oldest, self.newest))
        if kept == len(partial.token_ids):
            return False
        if self.action == LagAction.DROP:
            raise PolicyLagDrop(
                f"The versions {partial.versions} of a turn's tokens, as (version, tokens), go "
                f"beyond max_policy_lag, which is {self.bound}; its oldest was {self.oldest}."
            )
        partial.keep(kept)
        self.note(partial.versions, asked)
        self.cut = True
        return True
