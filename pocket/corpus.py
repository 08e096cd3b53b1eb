"""An invented world and the documents about it: the text on which pocket is trained and measured.

Every document is a pure function of (seed, split, index), so that a run can be resumed, or cut
among workers, by index alone. Two kinds of knowledge are kept apart on purpose:

closed book  facts of the world (towns, creatures), the same in every split: learned in training
             and asked in held-out text in words that training never used;
in context   names, places, objects and numbers that one document states early and needs late:
             a model that loses the start of its prompt must get them wrong.

Held-out splits have people and objects of their own, and ask in wordings of their own, built of words
that training also uses. Their prose is worded as in training, so that perplexity measures what a model
makes of new names and things rather than how it likes a new phrase.
"""

import sys

if __name__ == "__main__":
    sys.path.insert(0, f"{sys.path[0]}/..")  # run as a file, from any folder

import re
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from pocket.sentences import articles, dialogues, explanations, lists, stories
from pocket.sentences.nouns import EPITHET, THINGS, WHEN, WORDS
from pocket.sentences.templates import Bank
from pocket.sentences.world import ASKS, CREATURE_FACTS, CREATURES, FOLLOWS, SAYS, TOWN_FACTS, TOWNS
from support.cli import CommandLine, whole_number

SPLITS = ("train", "valid", "test")
WORLD, FACTS = (
    {"town": TOWNS, "creature": CREATURES},
    {"town": TOWN_FACTS, "creature": CREATURE_FACTS},
)


@dataclass(frozen=True)
class Document:
    """One text of the corpus, with the name of the function that made it."""

    kind: str
    text: str


@dataclass(frozen=True)
class Question:
    """A prompt that ends with "Answer:" and its reference; the full text is prompt + " " + answer."""

    family: str  # the same for all paraphrases of one question
    paraphrase: int
    prompt: str
    answer: str


@dataclass(frozen=True)
class Person:
    """An invented person; templates write {a}, {a.they}, {a.them} and {a.their}."""

    name: str
    female: bool

    def __str__(self) -> str:
        return self.name

    they = property(lambda self: "she" if self.female else "he")
    them = property(lambda self: "her" if self.female else "him")
    their = property(lambda self: "her" if self.female else "his")


# --- Choosing and filling -------------------------------------------------------------------------------


def english(text: str) -> str:
    """Mend spaces, write "an" before vowels, and put capitals at the starts of sentences."""
    text = re.sub(r" +", " ", text).replace(" ,", ",").replace(" .", ".").strip()
    text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)
    return re.sub(r'(^|[.!?] |[.]" )("?)([a-z])', lambda m: m[1] + m[2] + m[3].upper(), text)


def asked(question: str, after: str = "") -> str:
    """A prompt: a text and a question about it, or the question alone."""
    return after + "\n\n" * bool(after) + f"Question: {question}\nAnswer:"


def qa(question: str, answer: str) -> str:
    return f"{asked(question)} {answer}"


def _people() -> dict[str, list[Person]]:
    """Cut one fixed shuffle of all syllable names into the casts of the three splits."""
    taken = {
        *TOWNS,
        *WORDS["petname"],
        *(town[key] for town in TOWNS.values() for key in ("river", "founder")),
    }
    people = [
        Person(start + end, sex == "woman")
        for start in WORDS["start"]
        for sex in ("woman", "man")
        for end in WORDS[sex]
        if start + end not in taken
    ]
    Random("people").shuffle(people)
    return {"train": people[:-220], "valid": people[-220:-110], "test": people[-110:]}


PEOPLE = _people()
OBJECTS = {
    split: [
        f"{adjective} {noun}"
        for adjectives, *of_splits in THINGS
        for noun in of_splits[i].split()
        for adjective in adjectives.split() + WORDS["paint"]
    ]
    for i, split in enumerate(SPLITS)
}


