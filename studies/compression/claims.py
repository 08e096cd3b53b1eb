"""The claims of two sources, of which KIVI is named where its claims are. study.py says what their metrics mean."""

from studies.judging import Answer, Source, claim, for_each, metrics, question
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
METRICS = (
    metrics("mean", kl=".4f", above="+.1%", facts=".0%")
    | metrics("exact", each=",.0f")
    | metrics("turns", ms=".2f")
)
USUAL = {"model": "pocket"}
EVERY = {"model": ["smollm2", "pocket", "pocket-llama"]}
NO_LOSS, NO_FACTS_LOST = 0.03, 0.1  # ours: up to 3% of perplexity, and 10 points of recall
NAMES = {
    "bits": "all tokens, in 8, 4, 2 bits",
    "window": "a window",
    "sinks": "4 sinks and a window",
    "norm": "keys of small norm",
    "chance": "by chance, with the first 4",
    "full": "full attention, growing",
    "preallocated": "full attention, preallocated",
    "bits:8": "8 bits",
    "bits:4": "4 bits",
    "bits:2": "2 bits",
    "bits:4+2": "keys in 4 bits, values in 2",
    "chance:half": "a half by chance, the first 4 among them",
    "swapped:2": "2 bits, keys per token, values per channel",
    "window:half": "window of a half",
    "window:quarter": "window of a quarter",
    "sinks:quarter": "4 sinks and a window, a quarter in all",
    "norm:half": "small norm, a half",
    "norm:skip": "small norm, a half from layer 3 on",
    "norm:quarter": "small norm, a quarter",
    "grouped": "grouped heads (pocket-llama)",
    "bct": "BCT: 24 slots and 8 recent tokens",
}


