"""Compiled grammars: made in a thread pool beside the steps, kept in a bounded cache.

A request is blocked (see `Gate`) until its grammar is there, good or bad; a bad one ends the
request when the runner asks for a matcher.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from girih.runtime.sampling_params import SamplingParams
from girih.runtime.structured import backends
from girih.runtime.structured.backend import Backend, Grammar, Matcher
from girih.runtime.structured.output import StructuredOutput
from girih.runtime.structured.vocabulary import Vocabulary

COMPILE_THREADS = 2
MAX_GRAMMARS = 256


class GrammarStore:
    """Owns the grammars and the libraries of one engine; any thread may call it.

    Args:
        load_vocabulary: reads the vocabulary, when the first grammar is asked for.
        num_threads: threads that fill masks.
        max_grammars: grammars kept; the least recently used one goes.
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
        self._grammars: OrderedDict[StructuredOutput, Future[Grammar]] = OrderedDict()
        self._backends: dict[str, Backend] = {}
        self._vocabulary: Vocabulary | None = None
        self._pool: ThreadPoolExecutor | None = None
        self._became_ready = threading.Event()
        self._callback: Callable[[], None] = lambda: None

    def must_wait(self, sampling: SamplingParams) -> bool:
        """See `Gate.must_wait`."""
        structured = sampling.structured
        return structured is not None and not self._future(structured).done()

    def wait(self, seconds: float) -> None:
        """See `Gate.wait`."""
        self._became_ready.wait(seconds)
        self._became_ready.clear()

    def on_ready(self, callback: Callable[[], None]) -> None:
        """See `Gate.on_ready`."""
        self._callback = callback

    def matcher(self, structured: StructuredOutput) -> Matcher:
        """Return a new matcher, waiting for the grammar if it has to be compiled first.

        Raises:
            RequestError: it could not be compiled.
        """
        return self._future(structured).result().matcher()

    def _future(self, structured: StructuredOutput) -> Future[Grammar]:
        key = backends.cache_key(structured)
        with self._lock:
            future = self._grammars.get(key)
            if future is None:
                if self._pool is None:
                    self._pool = ThreadPoolExecutor(COMPILE_THREADS, "girih-grammar")
                future = self._grammars[key] = self._pool.submit(self._compile, key)
                future.add_done_callback(self._announce)
                while len(self._grammars) > self._max_grammars:
                    self._grammars.popitem(last=False)
            self._grammars.move_to_end(key)
        return future

    def _announce(self, future: Future[Grammar]) -> None:
        self._became_ready.set()
        self._callback()

    def _compile(self, structured: StructuredOutput) -> Grammar:
        return self._backend(backends.choose(structured)).compile(structured)

    def _backend(self, name: str) -> Backend:
        with self._setup_lock:
            if name not in self._backends:
                if self._vocabulary is None:
                    self._vocabulary = self._load_vocabulary()
                module = backends.load(name)
                self._backends[name] = module.make_backend(self._vocabulary, self._num_threads)
            return self._backends[name]