class Pen:
    """The random choices of one document: all of them follow from its split and its key."""

    def __init__(self, split: str, key: str) -> None:
        if split not in SPLITS:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {split!r}")
        self.split = split
        self.side = 0 if split == "train" else 1
        self.rng = Random(key)
        self.pick = self.rng.choice

    def chance(self, p: float) -> bool:
        return self.rng.random() < p

    def part(self, templates: Bank, **values: object) -> str:
        """Choose a template and its [this|that] alternatives, and fill its {fields}."""
        text = self.pick(templates[self.side])
        while "[" in text:
            text = re.sub(r"\[([^][]*)\]", lambda m: self.pick(m[1].split("|")), text)
        return text.format(**values)

    def fill(self, fields: str) -> dict[str, str]:
        """A word for each of these fields."""
        return {field: self.pick(WORDS[field]) for field in fields.split()}

    def say(self, templates: Bank, **values: object) -> str:
        """The same as whole sentences."""
        return english(self.part(templates, **values))

    def cast(self, n: int) -> list[Person]:
        """n people with different initials; the second is not of the first one's sex, so that pronouns are clear."""
        people: list[Person] = []
        while len(people) < n:
            new = self.pick(PEOPLE[self.split])
            if new.name[0] not in [p.name[0] for p in people] and (
                len(people) != 1 or new.female != people[0].female
            ):
                people.append(new)
        return people

    def things(self, n: int) -> list[str]:
        """n objects with different nouns."""
        things: dict[str, str] = {}
        while len(things) < n:
            thing = self.pick(OBJECTS[self.split])
            things.setdefault(thing.split()[1], thing)
        return list(things.values())

    def towns(self, n: int) -> list[str]:
        return self.rng.sample(list(TOWNS), n)

    def epithet(self, town: str) -> str:
        return self.part(EPITHET, **TOWNS[town])

    def topic(self) -> tuple[str, str]:
        """A town or a creature: its kind and its name."""
        kind = "town" if self.chance(0.75) else "creature"
        return kind, self.pick(list(WORLD[kind]))

    def fact(self, kind: str, name: str, key: str, subject: str, again: str | None = None) -> str:
        """A statement of one fact, as a part; `again` is how templates name the town or animal inside a sentence."""
        return self.part(SAYS[key], **{**world(kind, name), kind: again or name, "s": subject})


def world(kind: str, name: str) -> dict[str, str]:
    """All facts of a town or a creature as template values, its name among them."""
    return {kind: name, "creature_a": f"a {name}", **WORLD[kind][name]}


def named(kind: str, name: str) -> str:
    return name if kind == "town" else f"the {name}"


# --- One function for each kind of document -------------------------------------------------------------


def scene(pen: Pen) -> tuple[dict, list[str]]:
    """What happens in a story: its template values and its threads."""
    a, b, c, d = pen.cast(4)
    obj, obj2 = pen.things(2)
    n1, n2 = pen.rng.sample(WORDS["number"], 2)
    town, place = pen.towns(2)
    v = dict(
        a=a,
        b=b,
        c=c,
        d=d,
        obj=obj,
        obj2=obj2,
        n1=n1,
        n2=n2,
        town=town,
        place=place,
        when=pen.part(WHEN, any_month=pen.pick([t["month"] for t in TOWNS.values()])),
        rel=pen.pick(["sister" if b.female else "brother", *WORDS["rel"]]),
    )
    v |= pen.fill("job goods cargo spot word colour landmark hour errand")
    v |= dict(epithet=pen.epithet(town), epithet2=pen.epithet(place))
    v["Word"], v["Hour"] = v["word"].capitalize(), v["hour"].capitalize()
    creature = pen.pick(list(CREATURES))
    fact = pen.fact("creature", creature, pen.pick(CREATURE_FACTS), f"the {creature}")
    v["creature_a"], v["they_said"] = (
        f"a {creature}",
        pen.part(stories.CREATURE_ASIDE, fact=fact, **v),
    )

    return v, pen.rng.sample(list(stories.THREADS), pen.pick([2, 3, 3, 4]))


