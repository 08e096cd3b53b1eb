"""Do the stories that a model writes hold together? Read them back with the corpus's own sentences.

A story of the corpus is made of templates that share one set of values. Its threads are details that it states early
and needs again at its end: who owns the mug, the colour of the door, how many crates (see THREADS in
sentences/stories.py). Every template becomes a pattern here; what the patterns find in a story is compared. A story
holds together if it has none of these faults:

meet ... hide  a thread is paid off otherwise than it was stated
he or she      a pronoun isn't that of its person
stranger       what the two travellers do is done by somebody else, or the town that they left is another
two roles      somebody whom the travellers meet is one of the two
from nowhere   a thread is paid off that was never stated
left open      two threads or more are never paid off (the corpus itself leaves one open where a question asks for it)
unread         a sentence is none of the corpus's
"""

import re
from collections import defaultdict
from collections.abc import Sequence
from functools import cache
from itertools import groupby
from typing import NamedTuple

import torch
from tiktoken import Encoding

from gpt_kv_cache import GPT, generate
from pocket import corpus
from pocket.sentences.stories import (
    CREATURE_ASIDES,
    ENDINGS,
    INCIDENTS,
    OPENINGS,
    PAYOFFS,
    STATEMENTS,
)

NAME = r"(?-i:(?!(?:They|She|He|It|The)\b)[A-Z][a-z]+)"
FIELDS = {
    **dict.fromkeys(("a", "b", "c", "d", "town", "place"), NAME),
    **dict.fromkeys(("n1", "n2", "goods", "word", "colour", "rel"), "[a-z]+"),
    **dict.fromkeys(("obj", "obj2"), "[a-z]+ [a-z]+"),
    **dict.fromkeys(("when", "epithet", "epithet2", "fact"), r"[^.\n\"]+?"),
    "cargo": "[a-z]+ of [a-z]+",
    "creature_a": "an? [a-z]+",
    "they": "she|he",
    "them": "her|him",
    "their": "her|his",
}
ANY = r"[a-z' ]+?"  # all other fields, in whatever words: what is no door's colour or no place must disagree, not hide
START = r"(?:^|(?<=[.!?\"] ))"  # of a sentence
# Either traveller may do this.
FREE = dict.fromkeys(("", "meet", "word", "door", "errand", "count"), "ab")


class Statement(NamedTuple):
    """A sentence, or a few, of a story that a template of the corpus has made or could have made."""

    kind: str  # opening, incident, ending, state or pay
    thread: str
    span: tuple[int, int]
    values: dict[str, list[str]]  # by field, one value for each time that the template names it

    def said(self, *fields: str) -> set[str]:
        """Return all that stands in these fields."""
        return {value for field in fields for value in self.values.get(field, [])}


def pattern(template: str) -> tuple[re.Pattern[str], list[str]]:
    """Return a pattern of all that a template can become, and the field of each of its groups."""
    fields = []

    def piece(match: re.Match[str]) -> str:
        if field := match["field"]:
            fields.append(field.lower())
            words = FIELDS.get(fields[-1].rpartition(".")[2], ANY)
            return f"{'an? ' if match['article'] else ''}({words})"
        if match["loose"]:
            return " ?"
        return {"[": "(?:", "]": ")", "|": "|"}.get(match[0]) or re.escape(match[0])

    template = template.replace("{they_said}", f"[{'|'.join(CREATURE_ASIDES[0])}]")
    text = re.sub(
        r"(?P<article>\ba )?{(?P<field>[\w.]+)}|(?P<loose> (?=\[)|(?<=\]) )|.", piece, template
    )
    return re.compile(START + text, re.IGNORECASE | re.MULTILINE), fields


@cache
def patterns() -> list[tuple[str, str, re.Pattern[str], list[str]]]:
    """Return (kind, thread, pattern, fields) of every template of a story."""
    kinds = {"opening": {"": OPENINGS}, "incident": {"": INCIDENTS}, "ending": {"": ENDINGS}}
    kinds |= {"state": STATEMENTS, "pay": PAYOFFS}
    found = []
    for kind, banks in kinds.items():
        for thread, (templates, _) in banks.items():
            found += [(kind, thread, *pattern(template)) for template in templates]
    return found


def statements(story: str) -> list[Statement]:
    """Return what the templates find in a story's prose, in its order."""
    found = []
    for kind, thread, regex, fields in patterns():
        for match in regex.finditer(story):
            values = defaultdict(list)
            for field, value in zip(fields, match.groups(), strict=True):
                if value is not None:
                    values[field].append(value.lower())
            found.append(Statement(kind, thread, match.span(), dict(values)))
    return sorted(found, key=lambda reading: reading.span)


