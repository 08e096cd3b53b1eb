"""The claims of the refresh blog. study.py says what their metrics mean."""

from studies.judging import DOES_NOT_HOLD, HOLDS, Answer, Source, claim, for_each, metrics, question
from studies.results import Results
from studies.showing import Layout, columns, lines

SOURCE = Source(
    "KV-Cache Refresh Methods for Long Generation",
    "Llama-3.2-3B-Instruct and a student pruned by 45%; 50 prompts of ELI5, 1,200 new "
    "tokens; no intervals, hardware or temperature stated; its first table has OverFill "
    "at a perplexity of 4.96, its second at 1.88",
)
COMMANDS = ("refreshing", "refreshing --teacher smollm2")
METRICS = (
    metrics("perplexity", perplexity=".2f")
    | metrics(
        "mean",
        tail=".2f",
        repeated=".0%",
        characters=",.0f",
        refreshes=".1f",
        reads=".0f",
        passes=".0f",
        area=".2f",
    )
    | metrics("median", time=".2f", first_ms=".1f", tps=".3g", read_ms=".1f")
    | metrics("exact", threshold=".3f", nats=".3f")
    | metrics("series", cache_error=".2f", kl=".2f")
)
USUAL = {
    "by": "here",
    "mode": "sampled",
    "tokens": 1000,
    "model": "pocket",
    "trained": "segments",
    "texts": 50,
}
TWIN = {"model": "smollm2", "trained": "int4"}  # SmolLM2, and its twin with weights of 4 bits
ARITHMETIC = {"model": "three symbols"}
EVERY = {"mode": ["sampled", "greedy"]}
SOURCE_TPS = {"teacher": 28.21, "none": 28.51, "student": 29.41}  # its table of baselines
NOISE = 0.05  # ours: as a share
NAMES = {"none": "OverFill"}


@claim(
    SOURCE,
    "Takeaways",
    "Quality: Teacher > OverFill > Student by PPL.",
    "The large model writes best, then OverFill, then the small model",
    partly="small models; twins instead of a pruned student for SmolLM2; 192 and 1,000 tokens "
    "instead of 1,200; the source states no temperature, and its listing takes the "
    "likeliest token: it has to show both sampled and greedy",
)
def order_of_quality(results: Results) -> Answer:
    def judge(there: Results) -> tuple:
        answers, texts = [], []
        for setting in (TWIN, {"texts": 200}):
            pair = there.at(**setting)
            levels = [pair.figure(way, "perplexity") for way in ("teacher", "none", "student")]
            answers.append(pair.change("teacher", "none", "perplexity").below(0))
            change = pair.change("none", "student", "perplexity")
            answers.append(change.below(0))
            texts.append((", ".join(map(str, levels)), change))
        (real, real_change), (pocket, pocket_change) = texts
        int3 = there.at(model="smollm2", trained="int3")
        return (
            min(answers),
            f"In {there.place} texts, OverFill changes the perplexity of SmolLM2 in 4 bits by {real_change:±}",
            f"{real}: OverFill {real_change:±} against the same student alone",
            f"{int3.figure('none', 'perplexity')} and {int3.figure('student', 'perplexity')}",
            f"{pocket}: {pocket_change:±}",
        )

    answer, sentence, real, int3, pocket = for_each(results, "mode", judge)
    return (
        answer,
        sentence,
        f"SmolLM2 and its twin of 4 bits, perplexity {real}. Its twin of 3 bits {int3}. Pocket and its "
        f"student, 200 texts {pocket}",
    )


@claim(
    SOURCE,
    "Periodic refresh, quality",
    "0 (No Refresh) 1.88 … 256 1.86 … 128 1.81 … 64 1.71",
    "The more often the cache is refreshed, the better the text",
    partly="small models, 1,000 tokens instead of 1,200",
)
def periodic_quality(results: Results) -> Answer:
    steps = (
        ("periodic:256", "none"),
        ("periodic:128", "periodic:256"),
        ("periodic:64", "periodic:128"),
    )
    changes = [results.change(way, before, "perplexity") for way, before in steps]
    levels = [results.figure(way, "perplexity") for way in ("none", *(way for way, _ in steps))]
    twin = results.at(**TWIN)
    sentence = (
        f"Every 128 tokens instead of every 256, refreshes change perplexity by {changes[1]:±}"
    )
    return (
        min(change.below(0) for change in changes),
        sentence,
        f"perplexity {', '.join(map(str, levels))}; each against the one before "
        f"{', '.join(f'{change:±}' for change in changes)}. SmolLM2's twin: "
        f"{twin.figure('none', 'perplexity')}, every 64 {twin.figure('periodic:64', 'perplexity')} "
        f"({twin.change('periodic:64', 'none', 'perplexity'):±}), every 16 "
        f"{twin.figure('periodic:16', 'perplexity')} "
        f"({twin.change('periodic:16', 'none', 'perplexity'):±})",
    )


