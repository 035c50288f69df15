"""Reports of passes: one record each, and the table people read."""

from __future__ import annotations

from dataclasses import dataclass

from girih.graph.ir.verify_result import VerifyResult


@dataclass(frozen=True)
class PassRecord:
    """The effects of one pass.

    Attributes:
        name: the pass.
        enabled: False when it was switched off or stands after `opt.stop_after`.
        rewrites: number it reported.
        nodes_before, nodes_after: size of the graph.
        milliseconds: time in the pass itself.
        check_milliseconds: time in the runner's checks of it.
        notes: candidates it declined, with reasons.
        missed: why it ought to have found something, when it found nothing.
        verified: values after it against those before it (`opt.verify`).
    """

    name: str
    enabled: bool
    rewrites: int = 0
    nodes_before: int = 0
    nodes_after: int = 0
    milliseconds: float = 0.0
    check_milliseconds: float = 0.0
    notes: tuple[str, ...] = ()
    missed: str | None = None
    verified: VerifyResult | None = None

    def remark(self) -> str:
        """Remarks on it: off, nothing found, refusals, verified."""
        if not self.enabled:
            return "off"
        parts = []
        if self.missed:
            parts.append(f"FOUND NOTHING although {self.missed}")
        if self.notes:
            more = f" (and {len(self.notes) - 1} more)" if len(self.notes) > 1 else ""
            parts.append(f"refused {self.notes[0]}{more}")
        if self.verified is not None:
            parts.append(f"verified, worst difference {self.verified.error:.1e}")
        return "; ".join(parts)


def pass_table(records: tuple[PassRecord, ...]) -> str:
    """One line per pass: rewrites, nodes, time of pass and checks, remarks."""
    lines = [
        f"{'pass':24s} {'rewrites':>8s}  {'nodes':>13s}  {'ms':>7s}  {'check ms':>8s}  remarks"
    ]
    for r in records:
        nodes = f"{r.nodes_before} → {r.nodes_after}" if r.enabled else ""
        lines.append(
            f"{r.name:24s} {r.rewrites:8d}  {nodes:>13s}  {r.milliseconds:7.1f}  "
            f"{r.check_milliseconds:8.1f}  {r.remark()}".rstrip()
        )
    return "\n".join(lines) + "\n"
