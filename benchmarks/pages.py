"""The tables and sentences of speed that pages show, made of the newest records: `chapters.builder` fills them in."""

from collections.abc import Callable
from pathlib import Path

from benchmarks import batches, scale
from benchmarks.report import BASE, decoding_table, draw_figures, slowdowns_table, speed_report
from benchmarks.runners import LLAMA
from benchmarks.words import Figures, conditions, disturbed, shares, times_as_fast
from support.files import read_json
from support.tables import page, table

HERE = Path(__file__).resolve().parent


def newest_record(pattern: str) -> Figures:
    """Return the newest record among the files that match a pattern."""
    return read_json(sorted((HERE / "results").glob(pattern))[-1])


def both_processors() -> dict[str, Figures]:
    """Return the records of the two processors."""
    return {
        "Intel": newest_record("*-1-thread/summary.json"),
        "AMD": newest_record("*-1-thread-amd/summary.json"),
    }


def processors_conditions() -> str:
    """Return a list of the conditions on the two processors."""
    return "\n".join(f"- {conditions(record)}." for record in both_processors().values())


def processors_table() -> str:
    """Return the headline figures on two processors, side by side."""
    records = both_processors()
    header = [""]
    rows = {name: [name] for name in records["AMD"]["rows"]}
    for processor, record in records.items():
        columns = ("tokens/s after 128", "after 1,000", "first of 1,000, ms")
        header += [f"{processor}: {column}" for column in columns]
        for name, cells in rows.items():
            short_prompt = record["rows"][name]["1 x 128"]
            long_prompt = record["rows"][name]["1 x 1000"]
            cells += [f"{short_prompt['tokens_per_s']:.1f}", f"{long_prompt['tokens_per_s']:.1f}"]
            cells.append(f"{long_prompt['first_ms']:,.0f}")
    return table(header, [*rows.values()], markdown=True)


def processors_difference() -> str:
    """Return how the processors differ in the first token after 1,000 and in decoding with int8 after 128."""
    ratios = {}
    for processor, record in both_processors().items():
        ours, theirs = (record["rows"][name] for name in (BASE, "CTranslate2"))
        ours_int8, theirs_int8 = (record["rows"][f"{name}, int8"] for name in (BASE, "CTranslate2"))
        ratios[processor] = (
            theirs["1 x 1000"]["first_ms"] / ours["1 x 1000"]["first_ms"],
            ours_int8["1 x 128"]["tokens_per_s"] / theirs_int8["1 x 128"]["tokens_per_s"],
        )
    (intel_first, intel_int8), (amd_first, amd_int8) = ratios["Intel"], ratios["AMD"]
    return (
        "On the AMD, PyTorch's products (by MKL) take AVX2, and CTranslate2's first token comes "
        f"{1 / amd_first:.1f} times as soon as ours; on the Intel ours comes {intel_first:.2f} times as soon as "
        "its. In int8 it is the other way round: after 128 tokens CTranslate2 writes "
        f"{1 / intel_int8:.2f} times as fast as we do on the Intel, and we write {amd_int8:.2f} times as fast on "
        "the AMD."
    )


def speed_table(pattern: str) -> str:
    """Return the conditions of the newest record among the files that match a pattern, and its table."""
    record = newest_record(pattern)
    parts = [f"{conditions(record)}:", decoding_table(record), *disturbed(record, "this")]
    return page(parts, markdown=True)


def standing_tables() -> str:
    """Return the tables of the newest records with one and two threads: all implementations, and
    our choices one by one."""
    one_thread = newest_record("*-1-thread/summary.json")
    ablation = newest_record("*-1-thread/ablation.json")
    slowdowns = slowdowns_table(ablation["without"], one_thread["lengths"])
    parts = [
        speed_report(one_thread, markdown=True),
        speed_table("*-2-threads/summary.json"),
        *disturbed(one_thread, "one thread"),
        f"How many times as long `{BASE}` takes without each of its choices (in brackets the minimum and the "
        "maximum over the turns). PyTorch's profiler divides its first token of 1,000 into "
        f"{shares(ablation['first_token'])}.",
        slowdowns,
    ]
    return page(parts, markdown=True)


def requests_tables(pattern: str = "*/requests.json") -> str:
    """Return the tables of many texts at once, of the newest record among the files that match a pattern."""
    return batches.requests_report(newest_record(pattern)["counts"], markdown=True)


def half_text(pattern: str, base: str) -> str:
    """Return what the newest record among the files that match a pattern says of half precision."""
    record = newest_record(pattern)
    dtypes = []
    for dtype in ("bfloat16", "float16"):
        name = f"{base}, {dtype}"
        if name in record["rows"]:
            beside_float32 = times_as_fast(record, name, base)
            beside_theirs = times_as_fast(record, name, f"transformers, {dtype}")
            dtypes.append(
                f"in {dtype} {beside_float32} times as fast as in float32, and "
                f"{beside_theirs} times as fast as transformers in {dtype}"
            )
    return f"After 128 and after 1,000 tokens, `{base}` writes {'; '.join(dtypes)}."