@claim(
    KIVI,
    "Abstract, quality",
    "KIVI can enable Llama, Falcon, and Mistral models to maintain almost the same quality",
    "A cache in 2 bits is almost as good",
    partly=f"{SIZES}; up to 3% of perplexity and 10 points of recall (ours) are almost the same",
    their_model="Llama-2, Falcon, Mistral (7B, 13B), groups of 32 (SmolLM2: a head, 64)",
)
def two_bits(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        above, facts = there.figure("bits:2", "above"), there.figure("bits:2", "facts")
        full = there.figure("full", "facts")
        return (
            min(above.below(NO_LOSS), facts.change(full).within(NO_FACTS_LOST)),
            f"2 bits change the perplexity of {there.place} by {above:±}",
            f"{above:±}",
            f"{there.figure('bits:4', 'above')}",
            f"{facts} ({full} by full attention)",
        )

    answer, sentence, two, four, facts = for_each(results, "model", judge)
    return (
        answer,
        sentence,
        (f"2 bits raise perplexity by {two}. 4 bits by {four}. Early facts recalled: {facts}"),
    )


@claim(
    KIVI,
    "Abstract, axes",
    "the key cache should be quantized per-channel … In contrast, the value cache should "
    "be quantized per-token",
    "Keys should be rounded by channel, values by token",
    partly=SIZES,
)
def axes(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        usual, swapped = there.figure("bits:2", "kl"), there.figure("swapped:2", "kl")
        change = swapped.change(usual)
        return (
            change.above(0),
            f"The other way round, the KL of {there.place} changes by {change:±} nats",
            f"{usual:±}",
            f"{swapped:±}",
        )

    answer, sentence, usual, swapped = for_each(results, "model", judge)
    return (
        answer,
        sentence,
        f"at 2 bits the KL to full attention is {usual}. The other way round {swapped}",
    )


@claim(
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
    def judge(there: Results) -> tuple:
        above, facts = there.figure("norm:skip", "above"), there.figure("norm:skip", "facts")
        full = there.figure("full", "facts")
        return (
            min(above.below(NO_LOSS), facts.change(full).within(NO_FACTS_LOST)),
            f"Half of the tokens change the perplexity of {there.place} by {above:±}",
            f"{above:±}",
            f"{there.figure('norm:half', 'above')}",
            f"{there.figure('window:half', 'above')}",
            f"{facts:±}",
            f"{full:±}",
        )

    answer, sentence, *found = for_each(results, "model", judge)
    skipping, everywhere, window, facts, full = found
    return (
        answer,
        sentence,
        f"half of the tokens, with the first two layers kept whole, raise perplexity by {skipping}. "
        f"In all layers by {everywhere}. A window of as many by {window}. Early facts recalled: "
        f"{facts}. By full attention {full}",
    )


@question(
    "Are all tokens in 4 bits better than a quarter of the tokens?",
)
def bits_or_tokens(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        answers = []
        for quarter in ("window:quarter", "sinks:quarter", "norm:quarter"):
            answers.append(there.change("bits:4", quarter, "kl").below(0))
            answers.append(there.change("bits:4", quarter, "facts").above(0))
        kl = there.figure("bits:4", "kl")
        return (
            min(answers),
            f"All tokens in 4 bits have a KL of {kl:±} nats on {there.place}",
            f"{kl:±} in {there.figure('bits:4', 'each')} bytes a token (a "
            f"quarter in {there.figure('window:quarter', 'each')}: "
            f"{there.figure('sinks:quarter', 'kl')} with sinks, {there.figure('window:quarter', 'kl')} "
            f"with a window, {there.figure('norm:quarter', 'kl')} by small norm)",
        )

    answer, sentence, found = for_each(results, "model", judge)
    return answer, sentence, f"all of them: KL {found}"


@question(
    "Are tokens with short keys better to keep than random ones and the first 4?",
)
def small_norms(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        norm, chance = there.figure("norm:half", "kl"), there.figure("chance:half", "kl")
        change = norm.change(chance)
        return (
            change.below(0),
            f"Small norms instead of chance change the KL of {there.place} by {change:±} nats",
            f"{norm:±} by small norm, {chance:±} by chance",
        )

    answer, sentence, found = for_each(results, "model", judge)
    return answer, sentence, f"half of the tokens: KL {found}"


TABLE = Layout(
    "KL in nats to the same model with full attention; perplexity beyond that model's. "
    "Facts are asked of whole texts. Grouped heads are pocket-llama with full attention: "
    "their KL is to itself, their perplexity beside pocket's. Not tested: peak memory, "
    "batches and throughput, which need kernels that read codes; passkeys of thousands of"
    " tokens.",
    [
        "full",
        "preallocated",
        "grouped",
        "bits.*",
        ".*:half",
        "norm:skip",
        ".*:quarter",
        "(?!swapped).*",
    ],
    [
        *columns(
            "SmolLM2",
            {
                "bytes a token": "each",
                "KL": "kl",
                "perplexity": "above",
                "facts": "facts",
            },
            model="smollm2",
        ),
        *columns(
            "pocket",
            {
                "bytes": "each",
                "KL": "kl",
                "perplexity": "above",
                "facts": "facts",
            },
        ),
        *columns("124M", {"ms a token": "ms"}, model="124M"),
    ],
)
BY_BYTES = {
    "at": {"model": "smollm2"},
    "x": "each",
    "xlabel": "bytes a token of a text of 512",
    "legend": {"4 sinks and a window": "4 sinks and a window, a quarter"},
}
FIGURES = {
    "kl_by_bytes": BY_BYTES
    | {
        "title": "SmolLM2: bytes of a cache, and what they cost",
        "y": "kl",
        "ylabel": "KL to full attention, nats",
        "ways": ["norm:(?!skip).*", "(?!full|pre|swapped|norm:skip|grouped|bct).*"],
    },
    "facts_by_bytes": BY_BYTES
    | {
        "title": "SmolLM2: bytes of a cache, and facts of a text",
        "y": "facts",
        "ylabel": "share recalled",
        "ways": ["full", "window.*", "(?!pre|swapped|norm:skip|grouped|bct).*"],
    },
}
