"""An engine and threads: one steps, any may submit and cancel. Events order what happens."""

import threading
from collections.abc import Callable
from contextlib import contextmanager

import pytest
from small_gpt import make_gpt

from fastattn.generation import Engine, Sampling, generate_tokens

pytestmark = pytest.mark.usefixtures("one_thread", "on_torch")

GREEDY = Sampling(greedy=True)
LIMIT = 20.0  # seconds after which a test that hangs ends; none of them waits so long


class Held:
    """A model that waits within a forward pass until it is let go."""

    def __init__(self, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
        self.entered, self.go = threading.Event(), threading.Event()
        forward = engine.model.forward

        def held(*arguments, **options):
            self.entered.set()
            assert self.go.wait(LIMIT)
            return forward(*arguments, **options)

        monkeypatch.setattr(engine.model, "forward", held)


@contextmanager
def in_thread(name: str, work: Callable[[], object]):
    """Work in a thread of its own, done at the end of the block; what it raised is raised."""
    failed: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=guarded, name=name)
    thread.start()
    yield
    thread.join(LIMIT)
    assert not thread.is_alive()
    if failed:
        raise failed[0]


def books(engine: Engine) -> tuple:
    cache = engine.cache
    return (
        list(engine._schedule.running),
        list(engine._schedule.waiting),
        engine.preemptions,
        engine.shared_tokens,
        cache.free_pages,
        cache.rows,
        [cache.length(row) for row in cache.rows],
    )


@pytest.fixture
def engine() -> Engine:
    return Engine(make_gpt(), num_pages=12, page_size=4, max_batch=3)


def alone(engine: Engine, prompt: list[int], count: int) -> list[int]:
    return list(generate_tokens(engine.model, prompt, count, sampling=GREEDY))


def test_a_second_thread_that_steps_is_refused_and_changes_nothing(engine, monkeypatch):
    expected = alone(engine, [1, 2, 3], 5)
    request = engine.submit([1, 2, 3], 5, sampling=GREEDY)
    engine.step()
    held = Held(engine, monkeypatch)
    with in_thread("first", engine.step):
        assert held.entered.wait(LIMIT)
        before = books(engine)
        message = "thread 'first' is in a step, thread 'MainThread' asked for another"
        with pytest.raises(RuntimeError, match=message):
            engine.step()
        with pytest.raises(RuntimeError, match=message):
            next(engine.run())
        assert books(engine) == before
        held.go.set()
    # The next thread's turn.
    with in_thread("second", lambda: list(engine.run())):
        pass
    assert request.tokens == expected


def test_any_thread_submits_during_a_step(engine, monkeypatch):
    expected = alone(engine, [1, 2, 3], 5), alone(engine, [4, 5], 4)
    first = engine.submit([1, 2, 3], 5, sampling=GREEDY)
    held = Held(engine, monkeypatch)
    with in_thread("stepping", engine.step):
        assert held.entered.wait(LIMIT)
        second = engine.submit([4, 5], 4, sampling=GREEDY)
        assert engine.busy
        assert second.tokens == []
        held.go.set()
    for _ in engine.run():
        pass
    assert (first.tokens, second.tokens) == expected
    assert not engine.busy


@pytest.mark.parametrize("waits", [False, True])
def test_any_thread_cancels_during_a_step(waits, engine, monkeypatch):
    kept = engine.submit([1, 2, 3], 5, sampling=GREEDY)
    expected = alone(engine, [1, 2, 3], 5)
    gone = engine.submit([4, 5], 6, sampling=GREEDY)
    if not waits:
        engine.step()
    had = list(gone.tokens)
    held = Held(engine, monkeypatch)
    with in_thread("stepping", engine.step):
        assert held.entered.wait(LIMIT)
        engine.cancel(gone)
        assert gone.done
        held.go.set()
    assert len(engine.cache.rows) == 1
    for request, _ in engine.run():
        assert request is kept
    assert gone.done
    assert gone.tokens == had
    assert kept.tokens == expected
    engine.forget()
    assert engine.cache.rows == []


def test_a_step_within_a_step_is_refused(engine, monkeypatch):
    engine.submit([1, 2, 3], 5, sampling=GREEDY)
    monkeypatch.setattr(engine.model, "forward", lambda *arguments, **options: engine.step())
    with pytest.raises(RuntimeError, match="thread 'MainThread' is in a step"):
        engine.step()
