"""The front page's parts: its demo, its tables of files and methods, and how to open the live page.

`python3 gpt_kv_cache.py --compare > chapters/builder/demo.txt` records the demo anew.
"""

import re
import textwrap
import tomllib

import examine
from chapters.builder.blocks import ROOT, find_hunks, project_text
from support.files import read_text

LIVE_PAGE = "chapters/live/index.html"
LECTURES = """\
| file | what it shows | lines | chapter |
| --- | --- | --- | --- |
| [`gpt_baseline.py`](gpt_baseline.py) | GPT-2, which computes the whole text at every step | \
{{ line_count("gpt_baseline") }} | [1](chapters/01_gpt2/README.md) |
| [`gpt_kv_cache.py`](gpt_kv_cache.py) | the same with a KV cache | \
{{ added("gpt_baseline", "gpt_kv_cache") }} | [2](chapters/02_kv_cache/README.md) |
| [`gpt_bounded_cache.py`](gpt_bounded_cache.py) | caches that don't grow: a sliding window, and the Bounded-Cache \
Transformer (BCT) | {{ added("gpt_kv_cache", "gpt_bounded_cache") }} | [3](chapters/03_bounded/README.md), \
[4](chapters/04_bct/README.md) |
| [`llama_kv_cache.py`](llama_kv_cache.py) | today's models: SmolLM2, Llama 3 and Qwen3, with `--chat` | \
{{ added("gpt_kv_cache", "llama_kv_cache") }} | \
[11](chapters/11_today/README.md) |
| [`hybrid_kv_cache.py`](hybrid_kv_cache.py) | layers that keep a window (Gemma 3), a latent or a state | \
{{ line_count("hybrid_kv_cache") }} | [12](chapters/12_layers/README.md) |"""
METHODS = """\
| file | what it does | the text | one figure |
| --- | --- | --- | --- |
| [`recycle.py`](recycle.py) | reuses the cache of an earlier prompt that begins alike | exact | \
a stored text of 1,200 tokens: first token after \
{{ format(figure("recycling", "recycled", "first", model="smollm2", order="chat").value, ",.0f") }}, not \
{{ format(figure("recycling", "cold", "first", model="smollm2", order="chat").value, ",.0f") }} ms |
| [`paged.py`](paged.py) | writes many texts at once, in shared blocks of cache | exact | 16 texts: \
{{ paged_gain(16) }} \
times as fast as one by one |
| [`speculate.py`](speculate.py) | drafts several tokens, which the model checks in one pass | exact | \
{{ rows("speculation").find("text:8", "taken", model="smollm2", mode="greedy", task="rewrite")["n"] }} \
texts rewritten with drafts copied from them: \
{{ format(figure("speculation", "text:8", "taken", model="smollm2", mode="greedy", task="rewrite"), "±") }} of the time, \
{{ figure("speculation", "text:8", "passes", model="smollm2", mode="greedy", task="rewrite") }} passes per 1,000 tokens |
| [`overfill.py`](overfill.py) | lets a large model read, and a small one write | approximate | \
no gain shown: perplexity of \
{{ figure("refreshing", "none", "perplexity", model="smollm2", trained="int5").values | length }} sampled texts: SmolLM2 \
{{ figure("refreshing", "teacher", "perplexity", model="smollm2", trained="int5") }}, its copy in 5 bits \
{{ figure("refreshing", "student", "perplexity", model="smollm2", trained="int5") }}, with SmolLM2's cache \
{{ figure("refreshing", "none", "perplexity", model="smollm2", trained="int5") }}, \
{{ format(change("refreshing", "none", "student", "perplexity", model="smollm2", trained="int5"), "±") }} |
| [`projector.py`](projector.py) | guesses first tokens from a given, similar prompt | approximate | \
{{ rows("projection").find("written", "kl", on="given")["n"] }} countries' capitals: KL(exact∥guess) \
{{ figure("projection", "written", "kl", on="given") }} nats, the similar prompt's prediction \
{{ figure("projection", "neighbour", "kl") }}; limit 0.05 |
| [`compress.py`](compress.py) | stores the cache in 8, 4 or 2 bits, or drops tokens | approximate | 4 bits: \
{{ figure("compression", "bits:4", "half", model="smollm2") }} of \
{{ figure("compression", "full", "half", model="smollm2") }} bytes a token (half precision), \
{{ figure("compression", "bits:4", "kl", model="smollm2") }} nats from the exact prediction on prose, \
{{ figure("compression", "bits:4", "kl", model="smollm2", text="technical") }} on technical text |"""


def line_count(name: str) -> str:
    """Return how many lines a lecture file has."""
    return f"{len(project_text(f'{name}.py').splitlines())}"


def added(old: str, new: str) -> str:
    """Return how many lines a lecture file adds to an earlier one, and in how many hunks."""
    hunks = find_hunks(f"{old}.py", f"{new}.py")
    return f"{sum(end - begin for _, _, begin, end in hunks)} added, in {len(hunks)} hunks"


def demo() -> str:
    """Return the recorded output of the README's first command. "[...]" stands for the rest of the text that it writes, and
    for the times in all."""
    recorded = read_text(ROOT / "chapters" / "builder" / "demo.txt")
    text, mark, measured = recorded.rstrip().partition("\n[prefill")
    beginning = textwrap.shorten(text, 60, placeholder=" [...]")
    measured = re.sub("^In all.*", "[...]", measured, flags=re.M)
    return f"```text\n$ python3 gpt_kv_cache.py --compare\n{beginning}\n{mark}{measured}\n```"


def examiner() -> str:
    """Return what examine.py does, with the number of its checks."""
    return (
        "`python3 examine.py my_cache.py` compares logits with and without your cache in "
        f"{len(examine.CHECKS)} checks, and\nnames a fault's likely cause. It needs torch alone: "
        "[what to hand it](borrow/README.md#is-a-cache-right),\n[known caches]"
        "(borrow/EXAMINED.md), [faults it finds](tests/mutants/README.md#what-examinepy-finds)."
    )


def live_page() -> str:
    """Return a picture that moves, and how to open the live page. Both lead to the address that pyproject.toml gives as
    `live` in [project.urls], or, without one, to the file."""
    project = tomllib.loads(read_text(ROOT / "pyproject.toml")).get("project", {})
    address = project.get("urls", {}).get("live")
    if address:
        files = f"It also opens from these files: `{LIVE_PAGE}`."
    else:
        files = f"Download\nthese files (Code, Download ZIP) and open `{LIVE_PAGE}`."
    page = address or LIVE_PAGE
    picture = '<img src="chapters/front.svg" width="640" alt="With a KV cache each step computes the new token only">'
    link = f"Nothing to install: [the live page]({page}) runs the model in your browser."
    return f"[{picture}]({page})\n\n{link} {files}"
