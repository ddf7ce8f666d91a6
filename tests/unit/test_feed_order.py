"""The order of an epoch: complete, the same for the same seed, in proportion everywhere."""

from collections import Counter
from uuid import UUID, uuid5

import pytest

from rollouts.feed_order import ID_BYTES, SetTasks, order_of

SPACE = UUID(int=7)


def some(name: str, count: int, weight: float = 1.0) -> SetTasks:
    ids = b"".join(uuid5(SPACE, f"{name}/{number}").bytes for number in range(count))
    return SetTasks(name, ids, weight)


def split(order: bytes) -> list[bytes]:
    return [order[at : at + ID_BYTES] for at in range(0, len(order), ID_BYTES)]


def order(
    sets: list[SetTasks], *, seed: int = 0, epoch: int = 0, shuffle: bool = True
) -> list[bytes]:
    return split(order_of(sets, seed=seed, epoch=epoch, shuffle=shuffle))


@pytest.mark.parametrize("shuffle", [True, False])
@pytest.mark.parametrize("epoch", [0, 1, 7])
def test_an_epoch_has_every_task_once(shuffle: bool, epoch: int) -> None:
    sets = [some("a", 100), some("b", 7)]

    drawn = order(sets, epoch=epoch, shuffle=shuffle)

    assert sorted(drawn) == sorted(split(sets[0].ids) + split(sets[1].ids))


def test_without_shuffling_a_set_keeps_its_order() -> None:
    assert order([some("a", 9)], shuffle=False, epoch=3) == split(some("a", 9).ids)


def test_the_same_seed_gives_the_same_order_and_another_seed_or_epoch_another() -> None:
    sets = [some("a", 50)]
    first = order(sets, seed=5)

    assert order(sets, seed=5) == first
    assert order(sets, seed=6) != first
    assert order(sets, seed=5, epoch=1) != first
    # Kept over releases: an experiment that is fed by two of them must not change its order.
    assert first[:5] == [split(sets[0].ids)[at] for at in (41, 27, 37, 26, 40)]


def test_another_set_does_not_disturb_the_order_of_the_first() -> None:
    alone, other = some("b", 40), some("a", 13)
    own = set(split(alone.ids))

    mixed = order([other, alone], seed=3)

    assert [each for each in mixed if each in own] == order([alone], seed=3)
    assert order([alone, other], seed=3) == mixed


@pytest.mark.parametrize("shuffle", [True, False])
def test_every_stretch_has_the_sets_in_proportion(shuffle: bool) -> None:
    large, small = some("large", 900), some("small", 100)
    of_small = set(split(small.ids))

    drawn = order([large, small], shuffle=shuffle)

    for end in range(0, 1001, 100):
        assert abs(sum(each in of_small for each in drawn[:end]) - end / 10) <= 1


def test_a_weight_says_how_often_a_task_comes() -> None:
    twice, once = some("twice", 10, 2.0), some("once", 10)

    found = Counter(order([twice, once], seed=1))

    assert {found[each] for each in split(twice.ids)} == {2}
    assert {found[each] for each in split(once.ids)} == {1}


@pytest.mark.parametrize(("weight", "epochs"), [(0.5, 2), (0.29, 100), (0.1, 10), (1.5, 2)])
def test_a_fractional_weight_leaves_no_task_out_for_good(weight: float, epochs: int) -> None:
    tasks = some("some", 10, weight)

    found = Counter(each for epoch in range(epochs) for each in order([tasks], seed=2, epoch=epoch))

    assert {found[each] for each in split(tasks.ids)} == {round(weight * epochs)}


def test_nothing_gives_an_empty_order() -> None:
    assert order([]) == []
    assert order([some("none", 0), some("rare", 1, 0.001)]) == []