@claim(
    SOURCE,
    "Entropy Gating, results",
    "targeted refreshes achieve as low perplexity as the T=64 refresh",
    "Refreshing where the small model is unsure is as good as every 64 tokens",
    partly="small models, 1,000 tokens instead of 1,200; up to 5% (ours) is equal",
)
def entropy_gates(results: Results) -> Answer:
    change = results.change("entropy~2.5", "periodic:64", "perplexity")
    helps = results.change("periodic:64", "none", "perplexity").below(0)
    return (
        min(change.below(NOISE), helps),
        f"Against a refresh every 64 tokens, perplexity changes by {change:±}",
        f"{results.figure('entropy~2.5', 'perplexity')}, {change:±} against "
        f"{results.figure('periodic:64', 'perplexity')}; the source's three gates have 1.70, 2.19 and "
        "2.27, its T = 64 has 1.71",
    )


@claim(
    SOURCE,
    "Gated refresh policies",
    "A more intelligent approach is to refresh on-demand, only when the model shows signs"
    " of uncertainty.",
    "Refreshing on demand beats refreshing at fixed distances",
    partly="small models, 1,000 tokens instead of 1,200",
)
def on_demand(results: Results) -> Answer:
    change = results.change("entropy~7.8", "periodic:128", "perplexity")
    return (
        change.below(0),
        f"Against a refresh every 128 tokens, perplexity changes by {change:±}",
        f"perplexity by entropy {change:±} against every 128 tokens, at "
        f"{results.figure('entropy~7.8', 'refreshes')} and "
        f"{results.figure('periodic:128', 'refreshes')} refreshes a text",
    )


@claim(
    SOURCE,
    "Speculative Refresh, quality",
    "Speculative (k=8) Constant (prefill over 8 tokens) … 1.77",
    "A refresh after every 8 tokens improves the text",
    partly='small models, 1,000 tokens instead of 1,200; the source has "Only preliminary '
    'results over 1 run of k"',
)
def speculative_quality(results: Results) -> Answer:
    twin = results.at(**TWIN)
    change, twin_change = (
        there.change("speculative:8", "none", "perplexity") for there in (results, twin)
    )
    return (
        min(twin_change.below(0), change.below(0)),
        f"The perplexity of pocket's student changes by {change:±}",
        f"perplexity {twin.figure('speculative:8', 'perplexity')}, {twin_change:±} against none, by "
        f"SmolLM2's twin; {results.figure('speculative:8', 'perplexity')}, {change:±}, by pocket's "
        "student",
    )


@claim(
    SOURCE,
    "Periodic refresh, time",
    "256 … +0.7% … 128 … +2.0% … 64 … +3.9%",
    "A refresh every 64 tokens costs 4% of the time",
    partly="random weights, other hardware; up to 5% more (ours) is noise",
    at={"model": "355M", "tokens": 260},
)
def periodic_time(results: Results) -> Answer:
    claimed = {256: 0.007, 128: 0.02, 64: 0.039}
    changes = {every: results.change(f"periodic:{every}", "none", "time") for every in claimed}
    answer = min(changes[every].below(share + NOISE) for every, share in claimed.items())
    sentence = f"A refresh every 64 tokens changes the time by {changes[64]:±}"
    found = ", ".join(f"every {every} {change:±}" for every, change in changes.items())
    return answer, sentence, found


