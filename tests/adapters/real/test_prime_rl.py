"""prime-rl's own struct takes our samples, and its batcher packs them; from its source."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("msgspec", reason="msgspec is not installed here: make test-adapters")
_found = find_spec("prime_rl")
if _found is None:
    pytest.skip("prime-rl's source is not here: make test-adapters", allow_module_level=True)
# Its packages import the whole trainer; the module of its wire format needs none of that.
for _name in ("prime_rl", "prime_rl.transports", "prime_rl.transports.rollouts"):
    _package = ModuleType(_name)
    _package.__path__ = [
        str(Path(place, *_name.split(".")[1:])) for place in _found.submodule_search_locations or ()
    ]
    sys.modules.setdefault(_name, _package)

from prorl_client.adapters.verifiers import as_training_samples  # noqa: E402

from tests.adapters.made import every_kind  # noqa: E402


def test_every_kind_goes_over_prime_rls_wire() -> None:
    import msgspec
    from prime_rl.transports.rollouts.types import TrainingSample

    samples = as_training_samples(list(every_kind().values()), env_name="files")
    assert len(samples) == 7
    wire = msgspec.msgpack.encode(samples)
    back = msgspec.msgpack.decode(wire, type=list[TrainingSample])
    assert back == samples
    for each in back:
        size = len(each.token_ids)
        assert len(each.mask) == len(each.logprobs) == len(each.temperatures) == size
        assert each.advantages is not None
        assert len(each.advantages) == size
