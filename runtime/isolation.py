"""One request's fault is its own: the one place that decides whom an exception fails.

    each(items, work, tell)      one item at a time: what raises is told, the others go on
    RowFailures.each(...)        the same for requests of a batch; those that failed are left out
    RowFailures.split(...)       work on many rows at once: where it raises, on each half of them,
                                 so that in the end only requests that fail alone have failed

`EngineError` says that the core cannot go on, so it passes through; so does what is no `Exception`.
No torch.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from girih.kernels.base.errors import EngineError, GirihError

logger = logging.getLogger(__name__)

T = TypeVar("T")


def describe(error: BaseException) -> str:
    """Describe an error for clients, as text that can always be encoded."""
    text = str(error) if isinstance(error, GirihError) else f"{type(error).__name__}: {error}"
    return text.encode(errors="backslashreplace").decode()


def each(
    items: Iterable[T], work: Callable[[T], object], tell: Callable[[T, Exception], object]
) -> None:
    """Do `work` for every item; `tell` takes the items that raised, with what they raised."""
    for item in items:
        try:
            work(item)
        except EngineError:
            raise
        except Exception as error:
            tell(item, error)


class RowFailures:
    """Requests of a batch that failed on their own; steps leave them out until they are gone."""

    def __init__(self) -> None:
        self._errors: dict[str, Exception] = {}

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._errors

    def forget(self, request_ids: Iterable[str]) -> None:
        """These requests are gone; what has their ids from now on is new."""
        if self._errors:
            for request_id in request_ids:
                self._errors.pop(request_id, None)

    def spared(self, request_ids: Iterable[str]) -> list[str]:
        """Those that have not failed, in the same order."""
        return [request_id for request_id in request_ids if request_id not in self._errors]

    def texts(self, request_ids: Iterable[str]) -> dict[str, str]:
        """Those that have failed, and why."""
        if not self._errors:
            return {}
        return {i: describe(self._errors[i]) for i in request_ids if i in self._errors}

    def cause(self, request_id: str) -> Exception:
        """Return the exception of a request that has failed."""
        return self._errors[request_id]

    def each(self, items: Iterable[tuple[str, T]], work: Callable[[T], object]) -> None:
        """Do `work` for each (request id, item) whose request has not failed."""
        for request_id, item in items:
            if request_id not in self._errors:
                try:
                    work(item)
                except EngineError:
                    raise
                except Exception as error:
                    self._note(request_id, error)

    def split(
        self, request_ids: Sequence[str], work: Callable[[slice], T]
    ) -> list[tuple[slice, T]]:
        """Do `work` for a run of requests that may be done in parts.

        Args:
            request_ids: none of them has failed.
            work: is given a part of them; what it did of a part when it raises is done again.

        Returns:
            The parts that were done, in order, with what `work` returned: one part as a rule.
        """
        pending = [slice(0, len(request_ids))] if request_ids else []
        done = []
        while pending:
            part = pending.pop()
            middle = (part.start + part.stop) // 2
            try:
                done.append((part, work(part)))
            except EngineError:
                raise
            except Exception as error:
                if middle == part.start:
                    self._note(request_ids[middle], error)
                    continue
                logger.warning(
                    "%d requests failed together, each half is tried alone: %s",
                    part.stop - part.start,
                    describe(error),
                )
                pending += [slice(middle, part.stop), slice(part.start, middle)]
        return done

    def _note(self, request_id: str, error: Exception) -> None:
        logger.error("request %s failed", request_id, exc_info=error)
        self._errors[request_id] = error
