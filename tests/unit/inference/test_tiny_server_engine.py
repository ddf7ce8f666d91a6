"""The numpy engine: log-probabilities are exact, batched or alone, and nothing is left behind."""

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import gguf
import numpy as np
import pytest

from examples.tiny_server.engine import Engine, EngineStoppedError
from examples.tiny_server.model import Chunk, KeyValueCache, Model
from examples.tiny_server.sampling import Choice, Sampling, log_softmax, sample
from examples.tiny_server.sequences import Sequence
from examples.tiny_server.weights import gguf_path, load_weights
from rollouts.inference.rendering import ConversationRenderer
from tests.unit.inference.conftest import CACHE

EOS = 2
Start = Callable[..., Engine]


@pytest.fixture(scope="module")
def model() -> Model:
    return Model(load_weights(CACHE))


@pytest.fixture
def start(model: Model) -> Iterator[Start]:
    engines: list[Engine] = []

    def begin(**limits: int) -> Engine:
        engine = Engine(model, **limits)
        engine.start()
        engines.append(engine)
        return engine

    yield begin
    for engine in engines:
        engine.stop()


def request(
    prompt: list[int], max_tokens: int, sampling: Sampling | None = None, seed: int = 0
) -> Sequence:
    return Sequence(
        prompt=np.asarray(prompt, dtype=np.int64),
        max_tokens=max_tokens,
        sampling=sampling or Sampling(),
        random=np.random.default_rng(seed),
        stop_ids=frozenset({EOS}),
    )


def finish(engine: Engine, *sequences: Sequence) -> None:
    for sequence in sequences:
        engine.submit(sequence)
    for sequence in sequences:
        assert sequence.done.wait(120)


def assert_logprobs_exact(model: Model, sequence: Sequence) -> None:
    """Compare with one fresh pass over prompt and answer, without any cache."""
    assert sequence.finish_reason in ("stop", "length")
    ids = [choice.token for choice in sequence.choices]
    logits = model.logits_everywhere([*sequence.prompt.tolist(), *ids])
    temperature = sequence.sampling.temperature or 1.0
    logprobs = log_softmax(logits[len(sequence.prompt) - 1 : -1] / np.float32(temperature))
    expected = logprobs[np.arange(len(ids)), ids]
    got = np.array([choice.logprob for choice in sequence.choices])
    assert np.abs(got - expected).max() < 1e-3


def test_the_model_is_the_real_one(model: Model, renderer: ConversationRenderer) -> None:
    folder_ids = renderer.render([{"role": "user", "content": "What is the capital of France?"}])
    france = model.logits_everywhere([*folder_ids, *[504, 3575, 282, 4649, 314]])
    assert renderer.decode([504, 3575, 282, 4649, 314]) == "The capital of France is"
    best = int(france[-1].argmax())
    assert renderer.decode([best]) == " Paris"
    assert log_softmax(france[-1])[best] > np.log(0.8)


def test_cached_weights_are_the_files_own(model: Model) -> None:
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(gguf_path()).tensors}
    tensor = tensors["blk.29.ffn_up.weight"]
    expected = gguf.dequantize(tensor.data, tensor.tensor_type)
    size = model.config.feed_forward
    assert np.array_equal(model.weights.layers[29].gate_up[size:], expected)


def test_logprobs_alone_equal_a_full_pass(
    model: Model, start: Start, renderer: ConversationRenderer
) -> None:
    prompt = renderer.render([{"role": "user", "content": "Name three rivers."}])
    sequence = request(prompt, 24, Sampling(temperature=0.8))

    finish(start(), sequence)

    assert_logprobs_exact(model, sequence)


def test_logprobs_in_a_mixed_batch_equal_a_full_pass(
    model: Model, start: Start, renderer: ConversationRenderer
) -> None:
    long = "The note is in the red box. " * 20
    sequences = [
        request(renderer.render([{"role": "user", "content": content}]), length, how, seed)
        for seed, (content, length, how) in enumerate(
            [
                ("Say hi.", 6, Sampling()),
                ("Count to five.", 20, Sampling(temperature=0.0)),
                (long + "What is where?", 10, Sampling(temperature=1.3, top_p=0.9)),
                (long + "Who knows?", 12, Sampling(temperature=0.6, top_k=20)),
                ("Say hi.", 16, Sampling(temperature=0.7, top_p=0.5, top_k=5)),
            ]
        )
    ]

    finish(start(), *sequences)

    for sequence in sequences:
        assert_logprobs_exact(model, sequence)