def prose_of(pen: Pen, v: dict, threads: list[str], mute: bool) -> str:
    """A story in words; if mute, its first thread is stated but never paid off."""
    early = [pen.say(stories.STATES[t], **v) for t in pen.rng.sample(threads, len(threads))]
    middle: list[str] = []
    while len(middle) < pen.pick([1, 1, 2, 2, 3]):
        incident = pen.say(stories.INCIDENTS, **v)
        if not any(incident[:12] == other[:12] for other in middle):
            middle.append(incident)
    late = [
        pen.say(stories.PAYS[t], **v)
        for t in stories.THREADS
        if t in threads and not (mute and t == threads[0])
    ]
    late.append(pen.say(stories.ENDINGS, **v))
    paragraphs = [[pen.say(stories.OPENINGS, **v), *early], middle, late]
    return "\n".join(" ".join(p) for p in paragraphs)


def tell(pen: Pen, mute: bool) -> tuple[str, dict, list[str]]:
    """A story's prose, its template values and its threads."""
    v, threads = scene(pen)
    return prose_of(pen, v, threads, mute), v, threads


def story(pen: Pen) -> str:
    """A journey on which early facts (who, where, how many) are needed at the end."""
    n = pen.pick([0, 1, 1, 2, 3])
    prose, v, threads = tell(pen, mute=n > 0 and pen.chance(0.5))
    questions = [
        qa(pen.say(stories.RECALLS[t], **v), stories.THREADS[t].format(**v)) for t in threads[:n]
    ]
    return prose + "\n\n" * bool(questions) + "\n".join(questions)


def article(pen: Pen) -> str:
    """What is known of a town or a creature, with an anecdote that is taken up again at the end."""
    kind, name = pen.topic()
    the, (a,), (obj,) = named(kind, name), pen.cast(1), pen.things(1)
    n1, n2, n3 = pen.rng.sample(WORDS["number"], 3)
    v = dict(a=a, obj=obj, n1=n1, n2=n2, n3=n3, **pen.fill("job"), **world(kind, name))
    keys = FACTS[kind]
    keys = pen.rng.sample(keys, pen.pick([3, 4, 5]) if kind == "town" else 3)
    again = ["the town", name, name] if kind == "town" else ["animal", name, name]
    aside = pen.rng.randrange(1, len(keys))
    lines: list[str] = []
    for i, key in enumerate(keys):
        if i == aside:
            lines.append(pen.say(articles.COLOUR[kind], **v))
        # "it" only right after a sentence that is about the subject as a whole
        subject = (
            the
            if i in (0, aside)
            else pen.pick([the, "it", "the town" if kind == "town" else "this animal"])
        )
        lines.append(
            english(pen.fact(kind, name, key, subject, pen.pick(again) if i else None) + ".")
        )
    questions = []
    if pen.chance(0.6):
        visit = pen.part(articles.VISITS, **v).split("|")
        lines.insert(aside, english(visit[0]))
        lines.append(english(visit[1]))
        questions.append(qa(english(visit[2]), visit[3]))
    if pen.chance(0.5):
        other = pen.pick([n for n in WORLD[kind] if n != name])
        key = pen.pick(keys)
        fact = english(pen.fact(kind, other, key, named(kind, other)) + ".")
        lines.append(pen.say(articles.COMPARES[kind], other=other, fact=fact, **v))
        questions.append(qa(pen.say(ASKS[key], **world(kind, other)), world(kind, other)[key]))
    key = pen.pick(keys)
    questions.append(qa(pen.say(ASKS[key], **v), v[key]))
    pen.rng.shuffle(questions)
    return "\n\n".join([" ".join(lines), "\n".join(questions[: pen.pick([1, 1, 2, 3])])])


def quiz(pen: Pen) -> str:
    """Closed-book questions; some follow-ups name their town or creature only by "it"."""
    lines: list[str] = []
    for _ in range(pen.rng.randint(4, 9)):
        kind, name = pen.topic()
        first, second = pen.rng.sample(FACTS[kind], 2)
        values = world(kind, name)
        lines.append(qa(pen.say(ASKS[first], **values), values[first]))
        if pen.chance(0.25):
            lines.append(qa(pen.say(FOLLOWS[second]), values[second]))
    return "\n".join(lines)


