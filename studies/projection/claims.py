"""The claims of CP-KVP. study.py says what their metrics mean."""

from studies.judging import NOT_SHOWN, Answer, Source, claim, for_each, metrics, question
from studies.results import Results
from studies.showing import Layout, columns

SOURCE = Source(
    "Cross-Prompt KV Projection Warm-Start",
    "no results; proposed are GPT-2 small and medium, Pythia-160M and 410M; Quora pairs, "
    "PAWS, templated prompts; m of 4 to 32",
)
COMMANDS = ("projection", "projection --model smollm2")
METRICS = (
    metrics("mean", kl=".2f", reverse=".2f")
    | metrics("mean", low=".0%", good=".0%", lost=".0%", saved=".0%")
    | metrics("median", eighth_ms=".0f")
    | metrics("exact", from_summary=".1f", area=".2f", penalty=".4g", error=".2g")
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
    "proposed": "smaller stage 1",
    "own": "stage 2 on own summary tokens",
    "raw-8:1": "own summary tokens, no stage 2",
    "hidden": "baseline: mapped last hidden state",
    "neighbour": "baseline: similar prompt's prediction",
    "none": "no summary tokens, 1 token read",
    "raw-1": "ours: 1 summary token",
    "raw-8": "own summary tokens, no stage 2",
    "raw-1:16": "ours: 1 summary token, 16 tokens read",
    "raw-8:4": "ours: 8 summary tokens, 4 tokens read",
    "raw-32:64": "ours: 32 summary tokens, 64 tokens read",
}


