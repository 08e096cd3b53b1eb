"""Do the stories that a model writes hold together? Read them back with the corpus's own sentences.

A story of the corpus is made of templates that share one set of values. Its threads are details that it states early
and needs again at its end: who owns the mug, the colour of the door, how many crates (see STATEMENTS in
sentences/stories.py). Every template becomes a pattern here; what the patterns find in a story is compared. A story
holds together if it has none of these faults:

meet ... hide  a thread, here by its name, is paid off differently from how it was stated
he or she      a pronoun doesn't fit its person
stranger       what the two travellers do is done by somebody else, or they left another town
two roles      somebody whom the travellers meet is one of the two
from nowhere   a thread is paid off that was never stated
left open      two threads or more are never paid off (the corpus itself leaves one open where a
               question asks for it)
unread         a sentence isn't one that the corpus could have made
"""

import re
from collections import defaultdict
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
# All other fields match any words: a wrong word, such as one that is no colour, is read, and found.
ANY = r"[a-z' ]+?"
START = r"(?:^|(?<=[.!?\"] ))"  # of a sentence
# By thread, the fields that may be either traveller.
INTERCHANGEABLE = dict.fromkeys(("", "meet", "word", "door", "errand", "count"), "ab")


class Statement(NamedTuple):
    """A sentence, or a few, of a story that a template of the corpus has made or could have made."""

    kind: str  # opening, incident, ending, state or pay
    thread: str
    span: tuple[int, int]
    values: dict[str, list[str]]  # by field, one value for each time that the template names it

    def said(self, *fields: str) -> set[str]:
        """Return all values of these fields."""
        return {value for field in fields for value in self.values.get(field, [])}


def pattern_of(template: str) -> tuple[re.Pattern[str], list[str]]:
    """Return a pattern that matches all that a template can become, and the field of each group."""
    fields = []

    def regex_of_piece(match: re.Match[str]) -> str:
        if field := match["field"]:
            fields.append(field.lower())
            field_pattern = FIELDS.get(fields[-1].rpartition(".")[2], ANY)
            return f"{'an? ' if match['article'] else ''}({field_pattern})"
        if match["loose"]:
            return " ?"
        return {"[": "(?:", "]": ")", "|": "|"}.get(match[0]) or re.escape(match[0])

    template = template.replace("{they_said}", f"[{'|'.join(CREATURE_ASIDES[0])}]")
    text = re.sub(
        r"(?P<article>\ba )?{(?P<field>[\w.]+)}|(?P<loose> (?=\[)|(?<=\]) )|.",
        regex_of_piece,
        template,
    )
    return re.compile(START + text, re.IGNORECASE | re.MULTILINE), fields


@cache
def story_patterns() -> list[tuple[str, str, re.Pattern[str], list[str]]]:
    """Return kind, thread, pattern and fields of all templates of a story."""
    kinds = {"opening": {"": OPENINGS}, "incident": {"": INCIDENTS}, "ending": {"": ENDINGS}}
    kinds |= {"state": STATEMENTS, "pay": PAYOFFS}
    patterns = []
    for kind, banks in kinds.items():
        for thread, bank in banks.items():
            patterns += [(kind, thread, *pattern_of(template)) for template in bank.train]
    return patterns


def find_statements(story: str) -> list[Statement]:
    """Return what the templates find in a story's prose, in its order."""
    statements = []
    for kind, thread, pattern, fields in story_patterns():
        for match in pattern.finditer(story):
            values = defaultdict(list)
            for field, value in zip(fields, match.groups(), strict=True):
                if value is not None:
                    values[field].append(value.lower())
            statements.append(Statement(kind, thread, match.span(), values))
    return sorted(statements, key=lambda statement: statement.span)


class Verdict(NamedTuple):
    """The kinds of faults of a story, each once; how often a thread is paid off, and how often as
    it was stated."""

    faults: list[str]
    paid: int
    paid_as_stated: int