def talk(pen: Pen, recall: bool) -> tuple[str, list[tuple[str, dict]]]:
    """A conversation and the (topic, template values) told in it; if recall, some are asked for again in it."""
    a, b, c = pen.cast(3)
    here = pen.pick(list(TOWNS))
    lines = pen.part(dialogues.GREETINGS, a=a, b=b, town=here).split("|")
    told: list[tuple[str, dict]] = []

    def tells(who: Person, topic: str, values: dict) -> None:
        lines.append(f"{who}: {pen.say(dialogues.TOPICS[topic][1], **values)}")
        short = dialogues.SHORT[topic].format(**values)
        spoken = f"a {short}" if topic in ("job", "thing") else short
        told.append(
            (
                topic,
                {**values, "who": who, "short": short, "spoken": spoken, "Spoken": english(spoken)},
            )
        )

    facts = {}
    for who, thing in zip((a, b), pen.things(2), strict=True):
        home = pen.pick(list(TOWNS))
        facts[who] = dict(
            home=home,
            epithet=pen.epithet(home),
            **pen.fill("job pet petname food"),
            obj=thing,
            age=str(pen.pick(range(16, 80))),
            kin=pen.pick(WORDS["number"][:8]),
        )
    for topic in pen.rng.sample(list(dialogues.TOPICS), pen.pick([2, 3, 3, 4])):
        asker, other = (a, b) if pen.chance(0.5) else (b, a)
        lines.append(f"{asker}: {pen.say(dialogues.TOPICS[topic][0])}")
        tells(other, topic, facts[other])
        if pen.chance(0.5):
            lines[-1] += " " + pen.say(dialogues.BACKS)
            tells(asker, topic, facts[asker])
        elif pen.chance(0.6):
            lines.append(f"{asker}: {pen.say(dialogues.REACTIONS)}")
    for _ in range(pen.pick([0, 1, 1, 2])):
        kind, name = pen.topic()
        key = pen.pick(FACTS[kind])
        lines.append(
            f"{a}: {pen.say(dialogues.WORLD_TALK, question=pen.part(ASKS[key], **world(kind, name)))}"
        )
        lines.append(f"{b}: {english(pen.fact(kind, name, key, named(kind, name)) + '.')}")
    if recall:
        for topic, values in pen.rng.sample(told, pen.pick([0, 1, 1, 2])):
            who = values["who"]
            asker = b if who is a else a
            lines.append(
                f"{asker}: {pen.say(dialogues.REMINDS, b=who, again=pen.part(dialogues.TOPICS[topic][2], **values))}"
            )
            lines.append(f"{who}: {pen.say(dialogues.REPLIES, **values)}")
        if pen.chance(0.4):
            topic, values = pen.pick(told)
            other = b if values["who"] is a else a
            lines.append(
                f"{c}: {pen.say(dialogues.THIRD, b=other, question=pen.part(dialogues.TOPICS[topic][3], **values))}"
            )
            lines.append(f"{other}: {pen.say(dialogues.THIRD_REPLIES, **values)}")
        lines += pen.part(dialogues.FAREWELLS, a=a, b=b).split("|")
    return "\n".join(lines), told


def dialogue(pen: Pen) -> str:
    """Two people tell each other about themselves, and are asked about it later."""
    text, told = talk(pen, recall=True)
    chosen = pen.rng.sample(told, pen.pick([0, 1, 2]))
    questions = [
        qa(pen.say(dialogues.TOPICS[topic][3], **values), values["short"])
        for topic, values in chosen
    ]
    return text + "\n\n" * bool(questions) + "\n".join(questions)


def in_steps(pen: Pen, opening: str, steps: list[str], closing: str, words: tuple[str, ...]) -> str:
    """Join clauses as numbered lines, or as a paragraph that says First and Finally."""
    if pen.chance(0.4):
        return "\n".join(
            [opening, *(f"{i}. {english(s)}." for i, s in enumerate(steps, 1)), closing]
        )
    starts = [
        "First, ",
        *(words[(i + len(opening)) % len(words)] for i in range(len(steps) - 2)),
        "Finally, ",
    ]
    return " ".join(
        [
            opening,
            *(english(start + s) + "." for start, s in zip(starts, steps, strict=True)),
            closing,
        ]
    )