class Verdict(NamedTuple):
    """The kinds of faults of a story, each once, and how often a thread is paid off, and as it was stated."""

    faults: list[str]
    paid: int
    right: int


def misnames(reading: Statement, female: dict[str, bool]) -> bool:
    """Whether a pronoun isn't that of its person; who isn't known yet is what the first pronoun says."""
    wrong = False
    for field, pronouns in reading.values.items():
        person, dot, _ = field.partition(".")
        if dot and person in reading.values:
            name = reading.values[person][0]
            for pronoun in pronouns:
                she = pronoun in ("she", "her")
                if female.setdefault(name, she) != she:
                    wrong = True
    return wrong


def contradicts(reading: Statement, known: dict[str, str]) -> bool:
    """Whether a statement says of its thread, field by field, something else than what is known; the rest it adds."""
    wrong = False
    for field, said in reading.values.items():
        if "." in field or field in FREE.get(reading.thread, ""):
            continue
        if {*said} != {known.setdefault(field, said[0])}:
            wrong = True
    return wrong


def judge(story: str) -> Verdict:
    """Read a story's prose back, and compare what its sentences say."""
    found = statements(story)
    sexes = {p.name.lower(): p.they == "she" for people in corpus.PEOPLE.values() for p in people}
    opening = [reading for reading in found if reading.kind == "opening"]
    travellers = {name for reading in opening for name in reading.said("a", "b")}
    towns = {name for reading in opening for name in reading.said("town")}
    told = defaultdict(dict)  # what is known, by thread and field
    faults, unread, paid = set(), list(story), []
    for reading in found:
        begin, end = reading.span
        unread[begin:end] = " " * (end - begin)
        thread = reading.thread
        if reading.said(*FREE.get(thread, "")) - travellers or reading.said("town") - towns:
            faults.add("stranger")
        if reading.said("c", "d") & travellers:
            faults.add("two roles")
        if misnames(reading, sexes):
            faults.add("he or she")
        if not thread:
            continue
        stated = thread in told
        wrong = contradicts(reading, told[thread])
        if wrong:
            faults.add(thread)
        if reading.kind == "pay":
            paid.append(stated and not wrong)
            if not stated:
                faults.add("from nowhere")
    if len(told.keys() - {reading.thread for reading in found if reading.kind == "pay"}) > 1:
        faults.add("left open")
    if "".join(unread).strip():
        faults.add("unread")
    return Verdict(sorted(faults), len(paid), sum(paid))


def openings(split: str, n: int) -> list[str]:
    """Return the first sentences of n stories of a split: who sets out, and from where."""
    pens = (corpus.Pen(split, f"told/{i}") for i in range(n))
    return [pen.write_sentence(OPENINGS, **corpus.draw_plot(pen).values) for pen in pens]


def written(
    model: GPT, tokenizer: Encoding, prompts: list[Sequence[int]], **options: object
) -> list[str]:
    """Return the text that a model writes after each of some prompts of as many tokens."""
    new = generate(model, torch.tensor(prompts), 400, stop_id=tokenizer.eot_token, **options)
    rows = torch.cat([*new], dim=1).tolist()
    return [tokenizer.decode(row).partition("<|endoftext|>")[0] for row in rows]


def write(
    model: GPT, tokenizer: Encoding, prompts: list[str], temperature: float = 0.0
) -> list[str]:
    """Return the prompts, each with the rest of a story's prose as the model goes on."""
    options = {"temperature": temperature, "generator": torch.Generator().manual_seed(0)}
    encoded = [tuple(tokenizer.encode_ordinary(prompt)) for prompt in prompts]
    stories = {}
    for _, group in groupby(sorted({*encoded}, key=lambda ids: (len(ids), ids)), key=len):
        batch = list(group)
        stories |= zip(batch, written(model, tokenizer, batch, **options), strict=True)
    texts = [stories[ids].partition("\n\n")[0] for ids in encoded]
    return [prompt + text for prompt, text in zip(prompts, texts, strict=True)]


def measure(stories: list[str]) -> dict[str, float]:
    """Return the share of the stories that hold together, the share of the threads that are paid off as they were
    stated, of all that are paid off, and how many those are in a story."""
    faults, paid, right = zip(*map(judge, stories), strict=True)
    return {
        "coherent_share": faults.count([]) / len(stories),
        "paid_share": sum(right) / max(1, sum(paid)),
        "paid_per_story": sum(paid) / len(stories),
    }
