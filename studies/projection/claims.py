"""The claims of CP-KVP. study.py says what their metrics mean."""

from studies.judging import Answer, Source, claim, for_each, metrics, question
from studies.results import Results
from studies.showing import Layout, columns

SOURCE = Source(
    "Cross-Prompt KV Projection Warm-Start",
    "no results; proposed are GPT-2 small and medium, Pythia-160M and 410M; Quora pairs, "
    "PAWS, templated prompts; m of 4 to 32",
)
COMMANDS = ("projection", "projection --model smollm2")
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
    return (
        answer,
        sentence,
        f"as written {written}. With a smaller stage 1 {smaller}. By the similar prompt's own "
        f"prediction {neighbour}",
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
    partly="random weights; six lengths of ours, on which the average depends; a short prompt that is "
    "mapped at the start crosses the source's line of failure, 10%",
    at={"model": "124M"},
)
def latency(results: Results) -> Answer:
    mapped, stored = (results.figure(way, "saved") for way in ("mapped", "stored"))
    lengths = (32, 64, 128, 256, 512, 1000)
    by_length = {
        way: ", ".join(f"{results.figure(way, 'saved', tokens=length)}" for length in lengths)
        for way in ("mapped", "stored")
    }
    return (
        min(mapped.above(0.35), stored.above(0.35)),
        f"On average over six lengths, the first token comes {mapped:±} sooner",
        "retrieval included, mean over 32, 64, 128, 256, 512 and 1,000 tokens: mapped at every start "
        f"{mapped:±}, mapped at storage {stored:±}. By length, at the start {by_length['mapped']}; at "
        f"storage {by_length['stored']}",
    )


@claim(
    SOURCE,
    "Abstract",
    "trained with simple ridge regressions",
    "Both stages are simple ridge regressions",
    at=ARITHMETIC,
)
def simple_ridge(results: Results) -> Answer:
    curvature = results.figure("stage-1", "curvature")
    return (
        curvature.below(0.001),
        f"A third difference of stage 1's loss is {curvature} of it, and a regression's 0",
        "stage 2 is one; stage 1's loss goes through a softmax: its third difference along a line "
        f"of maps is {curvature} of it, a regression's 0. We use "
        "L-BFGS",
    )


@claim(
    SOURCE,
    "Why a linear map can work",
    "Linearity is enough for warm-start: We need only a good initial readout for the first step(s)",
    "A linear map is enough for the first token",
    partly="the similar prompt is given; the threshold is the whole method's; stage 1's penalty for "
    "story and notes is the least tried; as written, m other than 8 on capitals and story only",
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
            f"With the similar prompt given, {written:±} of first tokens on {there.place} are right",
            f"{written:±}",
            f"{there.figure('proposed', 'low', on='given')}",
            f"{there.figure('stage1-written', 'low', on='fit')}",
            f"{there.figure('stage1-written', 'penalty')}",
            f"{there.figure('written', 'penalty')}",
        )

    answer, sentence, *found = for_each(results, "kind", judge)
    written, smaller, alone, penalty_1, penalty_2 = found
    capitals, story = (
        f"{there.figure('written', 'low', on='given', m=16)} and "
        f"{there.figure('written', 'low', on='given', m=32):±}"
        for there in (results, results.at(kind="story"))
    )
    return (
        answer,
        sentence,
        f"KL ≤ 0.05 as written on {written}. With 16 and 32 summary tokens, on capitals {capitals}, on "
        f"story {story}. With a smaller stage 1 on {smaller}. Stage 1 as written alone, on the prompts "
        f"of its fit, {alone}. Penalties of stage 1 (1e-06 to 0.1) {penalty_1}. Of stage 2 (0.0001 to "
        f"1,000) {penalty_2}",
    )


