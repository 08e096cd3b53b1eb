"""The front page's parts: its demo, its table of methods, and how to open the live page.

`python3 gpt_kv_cache.py --compare > chapters/builder/demo.txt` records the demo anew.
"""

import textwrap
import tomllib

from chapters.builder.blocks import ROOT
from support.files import read_text

LIVE_PAGE = "chapters/live/index.html"
METHODS = """\
| file | what it does | the text | one figure |
| --- | --- | --- | --- |
| [`recycle.py`](recycle.py) | reuses the cache of an earlier prompt that begins alike | exact | \
asked about a stored text of 1,200 tokens: first token after \
{{ format(figure("recycling", "recycled", "first", model="smollm2", order="chat").value, ",.0f") }} instead of \
{{ format(figure("recycling", "cold", "first", model="smollm2", order="chat").value, ",.0f") }} ms |
| [`paged.py`](paged.py) | writes many texts at once, in shared blocks of cache | exact | 16 texts: \
{{ paged_gain(16) }} \
times as fast as one by one |
| [`speculate.py`](speculate.py) | lets a small model draft what a large one checks | exact | 1,000 tokens in \
{{ figure("speculation", "exact:8", "passes", model="smollm2", mode="greedy") }} passes of the large model |
| [`overfill.py`](overfill.py) | lets a large model read, and a small one write | approximate | \
SmolLM2 and its copy in 5 bits, perplexity of \
{{ figure("refreshing", "none", "perplexity", model="smollm2", trained="int5").values | length }} sampled texts: \
{{ figure("refreshing", "none", "perplexity", model="smollm2", trained="int5") }}; the copy alone: \
{{ figure("refreshing", "student", "perplexity", model="smollm2", trained="int5") }}; SmolLM2 alone: \
{{ figure("refreshing", "teacher", "perplexity", model="smollm2", trained="int5") }} |
| [`projector.py`](projector.py) | guesses first tokens from a given, similar prompt | approximate | \
KL(exact∥guess)={{ figure("projection", "written", "kl", on="given") }} nats \
(n={{ rows("projection").find("written", "kl", on="given")["n"] }}); \
copying {{ figure("projection", "neighbour", "kl") }}; limit 0.05 |
| [`compress.py`](compress.py) | stores the cache in 8, 4 or 2 bits, or drops tokens | approximate | 4 bits: \
{{ figure("compression", "bits:4", "each", model="smollm2") }} bytes a token instead of \
{{ figure("compression", "full", "each", model="smollm2") }}, \
{{ figure("compression", "bits:4", "kl", model="smollm2") }} nats from the exact prediction |"""


def demo() -> str:
    """Return the recorded output of the README's first command; the text that it writes is cut short."""
    recorded = read_text(ROOT / "chapters" / "builder" / "demo.txt")
    text, mark, measured = recorded.rstrip().partition("\n[prefill")
    beginning = textwrap.shorten(text, 100, placeholder=" [...]")
    return f"```text\n$ python3 gpt_kv_cache.py --compare\n{beginning}\n{mark}{measured}\n```"


def live_page() -> str:
    """Return how to open the live page, and its picture. Both lead to the address that pyproject.toml gives as `live`
    in [project.urls], or, without one, to the file."""
    project = tomllib.loads(read_text(ROOT / "pyproject.toml")).get("project", {})
    address = project.get("urls", {}).get("live")
    if address:
        files = f"It also opens from these files: `{LIVE_PAGE}`."
    else:
        files = (
            "Download these files (on\nGitHub: Code, Download ZIP) and open "
            f"`{LIVE_PAGE}` among them. It needs no server and no network."
        )
    page = address or LIVE_PAGE
    picture = f"[![Milliseconds a token: rising without a cache, flat with one](chapters/live.png)]({page})"
    link = f"Nothing to install: [the live page]({page}) runs the model in your browser."
    return f"{link} {files}\n\n{picture}"
