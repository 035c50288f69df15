"""Interface of grammar libraries; any number of them work side by side.

StructuredOutput ─check─▶ (refused)                     before the request is sent
                 ─compile─▶ Grammar ─▶ Matcher          one matcher per request
Backend.fill: the masks of many matchers at once        one row per matcher and step
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from girih.runtime.records.structured_output import StructuredOutput
from girih.runtime.structured.vocabulary import Vocabulary

Mask = npt.NDArray[np.int32]
"""[rows, ceil(V / 32)]: bit i of word j says whether token 32 * j + i may follow."""


class Matcher(Protocol):
    """Follows the output of one request; its state is a function of the tokens so far."""

    backend: Backend

    @property
    def is_stopped(self) -> bool:
        """True if the output is complete (its end token came)."""
        ...

    @property
    def error(self) -> str:
        """Why it cannot go on; empty while it can."""
        ...

    def accept(self, token_id: int) -> bool:
        """Take the next token; False when the grammar does not allow it."""
        ...


class Grammar(Protocol):
    """A compiled grammar."""

    def matcher(self) -> Matcher:
        """A matcher at the start of an output."""
        ...


class Backend(Protocol):
    """A grammar library bound to one vocabulary; used from several threads."""

    def compile(self, structured: StructuredOutput) -> Grammar:
        """Compile a grammar.

        Raises:
            RequestError: it cannot be done.
        """
        ...

    def fill(self, matchers: Sequence[Matcher], rows: Sequence[int], mask: Mask) -> None:
        """Write the tokens each matcher allows next to its row of `mask`, in parallel."""
        ...


class BackendModule(Protocol):
    """A module `girih.runtime.structured.NAME_backend`."""

    def why_not(self, structured: StructuredOutput) -> str | None:
        """Why the library cannot do this kind of output; None when it can."""
        ...

    def check(self, structured: StructuredOutput) -> None:
        """Raise `RequestError` with the place of the first fault (no vocabulary is needed)."""
        ...

    def make_backend(self, vocabulary: Vocabulary, num_threads: int) -> Backend:
        """Bind the library to a vocabulary."""
        ...
