"""SkyRL's own validation passes on our output."""

from __future__ import annotations

import asyncio
import sys
import typing
from importlib.util import find_spec
from pathlib import Path

import pytest

if sys.version_info < (3, 12):  # which SkyRL asks for, and pydantic for its typed dictionaries
    import typing_extensions

    typing.TypedDict = typing_extensions.TypedDict

_found = find_spec("skyrl")
for _place in _found.submodule_search_locations or () if _found else ():
    sys.path.append(str(Path(_place).parent / "skyrl-gym"))  # its wheel has it there

pytest.importorskip("skyrl", reason="SkyRL is not installed here: make test-adapters")

from prorl_client import AsyncClient  # noqa: E402
from prorl_client.adapters.skyrl import ProrlGenerator, generator_output  # noqa: E402

from tests.adapters.made import every_kind  # noqa: E402
from tests.adapters.real.service import live, service  # noqa: E402


@pytest.mark.parametrize("step_wise", [False, True])
def test_skyrl_validates_every_kind(step_wise: bool) -> None:
    from skyrl.train.generators.base import GeneratorOutput, TrajectoryID
    from skyrl.train.utils.trainer_utils import validate_generator_output

    kinds = list(every_kind().values())
    ids = [TrajectoryID(instance_id="i", repetition_id=place) for place in range(len(kinds))]
    found = generator_output([kinds], stand_in=0, trajectory_ids=ids, step_wise=step_wise)
    assert set(found) == set(GeneratorOutput.__annotations__)
    validate_generator_output(len(kinds), found, step_wise=step_wise)


@live
def test_the_generator_samples_a_batch_in_order() -> None:
    from skyrl.train.generators.base import TrajectoryID
    from skyrl.train.utils.trainer_utils import validate_generator_output

    known = service()
    refs = [ref for ref in known.tasks for _ in range(2)]
    batch = {
        "prompts": [[{"role": "user", "content": ref}] for ref in refs],
        "env_classes": ["prorl"] * len(refs),
        "env_extras": [{"task_ref": ref} for ref in refs],
        "sampling_params": None,
        "trajectory_ids": [TrajectoryID(ref, place % 2) for place, ref in enumerate(refs)],
        "batch_metadata": None,
    }

    async def generate() -> dict:
        async with AsyncClient() as client:
            experiment = await client.experiment(known.experiment)
            return await ProrlGenerator(experiment, timeout=300).generate(batch)

    found = asyncio.run(generate())
    validate_generator_output(len(refs), found)
    assert found["trajectory_ids"] == batch["trajectory_ids"]
    by_task = dict(zip(refs, found["rewards"], strict=True))
    assert sorted(by_task.values()) == [0.0, 1.0]
