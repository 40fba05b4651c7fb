"""An audit as text for a terminal."""

import textwrap
from collections.abc import Sequence

from redraft.vocab.audit import Audit
from redraft.vocab.mapping import Mapping

WIDTH = 100


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = []
    for name, *cells in rows:
        fitted = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
        lines.append("  ".join([name.ljust(widths[0]), *fitted]).rstrip())
    return "\n".join(lines)


def describe(audit: Audit, a: str, b: str) -> str:
    """Two mappings side by side, what they share, and the verdict with the recommended `init`."""
    sides = [
        ("", "A", "B"),
        ("slots", f"{audit.donor_slots:,}", f"{audit.new_slots:,}"),
        ("order", audit.donor_order, audit.new_order),
        ("highest id", f"{audit.donor_last:,}", f"{audit.new_last:,}"),
        ("ids only here", f"{audit.donor_only:,}", f"{audit.new_only:,}"),
        *(
            (f"coverage of {split} tokens", f"{share['donor']:.2%}", f"{share['new']:.2%}")
            for split, share in audit.coverage.items()
        ),
        *(
            (f"{kind} tokens, of {found['all']:,}", f"{found['donor']:,}", f"{found['new']:,}")
            for kind, found in audit.tokens.items()
        ),
    ]
    neither = [(f"{kind} tokens in neither", f"{found['neither']:,}") for kind, found in audit.tokens.items()]
    both = [
        ("ids in both", f"{audit.shared:,}"),
        ("same slot", f"{audit.same_slot:,}"),
        ("slots that differ", f"{audit.differing_slots:,}"),
        ("moved", f"{audit.moved:,}"),
        ("first slot that differs", "none" if audit.first_divergence is None else f"{audit.first_divergence:,}"),
        ("moved by, mean", f"{audit.drift_mean:.1f} slots"),
        ("moved by, median", f"{audit.drift_median:.1f} slots"),
        ("moved by, 95 % at most", f"{audit.drift_p95:.1f} slots"),
        ("moved by, at most", f"{audit.drift_max:,} slots"),
        *neither,
    ]
    verdict = textwrap.fill(f"{audit.kind}: {audit.verdict}", WIDTH)
    init = f"recommended init: {audit.recommended_init}"
    return "\n\n".join([f"A  {a}\nB  {b}", _table(sides), _table(both), verdict, init])


def describe_one(mapping: Mapping, audit: Audit, a: str) -> str:
    """One mapping by itself."""
    rows = [
        ("slots", f"{len(mapping):,}"),
        ("target vocabulary", f"{mapping.vocab_size:,}"),
        ("kind", mapping.kind),
        ("order", mapping.order),
        ("highest id", f"{audit.donor_last:,}"),
        ("hash", mapping.hash[:16]),
        *((f"coverage of {split} tokens", f"{share['donor']:.2%}") for split, share in audit.coverage.items()),
        *((f"{kind} tokens, of {found['all']:,}", f"{found['donor']:,}") for kind, found in audit.tokens.items()),
    ]
    return f"A  {a}\n\n{_table(rows)}"
