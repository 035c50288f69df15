"""The result of a self-check: one record and one text for all levels."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from girih.kernels.base.errors import GirihError


@dataclass(frozen=True)
class VerifyResult:
    """The outcome of a differential test.

    Attributes:
        level: "rows", "passes", "tiles", "canary" or "model" (`passes/verify/README.md`).
        compared: what, and with what.
        error: the worst difference.
        bound: the largest one that rounding explains.
        seconds: time it took.
        first_difference: where the first difference beyond the bound is; "" when there is none.
        skipped: why nothing was compared; "" when something was.
    """

    level: str
    compared: str
    error: float = 0.0
    bound: float = 0.0
    seconds: float = 0.0
    first_difference: str = ""
    skipped: str = ""

    @property
    def passed(self) -> bool:
        """No difference beyond the bound."""
        return not self.first_difference

    def as_text(self) -> str:
        """A line for people."""
        if self.skipped:
            return f"{self.level} not verified: {self.skipped}"
        verdict = "verified" if self.passed else "FAILED"
        text = (
            f"{self.level} {verdict}: {self.compared}; worst difference {self.error:.1e}, "
            f"allowed {self.bound:.1e} ({self.seconds:.2f} s)"
        )
        return text if self.passed else f"{text}; first difference: {self.first_difference}"

    def require(self, error: type[GirihError], advice: str) -> VerifyResult:
        """Return the result, or raise `error` with its text and what to do when it failed."""
        if self.passed:
            return self
        raise error(f"{self.as_text()}. {advice}")


def worst_of(level: str, compared: str, results: Sequence[VerifyResult]) -> VerifyResult:
    """Several results as one: the first that failed or the one nearest its bound; all seconds."""
    if not results:
        return VerifyResult(level, compared)
    failed = [result for result in results if not result.passed]
    worst = (
        failed[0] if failed else max(results, key=lambda r: r.error / r.bound if r.bound else 0.0)
    )
    return replace(worst, level=level, compared=compared, seconds=sum(r.seconds for r in results))


def verify_report(results: Iterable[VerifyResult]) -> str:
    """One line per result."""
    return "".join(f"{result.as_text()}\n" for result in results)
