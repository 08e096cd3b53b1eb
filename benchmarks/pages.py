"""Write the tables of speed in benchmarks/README.md, and the demo in README.md, anew: `python3 -m benchmarks.pages`."""

from __future__ import annotations

if __name__ == "__main__":
    import support.interrupts  # noqa: F401  Ctrl-C while PyTorch loads: no traceback

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

from benchmarks.__main__ import ahead, disturbance
from support.blocks import write_blocks
from support.cli import CommandLine

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent


def standing() -> str:
    """The tables of the newest folders in benchmarks/results: all implementations, and our choices one by one."""
    folder, other = (sorted((HERE / "results").glob(f"*-{threads}"))[-1]
                     for threads in ("1-thread", "2-threads"))  # fmt: skip
    record, two = (json.loads((path / "summary.json").read_text(encoding="utf-8")) for path in (folder, other))
    ablation = json.loads((folder / "ablation.json").read_text(encoding="utf-8"))
    choices, shares = ablation["without"], ablation["first_token"]
    lengths, rows = record["lengths"], record["rows"]
    one, many, last = record["batches"][0], record["batches"][-1], lengths[-1]
    lines = [
        f"GPT-2 {record['model']}, float32 unless it says otherwise, {record['machine']}, {record['threads']} "
        f"thread{'s' * (record['threads'] > 1)}, {record['date']}; medians of {record['turns']} turns. In brackets how "
        "many times as fast as `gpt_kv_cache.py` in the same turn:",
        "",
        "| | " + " | ".join(f"tokens/s after {T:,}" for T in lengths)
        + f" | {many} texts, after {lengths[0]:,} | first token of {last:,} | {last * 9 // 10:,} of them cached "
        f"| bytes of cache for {last:,} | overhead |",
        "|---|" + "---|" * (len(lengths) + 5),
    ]
    for name, r in rows.items():
        cells = [f"{x['tokens_per_s']:.1f} ({x['decode_ratio']:.2f})" for x in (r[f"{one} x {T}"] for T in lengths)]
        batch, long = r[f"{many} x {lengths[0]}"], r[f"{one} x {last}"]
        cells.append(f"{batch['tokens_per_s']:.0f} ({batch['decode_ratio']:.2f})")
        cells.append(f"{long['first_ms']:,.0f} ms ({long['first_ratio']:.2f})")
        cells.append(f"{r['reuse_ms']:,.0f} ms" if "reuse_ms" in r else "-")
        lines.append(f"| {name} | {' | '.join(cells)} | {long['cache_bytes']:,} "
                     f"| {format(r['overhead_ms'], '.1f') + ' ms' if 'overhead_ms' in r else '-'} |")  # fmt: skip
    for threads, r in (("one thread", rows), ("two threads", two["rows"])):
        lines += ["", f"Where others are ahead with {threads}, by texts x tokens (times as fast):", ""]
        lines += [f"- {line}" for line in ahead(r) or ["nowhere"]]
    lines += ["", "The bytes of CTranslate2's cache are computed, not measured."] if "CTranslate2" in rows else []
    goes = ", ".join(f"{kind} {share:.0%}" for kind, share in shares.items())
    ours = [rows["gpt_kv_cache.py"][f"{one} x {T}"] for T in lengths]
    lines += [
        "",
        f"A token takes at least as long as reading the weights, in float32 {record['roofline_ms']:.1f} ms here "
        f"({record['gb_per_s']:.1f} GB/s): `gpt_kv_cache.py` reaches {min(x['of_roofline'] for x in ours):.2f} to "
        f"{max(x['of_roofline'] for x in ours):.2f} of that. Of its first token of {last:,} the matrix products alone "
        f"would take {ours[-1]['of_products']:.2f}; PyTorch's profiler has it: {goes}. Overhead is a step of a model "
        "of as many layers with hardly anything to compute.",
    ]
    lines.append(f"![Tokens per second by tokens in the cache]({folder.relative_to(HERE)}/decoding.png)")
    lines += [f"![Time to the first token by the prompt's length]({folder.relative_to(HERE)}/first_token.png)", ""]
    different = f", but for {', '.join(record['different'])}" if record["different"] else ""
    lines += [f"All implementations that compute in float32 with full attention write the same tokens{different}.", ""]
    failed = [why for why in record["absent"].values() if "failed" in why]
    lines += [f"Not measured: {'; '.join(failed)}.", ""] if failed else []
    lines += [f"With two threads ([{two['date']}]({other.relative_to(HERE)}/summary.json)) reading the weights takes "
              f"{two['roofline_ms']:.1f} ms:", "",
              "| | " + " | ".join(f"tokens/s after {T:,}" for T in lengths) + f" | first token of {last:,} |",
              "|---|" + "---|" * (len(lengths) + 1)]  # fmt: skip
    for name, r in two["rows"].items():
        cells = [f"{x['tokens_per_s']:.1f} ({x['decode_ratio']:.2f})" for x in (r[f"{one} x {T}"] for T in lengths)]
        long = r[f"{one} x {last}"]
        lines.append(f"| {name} | {' | '.join(cells)} | {long['first_ms']:,.0f} ms ({long['first_ratio']:.2f}) |")
    lines.append("")
    for r in (record, two):
        if r["disturbed"]:
            lines += [f"The machine was disturbed while {r['threads']} thread{'s' * (r['threads'] > 1)} ran: "
                      f"{disturbance(r)}.", ""]  # fmt: skip
    lines += ["How many times as long `gpt_kv_cache.py` takes without each of its choices (in brackets the least and "
              "the most of all turns):", "",
              "| without | " + " | ".join(f"a token after {T:,}" for T in lengths) + " | "
              + " | ".join(f"first token of {T:,}" for T in lengths) + " |",
              "|---|" + "---|" * 2 * len(lengths)]  # fmt: skip
    for name, r in choices.items():
        cells = ["{:.2f} ({:.2f}-{:.2f})".format(*r[str(T)][what]) for what in ("decode", "first") for T in lengths]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join(lines)


def demo() -> str:
    """What the README's first command prints."""
    command = [sys.executable, "gpt_kv_cache.py", "--compare"]
    printed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return f"```text\n$ python3 gpt_kv_cache.py --compare\n{printed.rstrip()}\n```"


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    ROOT / "README.md": {"demo": demo},
    ROOT / "benchmarks" / "README.md": {"standing": standing},
}


def main(argv: list[str] | None = None) -> None:
    with CommandLine(__doc__, "python3 -m benchmarks.pages").parse(argv):
        write_blocks(PAGES)


if __name__ == "__main__":
    main()
