"""The claims of CP-KVP. study.py says what their metrics mean."""

from studies.judging import NOT_SHOWN, Answer, Claim, Source, for_each, metrics, question
from studies.results import Results
from studies.showing import Layout, columns

SOURCE = Source(
    "Cross-Prompt KV Projection Warm-Start",
    "no results; proposed are GPT-2 small and medium, Pythia-160M and 410M; Quora pairs, "
    "PAWS, templated prompts; m of 4 to 32",
)
COMMANDS = ("projection", "projection --model smollm2")
METRICS = (
    metrics("mean", kl=".2f", reverse=".2f", low=".0%", good=".0%", lost=".0%", saved=".0%")
    | metrics("median", eighth_ms=".0f")
    | metrics("exact", from_summary=".1f", error=".2g")
)
USUAL = {"kind": "capitals", "on": "found", "m": 8}
EVERY = {"kind": ["capitals", "quiz", "long-quiz", "story", "notes"]}


def model_of(setting: dict) -> str:
    """Return the model that a kind of prompts is asked of, if the setting names none."""
    return "smollm2" if setting["kind"] == "capitals" else "pocket"


LENGTHS = (32, 64, 128, 256, 512, 1000)
SENTENCES = [
    '"trained with simple ridge regressions" (Abstract): stage 2 is one. Stage 1\'s loss reads through '
    "a softmax, so it isn't quadratic in the map and has no closed form; we use L-BFGS.",
    '"Storage: O(L×H×m×d) per cached prompt (tiny vs full T×d)" (Complexity and integration): m '
    "summary tokens take m/T of a prompt's cache. The maps come to that: a head's stage 1 has T m (2d)² "
    "numbers, its stage 2 (2 m d)².",
    '"For RoPE, assign virtual tokens to the earliest positions" (Implementation notes): all m keys '
    "take one rotation here, that of the position after them.",
]
NAMES = {
    "hit": "exact prefix hit",
    "shared": "exact shared beginning",
    "written": "as written",
    "own": "stage 2 on own summary tokens",
    "raw-8:1": "own summary tokens, no stage 2",
    "hidden": "baseline: mapped last hidden state",
    "neighbour": "baseline: similar prompt's prediction",
    "none": "no summary tokens, 1 token read",
    "raw-1:16": "ours: 1 summary token, 16 tokens read",
    "raw-8:4": "ours: 8 summary tokens, 4 tokens read",
    "raw-32:64": "ours: 32 summary tokens, 64 tokens read",
    # in the figure:
    "raw-1": "ours: 1 summary token, 16 tokens read",
    "raw-8": "own summary tokens, no stage 2,\n1 or 4 tokens read",
}


@Claim(
    SOURCE,
    "Decision thresholds",
    "Next-token KL ≤ 0.05 (or ≤ 5% relative perplexity increase) on ≥80% of test prompts "
    "within high-similarity bin.",
    "The first token is right often enough: KL at most 0.05 on 80% of the prompts",
    partly="capitals, and paraphrases of pocket's world; the bin is all prompts from tau on; either "
    "direction of KL would do",
)
def first_token(results: Results) -> Answer:
    def judge(there: Results) -> Answer:
        written = there.figure("written", "good")
        return (
            written.above(0.8),
            f"On {there.place}, {written:±} of the prompts have a KL of at most 0.05, and "
            f"{there.figure('neighbour', 'good')} by the similar prompt's prediction",
            f"{written:±}",
        )

    return for_each(results, "kind", judge)


@Claim(
    SOURCE,
    "Decision thresholds",
    "Task metrics within 1% absolute of cold start for high-similarity prompts.",
    "Answers get at most 1% worse",
    partly="as above; exact match, on notes ROUGE-L; all tokens but the first are the exact cache's",
)
def answers(results: Results) -> Answer:
    def judge(there: Results) -> Answer:
        written = there.figure("written", "lost")
        return (
            written.below(0.01),
            f"On {there.place}, answers get {written:±} worse, with summary tokens fitted prompt by prompt "
            f"{there.figure('own', 'lost')}",
            f"{written:±}",
        )

    return for_each(results, "kind", judge)


@Claim(
    SOURCE,
    "Decision thresholds",
    "≥35–60% reduction in first-token latency on average (model- and T-dependent)",
    "The first token comes at least 35% sooner",
    partly="random weights; retrieval included; judged by length, since the source names none; a short "
    "prompt that is mapped at the start crosses the source's line of failure, 10%",
    at={"model": "124M"},
)
def latency(results: Results) -> Answer:
    mapped, stored = (
        [results.figure(way, "saved", tokens=length) for length in LENGTHS]
        for way in ("mapped", "stored")
    )
    answers = {saved.above(0.35) for saved in mapped}
    lengths, if_stored = (", ".join(map(str, x)) for x in (LENGTHS, stored))
    sooner = ", ".join(f"{saved:±}" for saved in mapped)
    return (
        answers.pop() if len(answers) == 1 else NOT_SHOWN,
        f"The first token comes {mapped[0]:±} sooner for a prompt of {LENGTHS[0]} tokens, {mapped[-1]:±} for "
        f"one of {LENGTHS[-1]}, if mapped at every start",
        f"{lengths} tokens: {sooner}; mapped at storage {if_stored}",
    )


