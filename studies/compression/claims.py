"""The claims of two sources, of which KIVI is named where its claims are. study.py says what their metrics mean."""

from compress import CACHES
from studies.judging import Answer, Claim, Source, for_each, metrics, question
from studies.results import Results
from studies.showing import Layout, columns

SOURCE = Source(
    "A Simple and Effective L2 Norm-Based Strategy for KV Cache Compression",
    "Llama and Gemma models of up to 8 billion parameters; perplexity, needles in a "
    "haystack, passkeys",
)
KIVI = Source(
    "KIVI: A Tuning-Free Asymmetric 2bit Quantization for KV Cache",
    "Llama-2, Falcon and Mistral of 7 and 13 billion parameters, float16; groups and "
    "residual of 32 or 128 tokens; CoQA, TruthfulQA, GSM8K, LongBench",
)
SIZES = "SmolLM2 of 135 million parameters, a GPT-2 and a Llama of 3 million"
COMMANDS = ("compression", "compression --model smollm2")
METRICS = metrics("mean", kl=".4f", above="+.1%") | metrics("share", facts=".0%")
METRICS |= metrics("exact", half=",.0f")
USUAL = {"model": "pocket", "text": "prose"}
EVERY = {"model": ["smollm2", "pocket", "pocket-llama"]}
NO_LOSS, NO_FACTS_LOST = 0.03, 0.1  # ours: up to 3% of perplexity, and 10 points of recall
NAMES = {way: kind.name for way, kind in CACHES.items()} | {
    "bits": "all tokens, in 8, 4, 2 bits",
    "window": "a window",
    "sinks": "4 sinks and a window",
    "sinks:2-bits": "4 sinks, in the bytes of 2 bits",
    "sinks:4+2-bits": "4 sinks, in the bytes of keys 4 bits, values 2",
    "norm": "keys of small norm",
    "chance": "by chance, with the first 4",
    "chance:half": "a half by chance, the first 4 among them",
    "swapped:2": "2 bits, keys per token, values per channel",
    "norm:skip": "small norm, a half from layer 3 on",
}


@Claim(
    KIVI,
    "Abstract, quality",
    "KIVI can enable Llama, Falcon, and Mistral models to maintain almost the same quality",
    "A cache in 2 bits is almost as good",
    partly=f"{SIZES}; up to 3% of perplexity and 10 points of recall (ours) are almost the same",
    their_model="Llama-2, Falcon, Mistral (7B, 13B), groups of 32 (SmolLM2: a head, 64)",
)
def two_bits(results: Results) -> Answer:
    return without_loss(results, "bits:2", "2 bits")


@Claim(
    KIVI,
    "Abstract, axes",
    "the key cache should be quantized per-channel … In contrast, the value cache should "
    "be quantized per-token",
    "Keys should be rounded by channel, values by token",
    partly=SIZES,
)
def axes(results: Results) -> Answer:
    return more_divergence(results, "swapped:2", "bits:2", "The other way round")


@Claim(
    SOURCE,
    "Abstract",
    "reduce the KV cache size by 50% on language modelling and needle-in-a-haystack tasks"
    " … without losing accuracy",
    "Half of the cache can go without a loss",
    partly="judged with the first two layers kept whole, as in the source's code: of pocket's "
    "six a third, so that 67% of the bytes stay, of SmolLM2's thirty a fifteenth; texts "
    "of 512 tokens, the last 32 always kept; facts of texts in the place of needles; "
    f"{SIZES}; up to 3% of perplexity and 10 points of recall (ours) are no loss",
    their_model="Llama, Gemma (up to 8B)",
)
def half_of_the_tokens(results: Results) -> Answer:
    return without_loss(results, "norm:skip", "Half of the tokens")


def without_loss(results: Results, way: str, words: str) -> Answer:
    """Judge whether a way of the cache costs neither perplexity nor facts, in every model."""

    def judge(there: Results) -> Answer:
        above, facts = there.figure(way, "above"), there.figure(way, "facts")
        full = there.figure("full", "facts")
        return (
            min(above.below(NO_LOSS), facts.change(full).above(-NO_FACTS_LOST)),
            f"{words} change the perplexity of {there.place} by {above:±}",
            f"perplexity {above:±}, facts recalled {facts:±} instead of {full}",
        )

    return for_each(results, "model", judge)


@question("Do all tokens in 4 bits predict better than half of the tokens, in fewer bytes?")
def bits_or_tokens(results: Results) -> Answer:
    halves = ("chance:half", "norm:half", "window:half")

    def judge(there: Results) -> Answer:
        kl = there.figure("bits:4", "kl")
        best = min((there.figure(half, "kl") for half in halves), key=lambda half: half.value)
        change = kl.change(best)
        text = f"KL is {kl} instead of the best half's {best}: {change:±} nats"
        return change.below(0), f"On {there.place}, {text}", text

    return for_each(results, "model", judge)


@question("Are tokens with short keys better to keep than random ones and the first 4?")
def small_norms(results: Results) -> Answer:
    return more_divergence(results, "chance:half", "norm:half", "By chance instead of small norms")


def more_divergence(results: Results, way: str, other: str, words: str) -> Answer:
    """Judge whether a way's KL is above another's, in every model."""

    def judge(there: Results) -> Answer:
        other_kl, kl = there.figure(other, "kl"), there.figure(way, "kl")
        change = kl.change(other_kl)
        return (
            change.above(0),
            f"{words}, the KL of {there.place} changes by {change:±} nats",
            f"KL {kl} instead of {other_kl}: {change:±}",
        )

    return for_each(results, "model", judge)


SHOWN = {"bytes a token": "half", "KL": "kl", "perplexity": "above", "facts": "facts"}
TABLE = Layout(
    "Bytes a token in half precision. KL in nats to the same model with full attention; perplexity "
    "beyond that model's; both computed in single precision. Facts are asked of whole texts. "
    "Not tested: peak memory, batches and throughput, "
    "which need kernels that read codes; passkeys of thousands of tokens.",
    [
        "full",
        "preallocated",
        "bits.*",
        ".*:half",
        "norm:skip",
        ".*:quarter",
        "(?!swapped).*",
    ],
    [
        *columns("SmolLM2", SHOWN, model="smollm2"),
        *columns("pocket", SHOWN),
    ],
)
FIGURES = {
    "kl_by_bytes": {
        "title": "SmolLM2: bytes of a cache, and what they cost",
        "at": {"model": "smollm2"},
        "x": "half",
        "xlabel": "bytes a token of a text of 512, in half precision",
        "y": "kl",
        "ylabel": "KL to full attention, nats",
        "yscale": "log",
        "ways": ["norm:(?!skip).*", "(?!full|pre|swapped|norm:skip|sinks:.*bits).*"],
    },
}