def project(pen: Pen) -> tuple[str, dict, list[int]]:
    """What a device, a dish or a journey is made of: its kind, its template values and the numbers of its points."""
    kind = pen.pick(list(explanations.PLANS))
    needed, points = explanations.NEEDED[kind], explanations.PLANS[kind][-1]
    (a, c, d), (obj,), (town, town2) = pen.cast(3), pen.things(1), pen.towns(2)
    v = {f"n{i}": n for i, n in enumerate(pen.rng.sample(WORDS["number"], 5), 1)}
    v |= pen.fill(explanations.PLAN_FIELDS)
    v |= dict(a=a, c=c, d=d, obj=obj, town=town, town2=town2)
    v["m1"], v["m2"] = pen.rng.sample(WORDS["minutes"], 2)

    others = [i for i in range(len(points)) if i not in needed]
    kept = needed | set(pen.rng.sample(others, pen.pick([5, 6, 7]) - len(needed)))
    return kind, v, sorted(kept)


def notes_of(pen: Pen, kind: str, v: dict, kept: list[int]) -> tuple[str, str, str]:
    """Notes on a project, the question to explain it, and the long answer that the notes imply."""
    head, ask, opening, closing, points = explanations.PLANS[kind]
    a, chosen = v["a"], [points[i] for i in kept]
    heads = pen.part(head, **v).split("|")
    notes = [pen.part((p[:2], p[:2]), **v) for p in chosen]
    split_at = pen.rng.randint(1, len(heads))
    notes = [*heads[:split_at], *notes, *heads[split_at:]]
    if pen.chance(0.3):
        pen.rng.shuffle(notes)
    steps = [
        pen.part((p[2:], p[2:]), x=a if i in (0, len(chosen) // 2 + 1) else a.they, **v)
        for i, p in enumerate(chosen)
    ]
    answer = in_steps(
        pen, pen.say(opening, **v), steps, pen.say(closing, **v), pen.pick(explanations.ORDER_WORDS)
    )
    return "Notes:\n" + "\n".join("- " + english(note) for note in notes), pen.say(ask, **v), answer


def plan(pen: Pen) -> tuple[str, str, str]:
    """Notes on a device, a dish or a journey, the question to explain it, and the long answer that the notes imply."""
    return notes_of(pen, *project(pen))


def explain(pen: Pen) -> str:
    """A long, ordered answer, from notes or (one time in four) from knowledge of the world."""
    if pen.chance(0.75):
        notes, question, answer = plan(pen)
        return f"{asked(question, notes)} {answer}"
    kind, name = pen.topic()
    v, keys = world(kind, name), list(FACTS[kind])
    ask, opening, closing = explanations.WORLD_EXPLAINS[kind]
    pen.rng.shuffle(keys)
    steps = [pen.fact(kind, name, key, pen.pick([named(kind, name), "it"])) for key in keys]
    answer = in_steps(
        pen, pen.say(opening, **v), steps, pen.say(closing, **v), ("Second, ", "Also, ", "And ")
    )
    text = qa(pen.say(ask, **v), answer)
    key = pen.pick(keys)
    return text + "\n" + qa(pen.say(ASKS[key], **v), v[key])


def recite(pen: Pen) -> tuple[str, str, str]:
    """A list with its story up to the copy, the copy, and what comes after it."""
    a, b = pen.cast(2)
    what, least, most, draw = pen.pick(
        [
            ("things", 8, 13, pen.things),
            ("names", 12, 20, lambda n: [p.name for p in pen.rng.sample(PEOPLE[pen.split], n)]),
            ("towns", 10, 18, pen.towns),
            ("numbers", 18, 25, lambda n: [str(i) for i in pen.rng.sample(range(10, 1000), n)]),
            (
                "goods",
                10,
                16,
                lambda n: list(
                    map(
                        " ".join,
                        zip(
                            pen.rng.sample(WORDS["number"], n),
                            pen.rng.sample(WORDS["goods"] * 2, n),
                            strict=True,
                        ),
                    )
                ),
            ),
        ]
    )
    n = pen.rng.randint(least, most)
    items = draw(n)
    v = dict(a=a, b=b, town=pen.pick(list(TOWNS)), what=what, many=n)
    written = ("\n" if n <= 14 and pen.chance(0.4) else ", ").join(items)
    head = f"{pen.say(lists.LIST_OPENINGS, **v)}\n{written}\n{pen.say(lists.LIST_MIDDLES, **v)}\n"
    tail = "\n" + pen.say(lists.LIST_CLOSINGS, **v)
    i = pen.rng.randrange(n - 1)
    if pen.chance(0.5):
        tail += "\n\n" + qa(pen.say(lists.AFTER_ASKS, item=items[i]), items[i + 1])
    elif pen.chance(0.5):
        tail += "\n\n" + qa(
            pen.say(lists.NTH_ASKS, nth=lists.NTH[i % len(lists.NTH)]), items[i % len(lists.NTH)]
        )
    return head, written, tail


KINDS = {
    "story": (story, 28),
    "article": (article, 17),
    "quiz": (quiz, 15),
    "dialogue": (dialogue, 17),
    "explain": (explain, 13),
    "list": (lambda pen: "".join(recite(pen)), 10),
}  # function, weight in percent


# --- What the rest of the project uses ------------------------------------------------------------------


def document(split: str, index: int, seed: int = 0) -> Document:
    """The document at (seed, split, index), 350 to 1900 characters long.

    Raises ValueError for an unknown split or a negative index.
    """
    pen = Pen(split, f"{seed}/{split}/{index}")
    if index < 0:
        raise ValueError(f"index must be 0 or more, got {index}")
    kind = pen.rng.choices(list(KINDS), [weight for _, weight in KINDS.values()])[0]
    text = ""
    while not 350 <= len(text) <= 1900:
        text = KINDS[kind][0](pen)
    return Document(kind, text)


def documents(split: str, n: int, seed: int = 0) -> Iterator[Document]:
    """The first n documents of a split."""
    Pen(split, "")  # an unknown split is refused here, not at the first next()
    return (document(split, i, seed) for i in range(n))


def beginnings(tokenizer: Any, split: str, n: int, tokens: int, own: int = 256) -> list[list[int]]:
    """The beginnings of n stories, dialogues or explanations, `tokens` ids each: at most the last `own` are of the
    document that goes on, and earlier documents precede them. Raises ValueError if too few are long enough."""
    own = min(tokens, own)
    found: list[list[int]] = []
    earlier: list[int] = []
    for doc in documents(split, 40 * n):
        ids = tokenizer.encode_ordinary(doc.text)
        if (
            doc.kind in ("story", "dialogue", "explain")
            and len(ids) > own
            and len(earlier) >= tokens - own
        ):
            found.append(earlier[len(earlier) - tokens + own :] + ids[:own])
        if len(found) == n:
            return found
        earlier = [*earlier, *ids, tokenizer.eot_token][-tokens:]
    raise ValueError(
        f"only {len(found)} of {40 * n} documents have more than {own} tokens, {n} are needed"
    )


def closed_book_questions(split: str) -> list[Question]:
    """Every fact of the world in every paraphrase of the split; the family is like "town:Tolben:river"."""
    side = Pen(split, "").side
    return [
        Question(
            f"{kind}:{name}:{key}", i, asked(english(ask.format(**{kind: name}))), table[name][key]
        )
        for kind, table in WORLD.items()
        for name in table
        for key in FACTS[kind]
        for i, ask in enumerate(ASKS[key][side])
    ]


def recall_questions(split: str, n: int, seed: int = 0) -> list[Question]:
    """n questions on early facts of stories and dialogues; three in a row are paraphrases on the same text.

    The text states the asked fact once and never comes back to it. Prompts are 350 to 1300 characters long.
    """
    questions: list[Question] = []
    index = 0
    while len(questions) < n:
        pen = Pen(split, f"{seed}/{split}/recall/{index}")
        text, key = "", ""
        while not 270 <= len(text) <= 1200:
            if index % 3 == 2:
                text, told = talk(pen, recall=False)
                key, v = pen.pick(told)
                asks, answer = dialogues.TOPICS[key][3], v["short"]
            else:
                text, v, (key, *_) = tell(pen, mute=True)
                asks, answer = stories.RECALLS[key], stories.THREADS[key].format(**v)
        for i in sorted(pen.rng.sample(range(len(asks[pen.side])), 3)):
            prompt = asked(english(asks[pen.side][i].format(**v)), text)
            questions.append(Question(f"recall:{split}:{seed}:{index}:{key}", i, prompt, answer))
        index += 1
    return questions[:n]


def explain_questions(split: str, n: int, seed: int = 0) -> list[Question]:
    """n sets of notes, each with the question to explain them and the long reference answer."""
    plans = (plan(Pen(split, f"{seed}/{split}/explain/{i}")) for i in range(n))
    return [
        Question(f"explain:{split}:{seed}:{i}", 0, asked(question, notes), answer)
        for i, (notes, question, answer) in enumerate(plans)
    ]


def quiz_families(split: str, header: int = 4) -> list[list[Question]]:
    """All wordings of each closed-book question that belongs to a split, after the same few questions with answers.

    Facts are shared out among the splits: what is asked in one isn't asked in another.
    """
    questions = closed_book_questions(split)
    names = sorted({q.family for q in closed_book_questions("train")})
    Random("families").shuffle(names)
    first = {q.family: q for q in reversed(closed_book_questions("train"))}
    head = "\n".join(f"{first[name].prompt} {first[name].answer}" for name in names[:header])
    rest = names[header:]
    parts = {"train": rest[96:], "valid": rest[48:96], "test": rest[:48]}[split]
    return [
        [
            Question(f"quiz:{name}", q.paraphrase, f"{head}\n{q.prompt}", q.answer)
            for q in questions
            if q.family == name
        ]
        for name in parts
    ]


def story_families(split: str, n: int, tellings: int, seed: int = 0) -> list[list[Question]]:
    """n stories, each told in several ways and each time with a question on the same early fact, in other words."""
    families: list[list[Question]] = []
    index = 0
    while len(families) < n:
        name = f"{seed}/{split}/retold/{index}"
        v, threads = scene(Pen(split, name))
        key, family = threads[0], []
        for i in range(tellings):
            pen = Pen(split, f"{name}/{i}")
            text, asks = prose_of(pen, v, threads, mute=True), stories.RECALLS[key][pen.side]
            prompt = asked(english(asks[i % len(asks)].format(**v)), text)
            family.append(
                Question(
                    f"story:{split}:{seed}:{index}:{key}",
                    i,
                    prompt,
                    stories.THREADS[key].format(**v),
                )
            )
        if all(350 <= len(q.prompt) <= 1300 for q in family):
            families.append(family)
        index += 1
    return families


def notes_families(split: str, n: int, tellings: int, seed: int = 0) -> list[list[Question]]:
    """n projects, each with several sets of notes, in other words and another order, and the question to explain it."""
    families = []
    for index in range(n):
        name = f"{seed}/{split}/noted/{index}"
        made = project(Pen(split, name))
        told = (notes_of(Pen(split, f"{name}/{i}"), *made) for i in range(tellings))
        families.append(
            [
                Question(f"notes:{split}:{seed}:{index}", i, asked(question, notes), answer)
                for i, (notes, question, answer) in enumerate(told)
            ]
        )
    return families


def repeated_lists(split: str, n: int, seed: int = 0) -> list[tuple[str, str]]:
    """n pairs (text up to where the copy of its list begins, the copy)."""
    return [recite(Pen(split, f"{seed}/{split}/list/{i}"))[:2] for i in range(n)]


def main(argv: list[str] | None = None) -> None:
    cli = CommandLine(
        "Print documents of the corpus with their kinds.",
        example="python3 pocket/corpus.py --split valid --n 3",
    )
    cli.add_argument("--split", default="train", choices=SPLITS, help="training or held-out text")
    cli.add_argument(
        "--n", type=whole_number(1), default=3, metavar="N", help="number of documents"
    )
    with cli.parse(argv) as args:
        for i, doc in enumerate(documents(args.split, args.n)):
            head = f"--- {args.split} {i}: {doc.kind}, {len(doc.text)} characters"
            print(f"{head}\n{doc.text}\n", flush=True)


if __name__ == "__main__":
    main()