@Claim(
    SOURCE,
    "Why a linear map can work",
    "Linearity is enough for warm-start: We need only a good initial readout for the first step(s)",
    "A linear map is enough for the first token",
    partly="the similar prompt is given; the threshold is the whole method's; the best of 8, 16 and 32 "
    "summary tokens, on quiz, long-quiz and notes of 8; stage 1's penalty for story and notes is the "
    "least tried",
)
def linearity(results: Results) -> Answer:
    def judge(there: Results) -> Answer:
        given = there.at(on="given")
        numbers = [m for m in (8, 16, 32) if m == 8 or given.find("written", "low", m=m)]
        shares = [given.figure("written", "low", m=m) for m in numbers]
        best = max(shares, key=lambda share: share.value)
        alone = there.figure("stage1-written", "low", on="fit")
        return (
            best.above(0.8),
            f"With the similar prompt given, on {there.place} {best:±} have a KL of at most 0.05; by stage 1 "
            f"alone, where fitted, {alone}",
            f"{best:±}, alone {alone}",
        )

    return for_each(results, "kind", judge)


@question(
    "Is the first token still right if only the positions are changed as proposed?",
)
def position_rule(results: Results) -> Answer:
    def judge(there: Results) -> Answer:
        low = there.figure("rule", "low", on="given")
        return (
            low.above(0.8),
            f"With the exact cache, on {there.place} {low:±} of the prompts keep a KL of at most 0.05",
            f"{low:±}",
        )

    answer, sentence, by_kind = for_each(results, "kind", judge)
    if "capitals" in results.every["kind"]:
        sentence += f"; on capitals {results.figure('rule', 'low', on='given')}"
    return answer, sentence, by_kind


@question(
    "Is the first token better than one from the similar prompt's last hidden state?",
)
def last_hidden_state(results: Results) -> Answer:
    def judge(there: Results) -> Answer:
        written, hidden = there.figure("written", "kl"), there.figure("hidden", "kl")
        return (
            written.change(hidden).below(0),
            f"On {there.place}, the KL is {written:±} nats, and by that state {hidden:±}",
        )

    return for_each(results, "kind", judge)


@question(
    "Is the first token better, by 8 or by 16 summary tokens, than by as many that all prompts share?",
)
def learned_tokens(results: Results) -> Answer:
    def judge(there: Results) -> Answer:
        found = []
        for m in (8, 16):
            if m == 8 or there.find("written", "kl", on="given", m=m):
                pair = (there.figure(way, "kl", on="given", m=m) for way in ("written", "learned"))
                written, learned = pair
                text = f"the KL is {written:±} nats, and by shared ones {learned:±}"
                found.append((written.change(learned).below(0), m, text))
        answer, m, text = max(found)
        return answer, f"On {there.place}, with {m} summary tokens, {text}"

    return for_each(results, "kind", judge)


@question(
    "Do eight tokens come sooner, if the projected cache writes them until the exact one is ready?",
)
def eighth_token(results: Results) -> Answer:
    def judge(there: Results) -> Answer:
        until_ready, second_exact = (
            there.change(way, "cold", "eighth_ms") for way in ("until-ready", "second-exact")
        )
        guesses = there.figure("until-ready", "from_summary")
        text = f"{until_ready:±} with {guesses} guesses, {second_exact:±} with one"
        return (
            until_ready.below(0),
            f"On {there.place}, the eighth token's time changes by {text}, since the second then waits",
            text,
        )

    return for_each(results, "kind", judge)


TABLE = Layout(
    "First tokens from tau on: how much sooner (retrieval included, mapped at storage), and the share "
    "that is good (KL ≤ 0.05 nats in either direction, or the answer's perplexity at most 5% up). "
    "Another processor timed pocket *as written*, and ours on story with 32 and on notes with 4.",
    ["hit", "shared", "written", "own", "raw-8:1", "raw-.*", "hidden", "neighbour", "none"],
    columns("", {"sooner": "saved", "good": "good"}),
    every="kind",
)
FIGURES = {
    "plane": {
        "title": "Capitals, asked of SmolLM2-135M-Instruct",
        "x": "saved",
        "y": "kl",
        "yscale": "log",
        "xlabel": "share of the time to the first token that is saved",
        "ylabel": "KL(cold∥warm) of the first token, nats",
    },
}