@claim(
    SOURCE,
    "Speculative Refresh, time",
    "Speculative (k=8) Constant (prefill over 8 tokens) ~1.9%",
    "A refresh after every 8 tokens costs 2% of the time",
    partly="random weights, other hardware; the source's tokens/s decide as well; up to 5% more "
    "(ours) is noise",
    at={"model": "355M", "tokens": 260},
)
def speculative_time(results: Results) -> Answer:
    overfill, limit = results.figure("none", "time"), 0.019 + NOISE
    change = results.change("speculative:8", "none", "time")
    least, least_64 = (
        results.figure(way, "time", by="source").change(overfill)
        for way in ("speculative:8", "periodic:64")
    )
    ours = [results.figure(way, "tps") for way in SOURCE_TPS]
    teacher, overfill_tps, student = SOURCE_TPS.values()
    return (
        min(change.below(limit), least.below(limit)),
        f"A refresh after every 8 tokens changes the time by {change:±}",
        f"{change:±}. By the source's own tokens/s at least {least:±}, as one pass of its teacher a "
        f"burst is no shorter than one over a single token (every 64 tokens {least_64:±}). Teacher, "
        f"OverFill and student decode {ours[0]}, {ours[1]} and {ours[2]} tokens/s, the source's "
        f"{teacher:.3g}, {overfill_tps:.3g} and {student:.3g}",
    )


@claim(
    SOURCE,
    "Why is it cheap?",
    "time ≈ N/TPS (Student decode) + Σ prefill_ms(k_r) (Teacher spikes)",
    "The time is the small model's, plus the large one's reading",
    partly="random weights; prefill(k) is a line through measured times; up to 5% (ours) is equal",
    at={"model": "355M", "tokens": 260},
)
def cost_formula(results: Results) -> Answer:
    ways = {f"periodic:{every}": f"every {every}" for every in (256, 128, 64)}
    ways["speculative:8"] = "bursts of 8"
    answers, texts = [], []
    for way, words in ways.items():
        measured, predicted = (results.figure(way, "time", by=by) for by in ("here", "formula"))
        answers.append(measured.change(predicted).within(NOISE))
        texts.append(f"{words} {measured} and {predicted}")
    found = ", ".join(texts)
    return (
        min(answers),
        f"With bursts of 8, a text takes {measured} times OverFill's time, by the formula {predicted}",
        f"times OverFill's time, measured and by the formula: {found}",
    )


@claim(
    SOURCE,
    "Variational lens",
    "Teacher-scored average log-prob satisfies −1/N Σ log p_T(y_t∣·) = 1/N Σ KL(p_T∥q_t) "
    "− 1/N Σ H[p_T]",
    "The large model's negative log-probability of a text is a divergence less an entropy",
    at=ARITHMETIC,
)
def variational_lens(results: Results) -> Answer:
    left, said, true = (results.figure(side, "nats") for side in ("left", "said", "true"))
    sentence = (
        f"Of texts by the small model, the left side is {left} nats, and the right one {said}"
    )
    return (
        left.change(said).within(0),
        sentence,
        f"for texts that the student writes, left {left} nats, right {said}; the correct right side, "
        f"KL(q∥p) + H[q], is {true}",
    )


@claim(
    SOURCE,
    "Simulation",
    "the MC Uncertainty trigger would correctly remains silent during the aleatoric "
    "(ambiguous) phase, while the entropy trigger incorrectly fires",
    "The variance of passes with dropout stays silent where a text is merely ambiguous",
    on="the source's printed output; our students on texts of pocket's world",
)
def dropout_trigger(results: Results) -> Answer:
    phase = range(250, 351)
    fires = {"variance": (112, 144, 176, 336), "entropy": (320,)}  # as the source prints them
    in_phase = {signal: len({*phase}.intersection(steps)) for signal, steps in fires.items()}
    is_so = in_phase["variance"] == 0 and in_phase["entropy"] > 0
    answer = HOLDS if is_so else DOES_NOT_HOLD
    sentence = (
        f"In the ambiguous phase, the source's run fires {in_phase['variance']} time by variance, and "
        f"{in_phase['entropy']} by entropy"
    )
    return (
        answer,
        sentence,
        "it prints that variance fires at 112, 144, 176 and 336, entropy at 320: "
        f"{in_phase['variance']} and {in_phase['entropy']} of these "
        "lie in the phase, 250 to 350. The tokens where our models differ most are told by U(t) "
        f"with an area under ROC of {results.figure('dropout', 'area', trained='dropout'):±}, by "
        f"entropy with {results.figure('entropy', 'area', trained='dropout'):±}",
    )


@question(
    "Does OverFill write better than a small model that was trained as long to write alone?",
)
def rival_trained_alone(results: Results) -> Answer:
    overfill = results.figure("none", "perplexity")
    rival = results.figure("student", "perplexity", trained="alone")
    change = overfill.change(rival)
    return (
        change.below(0),
        f"Against that model, OverFill changes perplexity by {change:±}",
        f"perplexity {overfill} and {rival}: {change:±}",
    )


