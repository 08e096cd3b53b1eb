"""The claims of CP-KVP. study.py says what their metrics mean."""

from studies.judging import Answer, Source, claim, for_each, metrics, question
from studies.results import Results
from studies.showing import Layout, columns

SOURCE = Source(
    "Cross-Prompt KV Projection Warm-Start",
    "no results; proposed are GPT-2 small and medium, Pythia-160M and 410M; Quora pairs, "
    "PAWS, templated prompts; m of 4 to 32",
)
BOTH = ("projection", "projection --model smollm2")
METRICS = (
    metrics("mean", kl=".2f", low=".0%", good=".0%", lost=".0%", saved=".0%")
    | metrics("turns", eighth=".2f")
    | metrics("median", eighth_ms=".0f", first_ms=".0f")
    | metrics(
        "exact",
        from_summary=".1f",
        area=".2f",
        penalty=".4g",
        bytes=",.0f",
        share=".0%",
        curvature=".0%",
    )
)
USUAL = {"kind": "capitals", "on": "found", "m": 8}
ARITHMETIC = {"model": "random caches"}
EVERY = {"kind": ["capitals", "quiz", "long-quiz", "story", "notes"]}


def model_of(setting: dict) -> str:
    """Return the model that a kind of prompts is asked of, if the setting names none."""
    return {"capitals": "smollm2", "all": "pocket and smollm2"}.get(setting["kind"], "pocket")


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
    partly="questions about capitals, and paraphrases of the pocket world; the bin is all "
    "prompts from tau on; either stage 1 and either direction of KL would do",
    commands=BOTH,
)
def first_token(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        written, smaller, neighbour = (
            there.figure(way, "good") for way in ("written", "proposed", "neighbour")
        )
        answer = max(written.above(0.8), smaller.above(0.8))
        return answer, f"{written:±}", f"{smaller}", f"{neighbour}"

    answer, written, smaller, neighbour = for_each(results, "kind", judge)
    return answer, (
        f"as written {written}. With a smaller stage 1 {smaller}. By the similar prompt's own "
        f"prediction {neighbour}"
    )


@claim(
    SOURCE,
    "Decision thresholds",
    "Task metrics within 1% absolute of cold start for high-similarity prompts.",
    "Answers get at most 1% worse",
    partly="questions about capitals, and paraphrases of the pocket world; the bin is all "
    "prompts from tau on; either stage 1 would do; all tokens but the first are the exact"
    " cache's",
    commands=BOTH,
)
def answers(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        written, smaller = (there.figure(way, "lost") for way in ("written", "proposed"))
        return max(written.below(0.01), smaller.below(0.01)), f"{written:±}", f"{smaller:±}"

    answer, written, smaller = for_each(results, "kind", judge)
    return answer, (
        f"exact match (notes: ROUGE-L) lower as written by {written}. With a smaller stage 1 by "
        f"{smaller}"
    )


@claim(
    SOURCE,
    "Decision thresholds",
    "≥35–60% reduction in first-token latency on average (model- and T-dependent)",
    "The first token comes at least 35% sooner",
    partly="random weights; six lengths, which are ours and which the average depends on; the "
    "source's line of failure, 10%, is crossed where a short prompt is mapped at the "
    "start",
    at={"model": "124M"},
)
def latency(results: Results) -> Answer:
    mapped, stored = (results.figure(way, "saved") for way in ("mapped", "stored"))
    lengths = (32, 64, 128, 256, 512, 1000)
    by_length = {
        way: ", ".join(f"{results.figure(way, 'saved', tokens=length)}" for length in lengths)
        for way in ("mapped", "stored")
    }
    return min(mapped.above(0.35), stored.above(0.35)), (
        "retrieval included, mean over 32, 64, 128, 256, 512 and 1,000 tokens: mapped at every start "
        f"{mapped:±}, mapped at storage {stored:±}. By length, at the start {by_length['mapped']}; at "
        f"storage {by_length['stored']}"
    )


@claim(
    SOURCE,
    "Abstract",
    "trained with simple ridge regressions",
    "Both stages are simple ridge regressions",
    at=ARITHMETIC,
)
def simple_ridge(results: Results) -> Answer:
    answer = results.figure("stage-1", "curvature").below(0.001)
    return answer, (
        "stage 2 is one; stage 1's loss goes through a softmax: its third difference along a line "
        f"of maps is {results.figure('stage-1', 'curvature')} of it, a regression's 0. We use "
        "L-BFGS"
    )


@claim(
    SOURCE,
    "Why a linear map can work",
    "Linearity is enough for warm-start: We need only a good initial readout for the first step(s)",
    "A linear map is enough for the first token",
    partly="the similar prompt is given; judged by the threshold for the whole method; the "
    "penalty of stage 1 for story and notes is the least that was tried; as written, "
    "other numbers of summary tokens than 8 on capitals and story only",
    commands=BOTH,
)
def linearity(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        answers = []
        for way, m in (("written", 8), ("written", 16), ("written", 32), ("proposed", 8)):
            if there.find(way, "low", on="given", m=m):
                answers.append(there.figure(way, "low", on="given", m=m).above(0.8))
        return (
            max(answers),
            f"{there.figure('written', 'low', on='given'):±}",
            f"{there.figure('proposed', 'low', on='given')}",
            f"{there.figure('stage1-written', 'low', on='fit')}",
            f"{there.figure('stage1-written', 'penalty')}",
            f"{there.figure('written', 'penalty')}",
        )

    answer, written, smaller, alone, penalty_1, penalty_2 = for_each(results, "kind", judge)
    capitals, story = (
        f"{there.figure('written', 'low', on='given', m=16)} and "
        f"{there.figure('written', 'low', on='given', m=32):±}"
        for there in (results, results.at(kind="story"))
    )
    return answer, (
        f"KL ≤ 0.05 as written on {written}. With 16 and 32 summary tokens, on capitals {capitals}, on "
        f"story {story}. With a smaller stage 1 on {smaller}. Stage 1 as written alone, on the prompts "
        f"of its fit, {alone}. Penalties of stage 1 (1e-06 to 0.1) {penalty_1}. Of stage 2 (0.0001 to "
        f"1,000) {penalty_2}"
    )


@claim(
    SOURCE,
    "Complexity and integration",
    "Storage: O(L×H×m×d) per cached prompt (tiny vs full T×d).",
    "What is stored for a prompt is tiny beside its cache",
    partly="less than half is tiny (ours)",
    commands=BOTH,
)
def storage(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        answer = there.figure("summary", "share").below(0.5)
        return (
            answer,
            f"{there.figure('summary', 'share')}",
            f"{there.figure('stage1-written', 'bytes')}",
        )

    answer, share, bytes_of_stage_1 = for_each(results, "kind", judge)
    return answer, (
        f"{share} of a prompt's cache. Not counted, bytes of stage 2: "
        f"{results.figure('written', 'bytes')}; of stage 1: {bytes_of_stage_1}"
    )


@claim(
    SOURCE,
    "Discussion",
    "Retrieval gating is crucial: far neighbors must fall back to cold start.",
    "Prompts that resemble no stored one must be read as usual",
    partly="a smaller stage 1; pocket: the nearest stored prompt, however far; capitals: always "
    "that of the same country, six prompts a third",
    commands=BOTH,
)
def gating(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        least, most = (there.figure("proposed", "kl", on=third) for third in ("lowest", "highest"))
        low = there.figure("proposed", "low", on="top50")
        return least.change(most).above(0), f"{least:±}, {most:±}", f"{low}"

    answer, thirds, top = for_each(results, "kind", judge)
    return answer, (
        f"KL of the least and the most similar third: {thirds} nats. With tau at the median "
        f"similarity, ≤ 0.05 on {top}"
    )


@claim(
    SOURCE,
    "Limitations",
    "Very small m can underfit",
    "Too few summary tokens can be too coarse",
    partly="with the penalties for 8 summary tokens; as written, other numbers on capitals and "
    "story only; either stage 1 and one kind are enough, although more tokens are worse "
    "on others",
    commands=BOTH,
)
def few_summary_tokens(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        answers = []
        for way, fewer in (("proposed", 1), ("written", 4)):
            if there.find(way, "kl", on="given", m=fewer):
                few, many = (there.figure(way, "kl", on="given", m=m) for m in (fewer, 32))
                answers.append(few.change(many).above(0))
        few, many = (there.figure("proposed", "kl", on="given", m=m) for m in (1, 32))
        return max(answers), f"{few:±}, {many:±}"

    answer, smaller = for_each(results, "kind", judge, max)
    capitals, story = (
        ", ".join(f"{there.figure('written', 'kl', on='given', m=m):±}" for m in (4, 8, 16, 32))
        for there in (results, results.at(kind="story"))
    )
    return answer, (
        f"KL with a smaller stage 1 and 1 or 32 summary tokens: {smaller} nats. As written, with the "
        f"source's 4, 8, 16 and 32, on capitals {capitals}; on story {story}"
    )


@question(
    "Does the rule of positions 0 to m−1 alone keep the first token (KL ≤ 0.05 on 80%), "
    "with the exact cache?",
    "Is the first token still right if only the positions are changed as proposed?",
    commands=BOTH,
)
def position_rule(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        low = there.figure("rule", "low", on="given")
        return low.above(0.8), f"{low:±}"

    answer, found = for_each(results, "kind", judge)
    return answer, f"on {found}"


@question(
    "Is a first token as proposed better than the source's baseline of the last hidden state?",
    "Is the first token better than one from the similar prompt's last hidden state?",
    commands=BOTH,
)
def last_hidden_state(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        written, smaller, hidden = (
            there.figure(way, "kl") for way in ("written", "proposed", "hidden")
        )
        answer = max(written.change(hidden).below(0), smaller.change(hidden).below(0))
        return answer, f"{written}", f"{smaller}", f"{hidden}"

    answer, written, smaller, hidden = for_each(results, "kind", judge)
    return answer, (
        f"KL in nats as written {written}. With a smaller stage 1 {smaller}. By that baseline {hidden}"
    )


@question(
    "Is it better than the source's baseline of learned summary tokens, the same for all prompts?",
    "Is the first token better than one from summary tokens that all prompts share?",
    commands=BOTH,
)
def learned_tokens(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        written, smaller, learned = (
            there.figure(way, "kl", on="given") for way in ("written", "proposed", "learned")
        )
        answer = max(written.change(learned).below(0), smaller.change(learned).below(0))
        return answer, f"{written:±}, {smaller}, {learned:±}"

    answer, found = for_each(results, "kind", judge)
    return answer, (
        "the similar prompt given, KL as written, with a smaller stage 1 and by that baseline: "
        f"{found} nats"
    )


@question(
    "With the exact cache as soon as it is ready, as proposed, is the eighth token sooner"
    " than after a cold start?",
    "Do eight tokens come sooner, if the projected cache writes them until the exact one is ready?",
    commands=BOTH,
)
def eighth_token(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        answer = min(
            there.change("until-ready", "cold", "eighth_ms").below(0),
            there.figure("until-ready", "eighth", kind="all").below(0.95),
        )
        return answer, f"{there.figure('until-ready', 'from_summary')}"

    answer, found = for_each(results, "kind", judge)
    return answer, (
        f"SmolLM2 takes {results.figure('until-ready', 'eighth_ms')} ms instead of "
        f"{results.figure('cold', 'eighth_ms')}; over five kinds of prompts it is "
        f"{results.figure('until-ready', 'eighth', kind='all'):±} times a cold start's time "
        f"(median and range), while a second core reads the prompt. But {found} of the eight "
        "tokens are written from summary tokens. If only the first one is, it takes "
        f"{results.figure('second-exact', 'eighth_ms')} ms and "
        f"{results.figure('second-exact', 'eighth', kind='all'):±} times: the second token waits "
        "for the prefill"
    )


TABLE = Layout(
    "How much sooner the first token comes, retrieval included, and the share of prompts "
    "with KL(cold∥warm) ≤ 0.05 nats, of those at least as similar to a stored one as tau."
    " Summary tokens are mapped when they are stored. Pocket's times *as written*, and "
    "ours with 32 summary tokens for story and with 4 tokens read for notes, are from "
    "another processor than its other times.",
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
        "y": "low",
        "xlabel": "share of the time to the first token that is saved",
        "ylabel": "share of prompts with KL ≤ 0.05",
    },
}