def llama_cpp_text() -> str:
    """Return how fast llama.cpp is beside our Llama."""
    record = newest_record("*/llama.json")
    ratios = [
        times_as_fast(record, theirs, ours)
        for theirs, ours in (
            ("llama.cpp, F32", LLAMA),
            ("llama.cpp, F16", f"{LLAMA}, float16"),
            ("llama.cpp, Q8_0", f"{LLAMA}, int8"),
        )
    ]
    return (
        f"llama.cpp writes {ratios[0]} times as fast as `{LLAMA}` in float32, {ratios[1]} times in float16, and "
        f"in 8 bits (Q8_0, beside our int8) {ratios[2]} times."
    )


def gpu_tables() -> str:
    """Return the tables of the newest records of a GPU: a Llama, a GPT-2, and many texts at once."""
    parts = [
        speed_table("gpu/*/llama.json"),
        speed_table("gpu/*/summary.json"),
        requests_tables("gpu/*/requests.json"),
    ]
    return page(parts)


def gpu_conditions_text() -> str:
    """Return which GPU it was."""
    record = newest_record("gpu/*/llama.json")
    return f"{record['machine']}, with PyTorch {record['torch']}"


def gpu_steps_text() -> str:
    """Return how long a step takes a GPU, beside the time of reading the weights."""
    record = newest_record("gpu/*/summary.json")
    cells = record["rows"][BASE]
    return (
        f"Reading the weights of {record['model']} takes this GPU {record['roofline_ms']:.1f} ms; a step after 128 "
        f"tokens takes `{BASE}` {cells['1 x 128']['step_ms']:.1f} ms for one text and "
        f"{cells['8 x 128']['step_ms']:.1f} ms for 8."
    )


def gpu_half_text() -> str:
    """Return what bfloat16 gains on a GPU."""
    row = newest_record("gpu/*/llama.json")["rows"][f"{LLAMA}, bfloat16"]
    short_prompt, long_prompt = row["1 x 128"], row["1 x 1000"]
    return (
        f"in bfloat16 `{LLAMA}` writes {short_prompt['decode_ratio']:.2f} and {long_prompt['decode_ratio']:.2f} "
        "times as fast as in float32 after 128 and after 1,000 tokens, and its first token comes "
        f"{short_prompt['first_ratio']:.1f} and {long_prompt['first_ratio']:.1f} times as soon."
    )


def gpu_bytes_text() -> str:
    """Return how many bytes our blocks hold beside a padded batch."""
    texts = []
    for count, record in newest_record("gpu/*/requests.json")["counts"].items():
        rows = record["rows"]
        share = rows[batches.PAGED]["held"] / rows[batches.PADDED]["held"]
        texts.append(f"{share:.2f} of the batch's for {count} texts")
    return f"{', '.join(texts)}."


def cudnn_text() -> str:
    """Return how long a token takes with cuDNN's attention and without."""
    record = newest_record("gpu/*/cudnn.json")
    times = [
        f"{ms['with']:.0f} ms a token in {dtype} with cuDNN and {ms['without']:.0f} without"
        for dtype, ms in record["step_ms"].items()
    ]
    float32 = record["float32_ms"]
    return (
        f"{record['model']}, {record['machine']}, {record['date']}, {record['new_tokens']} tokens after "
        f"{record['prompt_tokens']}: {', '.join(times)}; in float32, which cuDNN doesn't take, "
        f"{min(float32):.0f} to {max(float32):.0f}."
    )


def draw_all_figures() -> None:
    """Draw the figures of all records."""
    for path in (HERE / "results").glob("*/summary.json"):
        draw_figures(read_json(path), path.parent)


FUNCTIONS: dict[str, Callable[..., object]] = {  # what the marks of pages may call
    "conditions": processors_conditions,
    "cudnn": cudnn_text,
    "difference": processors_difference,
    "fleet": lambda: table(*scale.fleet_table()[:2], markdown=True),
    "gpt2_in_half": lambda: speed_table("*-half-amd/summary.json"),
    "gpu": gpu_tables,
    "gpu_bytes": gpu_bytes_text,
    "gpu_conditions": gpu_conditions_text,
    "gpu_half": gpu_half_text,
    "gpu_steps": gpu_steps_text,
    "half": half_text,
    "llama": lambda: speed_table("*/llama.json"),
    "llama_cpp": llama_cpp_text,
    "processors": processors_table,
    "requests": requests_tables,
    "scale": lambda: scale.predict(newest_record("*-1-thread/summary.json"), markdown=True),
    "standing": standing_tables,
}
