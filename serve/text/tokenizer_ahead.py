"""The tokenizer of a model whose engine is being built, here or in a process, loaded beside it.

Reading a vocabulary takes a quarter of a second, in which Python is free for other work.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from girih.kernels.base.progress import Progress, ProgressEvent
from girih.serve.text.tokenizer import Tokenizer, load_tokenizer


class TokenizerAhead:
    """Begins to load when the build has found the model.

    Args:
        progress: is passed on what the build tells.
    """

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._path: Path | None = None
        self._loading: Future[Tokenizer] | None = None

    def on_progress(self, event: ProgressEvent) -> None:
        """Report progress of the build."""
        if event.model_path and self._path is None:
            self._path = Path(event.model_path)
            pool = ThreadPoolExecutor(1, thread_name_prefix="girih-tokenizer")
            self._loading = pool.submit(load_tokenizer, self._path)
            pool.shutdown(wait=False)
        self._progress(event)

    def result(self, path: Path) -> Tokenizer:
        """The tokenizer of the model at `path`.

        Raises:
            SourceError: as `load_tokenizer`.
        """
        if self._loading is None or self._path != path:
            return load_tokenizer(path)
        return self._loading.result()