def test_a_next_turn_computes_only_what_is_new(
    model: Model, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    computed: list[int] = []
    forward = model.forward

    def counting(chunks: list[Chunk]) -> object:
        computed.append(sum(len(chunk.ids) for chunk in chunks))
        return forward(chunks)

    monkeypatch.setattr(model, "forward", counting)
    engine = start()
    first = request(list(range(100, 150)), 5)
    finish(engine, first)
    assert sum(computed) == 50 + len(first.choices) - 1
    computed.clear()

    answer = [choice.token for choice in first.choices]
    second = request([*range(100, 150), *answer, 300, 301, 302], 1)
    finish(engine, second)
    assert sum(computed) == 4
    computed.clear()

    same_again = request(list(range(100, 150)), 1)
    finish(engine, same_again)
    assert sum(computed) == 1

    monkeypatch.undo()
    for sequence in (first, second, same_again):
        assert_logprobs_exact(model, sequence)


def test_more_requests_than_the_batch_wait_and_all_end(model: Model, start: Start) -> None:
    engine = start(max_batch=2)
    sequences = [request([5, 6, 7 + number], 4, seed=number) for number in range(7)]
    widest: list[int] = []
    forward = model.forward

    def watching(chunks: list[Chunk]) -> object:
        widest.append(len(chunks))
        return forward(chunks)

    model.forward = watching  # type: ignore[assignment, method-assign]
    try:
        finish(engine, *sequences)
    finally:
        del model.forward

    assert max(widest) == 2
    assert all(sequence.finish_reason for sequence in sequences)
    assert engine.load == (0, 0)


def test_a_full_cache_makes_room_by_forgetting(model: Model, start: Start) -> None:
    engine = start(cache_tokens=1)  # raised to the context length
    assert engine.cache_tokens == model.config.context_length
    for number in range(3):
        big = request([5, 6, number + 20], 3)
        big.max_tokens = model.config.context_length - 3
        big.stop_ids = frozenset(range(model.config.vocabulary))
        finish(engine, big)
        assert big.finish_reason == "stop"


def test_a_cancelled_sequence_ends_and_frees_its_place(model: Model, start: Start) -> None:
    engine = start(max_batch=1)
    endless = request([5, 6, 7], 4000)
    endless.stop_ids = frozenset()
    waiting = request([5, 6, 8], 2)
    engine.submit(endless)
    engine.submit(waiting)

    endless.cancelled = True

    assert endless.done.wait(60)
    assert endless.failure == "cancelled"
    assert waiting.done.wait(60)
    assert waiting.failure is None
    assert engine.load == (0, 0)


@pytest.mark.parametrize(("stop_ids", "reason"), [({9}, "stop"), (set(), "length")])
def test_who_sees_the_last_token_sees_that_it_is_the_last(stop_ids: set[int], reason: str) -> None:
    seen: list[str | None] = []

    class Watched(list[Choice]):
        def append(self, choice: Choice) -> None:
            seen.append(sequence.finish_reason)
            super().append(choice)

    sequence = request([5], 2)
    sequence.stop_ids = frozenset(stop_ids)
    sequence.choices = Watched()

    sequence.accept(Choice(8, -1.0, 8, -1.0), "1")
    sequence.accept(Choice(9, -1.0, 9, -1.0), "2")

    assert seen == [None, reason]
    spans = [(span.version, span.start, span.end) for span in sequence.spans]
    assert spans == [("1", 0, 1), ("2", 1, 2)]


def test_a_stopped_engine_fails_what_it_holds_and_takes_no_more(model: Model) -> None:
    engine = Engine(model)
    engine.start()
    endless = request([5, 6, 7], 4000)
    endless.stop_ids = frozenset()
    engine.submit(endless)

    stopper = threading.Thread(target=engine.stop)
    stopper.start()
    stopper.join(60)

    assert endless.done.is_set()
    assert endless.failure == "the engine has stopped"
    with pytest.raises(EngineStoppedError):
        engine.submit(request([1], 1))


@pytest.mark.parametrize(
    ("sampling", "allowed"),
    [
        (Sampling(), {0, 1, 2, 3}),
        (Sampling(top_k=2), {0, 1}),
        (Sampling(top_p=0.6), {0, 1}),
        (Sampling(top_p=0.4), {0}),
        (Sampling(top_k=3, top_p=0.95), {0, 1, 2}),
        (Sampling(temperature=0.0), {0}),
    ],
)
def test_sampling_draws_what_it_may_in_the_right_share(
    sampling: Sampling, allowed: set[int]
) -> None:
    probabilities = np.array([0.5, 0.3, 0.15, 0.05], dtype=np.float32)
    random = np.random.default_rng(1)

    draws = [sample(np.log(probabilities), sampling, random) for _ in range(4000)]

    tokens = np.array([choice.token for choice in draws])
    assert set(tokens.tolist()) == allowed
    share = probabilities[sorted(allowed)] / probabilities[sorted(allowed)].sum()
    counted = np.array([(tokens == token).mean() for token in sorted(allowed)])
    assert np.abs(counted - share).max() < 0.04
    assert all(
        choice.logprob == pytest.approx(float(np.log(probabilities[choice.token])), abs=1e-5)
        for choice in draws[:50]
    )


def test_a_nucleus_wider_than_the_shortcut_is_whole() -> None:
    logits = np.zeros(5000, dtype=np.float32)
    random = np.random.default_rng(2)
    tokens = {sample(logits, Sampling(top_p=0.9), random).token for _ in range(3000)}
    # Equal weights: 0.9 keeps 4500 of them, far more than the shortcut looks at.
    assert len(tokens) > 1500
    assert tokens <= set(range(4500))


def test_an_unfinished_weight_cache_is_not_mistaken_for_a_whole_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies(source: Path, folder: Path) -> None:
        (folder / "weights.f32").write_bytes(b"half")
        raise OSError("disk full")

    monkeypatch.setattr("examples.tiny_server.weights._dequantise", dies)
    with pytest.raises(OSError, match="disk full"):
        load_weights(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_cache_copies_a_prefix_and_trims(model: Model) -> None:
    cache = KeyValueCache(model.config, 20)
    model.forward([Chunk(cache, np.arange(30, 40))])
    other = KeyValueCache(model.config, 20)
    other.copy_from(cache, 6)
    model.forward([Chunk(other, np.arange(36, 40))])
    assert np.abs(other.trimmed().keys - cache.trimmed().keys).max() < 1e-3
    assert other.ids.tolist() == cache.ids.tolist()
