"""Every claim of the five sources in its own words, beside our finding: `python3 -m studies.claims`.

A figure comes from a study's record or from arithmetic in the study. A threshold is the source's unless it
is called ours. Claims about time are judged at the source's geometry, at 124 million parameters or by counting
work; claims about quality with a trained model. Each study judges its own source: claims() in its file.
"""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

from studies import (
    article,
    bounding,
    lengths,
    pretraining,
    projection_report,
    recall,
    recycling_report,
    refreshing_report,
)
from studies.protocol import Claim, benchmark, claim_tables, recorded, recorded_or_none
from support.cli import CommandLine
from support.tables import page


def every_claim() -> dict[str, list[Claim]]:
    """Return the claims of every source by the recorded results, a list a source."""
    bench = benchmark()
    window, speed = (recorded_or_none("article", f"{name}.json") for name in ("window", "summary"))
    return {
        "The KV cache": article.claims(window, speed, bench),
        "BCT": [*bounding.claims(recorded("bounding")), *recall.claims(recorded("recall")),
                *pretraining.claims(recorded("pretraining")),
                *lengths.claims(recorded("lengths"))],
        "KV recycling": recycling_report.claims(recorded("recycling"), recorded_or_none("recycling", "geometry.json"),
                                                recorded("recycling", "law.json")),
        "CP-KVP": projection_report.claims(recorded("projection")),
        "OverFill and KV refresh": refreshing_report.claims(recorded("refreshing"),
                                                            recorded_or_none("refreshing", "geometry.json"), bench),
    }  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    with CommandLine(__doc__, "python3 -m studies.claims").parse(argv):
        for name, claims in every_claim().items():
            print(f"=== {name}\n\n{page(claim_tables(claims))}\n")


if __name__ == "__main__":
    main()
