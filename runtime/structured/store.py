"""Compiled grammars: made in a thread pool beside the steps, kept in a bounded cache.

A request is blocked (see `PendingGrammars`) until its grammar is compiled or refused; a refusal
ends the request when the runner asks for a matcher.
"""

from __future__ import annotations

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from weakref import WeakValueDictionary

from girih.kernels.base.errors import RequestError
from girih.runtime.records.sampling_params import SamplingParams
from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured import backends
from girih.runtime.structured.backend import Backend, Grammar, Matcher
from girih.runtime.structured.deep_threads import DeepThreads
from girih.runtime.structured.vocabulary import Vocabulary

COMPILE_THREADS = 2
MAX_GRAMMARS = 256


class GrammarStore:
    """Owns the grammars and the libraries of one engine; any thread may call it.

    Args:
        load_vocabulary: reads the vocabulary, when the first grammar is asked for.
        num_threads: threads that fill masks.
        max_grammars: grammars kept that no request holds; the least recently used one goes.
    """

    def __init__(
        self,
        load_vocabulary: Callable[[], Vocabulary],
        num_threads: int = 1,
        max_grammars: int = MAX_GRAMMARS,
    ) -> None:
        self._load_vocabulary = load_vocabulary
        self._num_threads = num_threads
        self._max_grammars = max_grammars
        self._lock = threading.Lock()
        self._setup_lock = threading.Lock()
        self._recent: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        # All there are: the recent ones, those being compiled, those that requests hold.
        self._held: WeakValueDictionary[StructuredOutput, Future[Grammar]] = WeakValueDictionary()
        self._backends: dict[str, Backend] = {}
        self._vocabulary: Vocabulary | None = None
        self._pool: DeepThreads | None = None
        self._became_ready = threading.Event()
        self._callback: Callable[[], None] = lambda: None

    def start(self, sampling: SamplingParams) -> Future[Grammar] | None:
        """See `PendingGrammars.start`."""
        return None if sampling.structured is None else self._future(sampling.structured)

    def wait(self, seconds: float) -> None:
        """See `PendingGrammars.wait`."""
        self._became_ready.wait(seconds)
        self._became_ready.clear()

    def on_ready(self, callback: Callable[[], None]) -> None:
        """See `PendingGrammars.on_ready`."""
        self._callback = callback

    def matcher(self, structured: StructuredOutput) -> Matcher:
        """Return a new matcher, waiting for the grammar if it has to be compiled first.

        Raises:
            RequestError: it could not be compiled, or the library failed.
        """
        grammar = self._future(structured).result()
        with as_request_error(structured):
            return grammar.matcher()

    def _future(self, structured: StructuredOutput) -> Future[Grammar]:
        key = backends.cache_key(structured)
        with self._lock:
            future = self._held.get(key)
            if future is None:
                if self._pool is None:
                    self._pool = DeepThreads(COMPILE_THREADS, "girih-grammar")
                future = self._held[key] = self._pool.submit(self._compile, key)
                future.add_done_callback(self._announce)
            self._recent[key] = future
            self._recent.move_to_end(key)
            while len(self._recent) > self._max_grammars:
                self._recent.popitem(last=False)
        return future

    def _announce(self, future: Future[Grammar]) -> None:
        self._became_ready.set()
        self._callback()

    def _compile(self, structured: StructuredOutput) -> Grammar:
        with as_request_error(structured):
            return self._backend(backends.choose(structured)).compile(structured)

    def _backend(self, name: str) -> Backend:
        with self._setup_lock:
            if name not in self._backends:
                if self._vocabulary is None:
                    self._vocabulary = self._load_vocabulary()
                module = backends.load(name)
                self._backends[name] = module.make_backend(self._vocabulary, self._num_threads)
            return self._backends[name]


@contextlib.contextmanager
def as_request_error(structured: StructuredOutput) -> Iterator[None]:
    """Turn whatever a grammar library raises into an error of the one request it works for."""
    try:
        yield
    except RequestError:
        raise
    except Exception as error:  # the library raises what it likes
        fault = f"{type(error).__name__}: {error}"[:300]
        raise structured.error(f"the grammar library failed: {fault}") from error