@question(
    "Does the published code write as well as the published formulas?",
)
def published_listings(results: Results) -> Answer:
    every_64 = results.change("published:64", "periodic:64", "perplexity")
    bursts = results.change("published:8", "speculative:8", "perplexity")
    return (
        min(every_64.below(NOISE), bursts.below(NOISE)),
        f"Refreshed every 64 tokens, the code changes perplexity by {every_64:±}",
        f"perplexity every 64 {every_64:±}, every 8 {bursts:±}. One listing feeds the prompt's last "
        "token again; the other begins from an empty list, and splices entries of a token that the "
        "student hasn't read. We ran the first one's start and the second one's refresh",
    )


TABLE = Layout(
    "The teacher's perplexity of sampled texts, with 95% intervals over prompts, the "
    "share of their 3-grams that are repetitions, the mean log-probability of the last 50"
    " tokens in nats, and characters. SmolLM2's students are its twins, with weights of 4"
    " and 3 bits; greedy texts of both repeat themselves, so that their low perplexity "
    "says little. Pocket's student is trained on segments; *trained alone*: one that "
    "never read a teacher's cache. *published* are the source's listings; ~7.8: set, on "
    "other texts, to fire 7.8 times per 1,000 tokens. Time of pocket's single texts in "
    "turn, over OverFill's, and by the cost formula. Last, as in the source's table of "
    "baselines, the time to the first token and tokens/s after it, at 355M's size with "
    "random weights.",
    [
        "teacher",
        "none",
        "student",
        "(?!dropout|entropy~15.6).*",
        lines("dropout:.*", trained="dropout"),
    ],
    [
        *columns(
            "SmolLM2, int4",
            {
                "perplexity": "perplexity ±",
                "repeated": "repeated",
                "last 50 tokens": "tail",
                "characters": "characters",
            },
            **TWIN,
        ),
        *columns(
            "SmolLM2, int4, greedy",
            {"perplexity": "perplexity", "repeated": "repeated"},
            **TWIN,
            mode="greedy",
        ),
        *columns("SmolLM2, int3", {"perplexity": "perplexity"}, model="smollm2", trained="int3"),
        *columns("pocket", {"perplexity": "perplexity ±"}),
        *columns("pocket, trained alone", {"perplexity": "perplexity"}, trained="alone"),
        *columns("pocket", {"refreshes": "refreshes", "time": "time ±"}),
        *columns("pocket, by formula", {"time": "time"}, by="formula"),
        *columns(
            "355M",
            {"ms to the first token": "first_ms", "tokens/s": "tps"},
            model="355M",
            tokens=260,
        ),
    ],
)
FIGURES = {
    "quality": {
        "title": "Pocket, sampled: quality (95% intervals) and time",
        "x": "time",
        "y": "perplexity",
        "xlabel": "time of a text, over OverFill's in the same turn (medians)",
        "ylabel": "the teacher's perplexity",
        "legend": {
            "teacher": "the teacher alone",
            "OverFill": "OverFill: no refresh",
            "student": "the student alone",
            "periodic": "periodic:T, every T tokens",
            "windowed-listing": "windowed-listing:64:16,\n64 read, the last 16 replaced",
            "windowed": "windowed:64:16,\nonly the last 16 of 64 read",
            "speculative": "speculative:8, after bursts of 8",
            "entropy": "entropy~N, when the student\nis unsure, N times in 1,000 tokens",
            "probe": "probe:32~7.8, when it differs from the\nteacher, which reads along every 32 tokens",
        },
        "ways": ["teacher", "none", "student", "(?!published|periodic:16|periodic:32).*"],
    },
    "cache_error": {
        "title": "Pocket: error of the written part of the cache, E_t, on equal texts",
        "y": "cache_error",
        "xlabel": "tokens written",
        "ylabel": "|student's cache - teacher's| / |teacher's|",
        "legend": {
            "OverFill": "OverFill: no refresh",
            "periodic:64": "periodic:64, every 64 tokens",
            "windowed-listing:64:16": "windowed-listing:64:16,\nthe last 16 of 64",
            "speculative:8": "speculative:8, after bursts of 8",
            "entropy~7.8": "entropy~7.8, when the student\nis unsure, 7.8 times in 1,000 tokens",
        },
    },
}