def has_wrong_pronoun(statement: Statement, female: dict[str, bool]) -> bool:
    """Return whether a pronoun doesn't fit its person. A person whose name isn't in `female` is
    added, as the first pronoun says."""
    is_wrong = False
    for field, pronouns in statement.values.items():
        person, dot, _ = field.partition(".")
        if dot and person in statement.values:
            name = statement.values[person][0]
            for pronoun in pronouns:
                she = pronoun in ("she", "her")
                if female.setdefault(name, she) != she:
                    is_wrong = True
    return is_wrong


def contradicts(statement: Statement, known: dict[str, str]) -> bool:
    """Return whether a statement contradicts what is known of its thread, field by field. Fields that aren't known yet
    are added."""
    is_wrong = False
    for field, values in statement.values.items():
        if "." in field or field in INTERCHANGEABLE.get(statement.thread, ""):
            continue
        if {*values} != {known.setdefault(field, values[0])}:
            is_wrong = True
    return is_wrong


def judge(story: str) -> Verdict:
    """Read a story's prose back, and compare what its sentences say."""
    statements = find_statements(story)
    female = {}
    for people in corpus.PEOPLE.values():
        female |= {person.name.lower(): person.they == "she" for person in people}
    travellers, towns, threads_paid = set(), set(), set()
    for statement in statements:
        if statement.kind == "opening":
            travellers |= statement.said("a", "b")
            towns |= statement.said("town")
        if statement.kind == "pay":
            threads_paid.add(statement.thread)
    known = defaultdict(dict)  # by thread and field
    faults, unread, paid = set(), list(story), []
    for statement in statements:
        begin, end = statement.span
        unread[begin:end] = " " * (end - begin)
        thread = statement.thread
        doers = statement.said(*INTERCHANGEABLE.get(thread, ""))
        if doers - travellers or statement.said("town") - towns:
            faults.add("stranger")
        if statement.said("c", "d") & travellers:
            faults.add("two roles")
        if has_wrong_pronoun(statement, female):
            faults.add("he or she")
        if not thread:
            continue
        stated = thread in known
        is_wrong = contradicts(statement, known[thread])
        if is_wrong:
            faults.add(thread)
        if statement.kind == "pay":
            paid.append(stated and not is_wrong)
            if not stated:
                faults.add("from nowhere")
    if len(known.keys() - threads_paid) > 1:
        faults.add("left open")
    if "".join(unread).strip():
        faults.add("unread")
    return Verdict(sorted(faults), len(paid), sum(paid))


def story_openings(split: str, n: int) -> list[str]:
    """Return the first sentences of n stories of a split: who sets out, and from where."""
    pens = (corpus.Pen(split, f"told/{i}") for i in range(n))
    return [pen.write_sentence(OPENINGS, **corpus.draw_plot(pen).values) for pen in pens]


def finish_stories(
    model: GPT, tokenizer: Encoding, prompts: list[str], temperature: float = 0.0
) -> list[str]:
    """Return the prompts, each continued by the model to the end of the story's prose."""
    generator = torch.Generator().manual_seed(0)
    encoded = [tuple(tokenizer.encode_ordinary(prompt)) for prompt in prompts]
    continuations = {}
    for _, group in groupby(sorted({*encoded}, key=lambda ids: (len(ids), ids)), key=len):
        batch = list(group)  # prompts of equally many tokens
        tokens = generate(
            model,
            torch.tensor(batch),
            400,
            temperature=temperature,
            stop_ids=[tokenizer.eot_token],
            generator=generator,
        )
        for ids, row in zip(batch, torch.cat([*tokens], dim=1).tolist(), strict=True):
            text = tokenizer.decode(row).partition("<|endoftext|>")[0]
            continuations[ids] = text.partition("\n\n")[0]
    return [prompt + continuations[ids] for prompt, ids in zip(prompts, encoded, strict=True)]


def measure(stories: list[str]) -> dict[str, float]:
    """Return the share of stories that hold together, the share of paid-off threads that are paid
    off as they were stated, and the number of paid-off threads per story."""
    faults, paid, paid_as_stated = zip(*map(judge, stories), strict=True)
    return {
        "coherent_share": faults.count([]) / len(stories),
        "paid_share": sum(paid_as_stated) / max(1, sum(paid)),
        "paid_per_story": sum(paid) / len(stories),
    }