@claim(
    SOURCE,
    "Decision thresholds",
    "Next-token KL ≤ 0.05 (or ≤ 5% relative perplexity increase) on ≥80% of test prompts "
    "within high-similarity bin.",
    "The first token is right often enough: KL at most 0.05 on 80% of the prompts",
    partly="capitals, and paraphrases of pocket's world; the bin is all prompts from tau on; either "
    "stage 1 and either direction of KL would do",
)
def first_token(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        written, smaller, neighbour = (
            there.figure(way, "good") for way in ("written", "proposed", "neighbour")
        )
        answer = max(written.above(0.8), smaller.above(0.8))
        return (
            answer,
            f"On {there.place}, {written:±} of the prompts have a KL of at most 0.05",
            f"{written:±}",
            f"{smaller}",
            f"{neighbour}",
        )

    answer, sentence, written, smaller, neighbour = for_each(results, "kind", judge)
    forward, reverse = (
        f"{results.figure('proposed', metric)} and {results.figure('neighbour', metric)} nats"
        for metric in ("kl", "reverse")
    )
    return (
        answer,
        sentence,
        f"as written {written}. With a smaller stage 1 {smaller}. By the similar prompt's own "
        f"prediction {neighbour}. Of these two, KL(cold ∥ warm) on capitals is {forward}, and KL(warm ∥ "
        f"cold), the source's, {reverse}",
    )


@claim(
    SOURCE,
    "Decision thresholds",
    "Task metrics within 1% absolute of cold start for high-similarity prompts.",
    "Answers get at most 1% worse",
    partly="as above; all tokens but the first are the exact cache's",
)
def answers(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        written, smaller = (there.figure(way, "lost") for way in ("written", "proposed"))
        answer = max(written.below(0.01), smaller.below(0.01))
        return (
            answer,
            f"On {there.place}, the metric falls by {written:±}",
            f"{written:±}",
            f"{smaller:±}",
        )

    answer, sentence, written, smaller = for_each(results, "kind", judge)
    return (
        answer,
        sentence,
        f"exact match (notes: ROUGE-L) lower as written by {written}. With a smaller stage 1 by "
        f"{smaller}",
    )


@claim(
    SOURCE,
    "Decision thresholds",
    "≥35–60% reduction in first-token latency on average (model- and T-dependent)",
    "The first token comes at least 35% sooner",
    partly="random weights; judged by length, since the source names no lengths to average over; a short "
    "prompt that is mapped at the start crosses the source's line of failure, 10%",
    at={"model": "124M"},
)
def latency(results: Results) -> Answer:
    mapped, stored = (
        [results.figure(way, "saved", tokens=length) for length in LENGTHS]
        for way in ("mapped", "stored")
    )
    answers = {saved.above(0.35) for saved in mapped}
    by_length = [
        ", ".join(f"{length:,}: {saved}" for length, saved in zip(LENGTHS, row, strict=True))
        for row in (mapped, stored)
    ]
    return (
        answers.pop() if len(answers) == 1 else NOT_SHOWN,
        f"Mapped at every start, the first token of {LENGTHS[0]} tokens comes {mapped[0]} sooner, of "
        f"{LENGTHS[2]} {mapped[2]}, of {LENGTHS[-1]:,} {mapped[-1]}",
        f"retrieval included, by tokens of the prompt, if mapped at every start {by_length[0]}; if mapped "
        f"at storage {by_length[1]}",
    )


@claim(
    SOURCE,
    "Why a linear map can work",
    "Linearity is enough for warm-start: We need only a good initial readout for the first step(s)",
    "A linear map is enough for the first token",
    partly="the similar prompt is given; the threshold is the whole method's; stage 1's "
    "penalty for story and notes is the least tried",
)
def linearity(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        answers = []
        for way, m in (("written", 8), ("written", 16), ("written", 32), ("proposed", 8)):
            if there.find(way, "low", on="given", m=m):
                answers.append(there.figure(way, "low", on="given", m=m).above(0.8))
        written = there.figure("written", "low", on="given")
        return (
            max(answers),
            f"With the similar prompt given, {written:±} of first tokens on {there.place} have a KL of at most 0.05",
            f"{written:±}",
            f"{there.figure('proposed', 'low', on='given')}",
            f"{there.figure('stage1-written', 'low', on='fit')}",
        )

    answer, sentence, written, smaller, alone = for_each(results, "kind", judge)
    capitals, story = (
        f"{there.figure('written', 'low', on='given', m=16)} and "
        f"{there.figure('written', 'low', on='given', m=32)}"
        for there in (results, results.at(kind="story"))
    )

    def errors(kind: str, on: str) -> str:
        there = results.at(kind=kind, on=on)
        before, after = (there.figure("stage1-written", "error", steps=n) for n in (200, 800))
        return f"{before} and {after}"

    return (
        answer,
        sentence,
        f"KL ≤ 0.05 as written on {written}. With 16 and 32 summary tokens, on capitals {capitals}, on "
        f"story {story}. With a smaller stage 1 on {smaller}. Stage 1 as written alone, on the prompts "
        f"of its fit, {alone}. Fitted on 120 of these alone, its error after 200 and 800 steps: quiz "
        f"{errors('quiz', 'fit')}, story {errors('story', 'fit')}; on others quiz "
        f"{errors('quiz', 'given')}, story {errors('story', 'given')}",
    )


@question(
    "Is the first token still right if only the positions are changed as proposed?",
)
def position_rule(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        low = there.figure("rule", "low", on="given")
        return (
            low.above(0.8),
            f"On {there.place}, {low:±} of the prompts keep a KL of at most 0.05, with the exact cache",
            f"{low:±}",
        )

    answer, sentence, found = for_each(results, "kind", judge)
    if "capitals" in results.every["kind"]:
        sentence += f"; on SmolLM2's capitals {results.figure('rule', 'low', on='given')}"
    return answer, sentence, f"on {found}"


@question(
    "Is the first token better than one from the similar prompt's last hidden state?",
)
def last_hidden_state(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        written, smaller, hidden = (
            there.figure(way, "kl") for way in ("written", "proposed", "hidden")
        )
        answer = max(written.change(hidden).below(0), smaller.change(hidden).below(0))
        return (
            answer,
            f"On {there.place}, the KL is {written} nats, and by that state {hidden}",
            f"{written}",
            f"{smaller}",
            f"{hidden}",
        )

    answer, sentence, written, smaller, hidden = for_each(results, "kind", judge)
    return (
        answer,
        sentence,
        f"KL in nats as written {written}. With a smaller stage 1 {smaller}. By that baseline {hidden}",
    )


@question(
    "Is the first token better than one from summary tokens that all prompts share?",
)
def learned_tokens(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        answers, texts = [], []
        for m in (8, 16):
            if there.find("learned", "kl", on="given", m=m):
                learned = there.figure("learned", "kl", on="given", m=m)
                ways = [x for x in ("written", "proposed") if there.find(x, "kl", on="given", m=m)]
                found = [there.figure(way, "kl", on="given", m=m) for way in ways]
                answers.append(max(kl.change(learned).below(0) for kl in found))
                best = min(found, key=lambda kl: kl.value)
                texts.append(f"{best} and {learned}")
        written, learned = (there.figure(way, "kl", on="given") for way in ("written", "learned"))
        return (
            max(answers),
            f"On {there.place}, the KL is {written} nats, and by shared tokens {learned}",
            ", ".join(texts),
        )

    answer, sentence, found = for_each(results, "kind", judge)
    return (
        answer,
        sentence,
        f"the similar prompt given, nats by the better stage 1 and that baseline, with 8 and with 16 "
        f"summary tokens: {found}",
    )


@question(
    "Do eight tokens come sooner, if the projected cache writes them until the exact one is ready?",
)
def eighth_token(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        until_ready, second_exact = (
            there.change(way, "cold", "eighth_ms") for way in ("until-ready", "second-exact")
        )
        return (
            until_ready.below(0),
            f"On {there.place}, the eighth token's time changes by {until_ready:±}; "
            f"{there.figure('until-ready', 'from_summary')} of the eight are guesses",
            f"{until_ready:±}, {there.figure('until-ready', 'from_summary')}",
            f"{second_exact:±}",
        )

    answer, sentence, until_ready, second_exact = for_each(results, "kind", judge)
    return (
        answer,
        sentence,
        f"its time beside a cold start's, and how many of the eight tokens are the summary's while a second "
        f"core reads the prompt: {until_ready}. If only the first one is, the second waits for the prefill: "
        f"{second_exact}",
    )


TABLE = Layout(
    "First tokens: how much sooner (retrieval included, mapped at storage), and the share with "
    "KL(cold∥warm) ≤ 0.05 nats, from tau on. Another processor timed pocket *as written*, and ours "
    "on story with 32 and on notes with 4.",
    [
        "hit",
        "shared",
        "written",
        "proposed",
        "own",
        "raw-8:1",
        "raw-.*",
        "hidden",
        "neighbour",
        "none",
    ],
    columns("", {"sooner": "saved", "≤ 0.05": "low"}),
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
        "legend": {
            "own summary tokens, no stage 2": "own summary tokens, no stage 2,\n1 or 4 tokens read",
            "ours: 1 summary token": "ours: 1 summary token, 16 tokens read",
        },
    },
}