@claim(
    SOURCE,
    "Complexity and integration",
    "Storage: O(L×H×m×d) per cached prompt (tiny vs full T×d).",
    "The summary tokens of a prompt are tiny beside its cache",
    partly="less than half is tiny (ours)",
)
def storage(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        share = there.figure("summary", "share")
        return (
            share.below(0.5),
            f"On {there.place}, summary tokens take {share} of a prompt's cache",
            f"{share}",
            f"{there.figure('stage1-written', 'bytes')}",
        )

    answer, sentence, share, bytes_of_stage_1 = for_each(results, "kind", judge)
    return (
        answer,
        sentence,
        f"{share} of a prompt's cache. Not counted, bytes of stage 2: "
        f"{results.figure('written', 'bytes')}; of stage 1: {bytes_of_stage_1}",
    )


@claim(
    SOURCE,
    "Discussion",
    "Retrieval gating is crucial: far neighbors must fall back to cold start.",
    "Prompts that resemble no stored one must be read as usual",
    partly="a smaller stage 1; pocket: the nearest stored prompt, however far; capitals: always "
    "that of the same country, six prompts a third",
)
def gating(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        least, most = (there.figure("proposed", "kl", on=third) for third in ("lowest", "highest"))
        low = there.figure("proposed", "low", on="top50")
        change = least.change(most)
        return (
            change.above(0),
            f"On {there.place}, the least similar third differs from the most by {change:±} nats",
            f"{least:±}, {most:±}",
            f"{low}",
        )

    answer, sentence, thirds, top = for_each(results, "kind", judge)
    return (
        answer,
        sentence,
        f"KL of the least and the most similar third: {thirds} nats. With tau at the median "
        f"similarity, ≤ 0.05 on {top}",
    )


@claim(
    SOURCE,
    "Limitations",
    "Very small m can underfit",
    "Too few summary tokens can be too coarse",
    partly="with the penalties for m = 8; as written, other m on capitals and story only; either "
    "stage 1 and one kind are enough, although more tokens are worse on others",
)
def few_summary_tokens(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        answers = []
        for way, fewer in (("proposed", 1), ("written", 4)):
            if there.find(way, "kl", on="given", m=fewer):
                few, many = (there.figure(way, "kl", on="given", m=m) for m in (fewer, 32))
                answers.append(few.change(many).above(0))
        few, many = (there.figure("proposed", "kl", on="given", m=m) for m in (1, 32))
        change = few.change(many)
        return (
            max(answers),
            f"On {there.place}, 1 summary token instead of 32 changes the KL by {change:±} nats",
            f"{few:±}, {many:±}",
        )

    answer, sentence, smaller = for_each(results, "kind", judge, max)
    capitals, story = (
        ", ".join(f"{there.figure('written', 'kl', on='given', m=m):±}" for m in (4, 8, 16, 32))
        for there in (results, results.at(kind="story"))
    )
    return (
        answer,
        sentence,
        f"KL with a smaller stage 1 and 1 or 32 summary tokens: {smaller} nats. As written, with the "
        f"source's 4, 8, 16 and 32, on capitals {capitals}; on story {story}",
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
        written, smaller, learned = (
            there.figure(way, "kl", on="given") for way in ("written", "proposed", "learned")
        )
        answer = max(written.change(learned).below(0), smaller.change(learned).below(0))
        return (
            answer,
            f"On {there.place}, the KL is {written} nats, and by shared tokens {learned}",
            f"{written:±}, {smaller}, {learned:±}",
        )

    answer, sentence, found = for_each(results, "kind", judge)
    return (
        answer,
        sentence,
        "the similar prompt given, KL as written, with a smaller stage 1 and by that baseline: "
        f"{found} nats",
    )


@question(
    "Do eight tokens come sooner, if the projected cache writes them until the exact one is ready?",
)
def eighth_token(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        change = there.change("until-ready", "cold", "eighth_ms")
        taken = there.figure("until-ready", "eighth", kind="all")
        answer = min(change.below(0), taken.below(0.95))
        return (
            answer,
            f"The eighth token takes {taken:±} times as long as after a cold start",
            f"{there.figure('until-ready', 'from_summary')}",
        )

    answer, sentence, found = for_each(results, "kind", judge)
    return (
        answer,
        sentence,
        f"SmolLM2 takes {results.figure('until-ready', 'eighth_ms')} ms instead of "
        f"{results.figure('cold', 'eighth_ms')}; over five kinds of prompts it is "
        f"{results.figure('until-ready', 'eighth', kind='all'):±} times a cold start's time "
        f"(median and range), while a second core reads the prompt. But {found} of the eight "
        "tokens are written from summary tokens. If only the first one is, it takes "
        f"{results.figure('second-exact', 'eighth_ms')} ms and "
        f"{results.figure('second-exact', 'eighth', kind='all'):±} times: the second token waits "
        "for the prefill",
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
        "y": "low",
        "xlabel": "share of the time to the first token that is saved",
        "ylabel": "share of prompts with KL ≤ 0.05",
    },
}
