"""An invented world and the documents about it: the text on which pocket is trained and measured.

Every document is a pure function of (split, index), so that a run can be resumed, or cut
among workers, by index alone. Two kinds of knowledge are kept apart on purpose:

closed book  facts of the world (towns, creatures), the same in every split: learned in training
             and asked in held-out text in words that training never used;
in context   names, places, objects and numbers that one document states early and needs late:
             a model that loses the start of its prompt must get them wrong.

Held-out splits have people and objects of their own, and ask in wordings of their own, built of words
that training also uses. Their prose is worded as in training, so that perplexity measures what a model
makes of new names and things rather than how it likes a new phrase.
"""

import re
from collections.abc import Iterator
from random import Random
from typing import NamedTuple

from tiktoken import Encoding

from pocket.sentences import articles, dialogues, explanations, lists, stories
from pocket.sentences.nouns import EPITHET, THINGS, WHEN, WORDS
from pocket.sentences.templates import Bank
from pocket.sentences.world import ASKS, FACTS, FOLLOWS, SAYS, TOWNS, WORLD

SPLITS = ("train", "valid", "test")
PRONOUNS = {"woman": ("she", "her", "her"), "man": ("he", "him", "his")}


class Document(NamedTuple):
    """One text of the corpus, with the name of the function that made it."""

    kind: str
    text: str


class Question(NamedTuple):
    """A prompt that ends with "Answer:" and its reference; the full text is prompt + " " + answer."""

    family: str  # the same for all paraphrases of one question
    prompt: str
    answer: str


class Person(NamedTuple):
    """An invented person; templates write {a}, {a.they}, {a.them} and {a.their}."""

    name: str
    they: str
    them: str
    their: str

    def __str__(self) -> str:
        return self.name


# --- Choosing and filling -------------------------------------------------------------------------------


def english(text: str) -> str:
    """Mend spaces, write "an" before vowels, and put capitals at the starts of sentences."""
    text = re.sub(r" +", " ", text).replace(" ,", ",").replace(" .", ".").strip()
    text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)
    return re.sub(r'(^|[.!?] |[.]" )("?)([a-z])', lambda m: m[1] + m[2] + m[3].upper(), text)


def asked(question: str, **values: object) -> str:
    """A question as a prompt, its {fields} filled."""
    return f"Question: {english(question.format(**values))}\nAnswer:"


def qa(question: str, answer: str) -> str:
    return f"{asked(question)} {answer}"


def below(text: str, questions: list[str]) -> str:
    """A text and the questions about it, if there are any."""
    return "\n\n".join([text, "\n".join(questions)]).rstrip("\n")


def _people() -> dict[str, list[Person]]:
    """Cut one fixed shuffle of all syllable names into the casts of the three splits."""
    taken = {*WORDS["petname"]}
    for town in TOWNS.values():
        taken |= {*town.values()}
    people = [
        Person(start + end, *pronouns)
        for start in WORDS["start"]
        for sex, pronouns in PRONOUNS.items()
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
    """The random choices of one document: all of them follow from its split, name and seed."""

    def __init__(self, split: str, name: str, seed: int = 0) -> None:
        self.split = split
        self.side = int(split != "train")
        self.rng = Random(f"{seed}/{split}/{name}")
        self.pick, self.sample = self.rng.choice, self.rng.sample

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
        people = []
        while len(people) < n:
            new = self.pick(PEOPLE[self.split])
            same_initial = new.name[0] in [person.name[0] for person in people]
            same_sex = len(people) == 1 and new.they == people[0].they
            if not same_initial and not same_sex:
                people.append(new)
        return people

    def things(self, n: int) -> list[str]:
        """n objects with different nouns."""
        things = {}
        while len(things) < n:
            thing = self.pick(OBJECTS[self.split])
            things.setdefault(thing.split()[1], thing)
        return [*things.values()]

    def topic(self) -> tuple[str, dict[str, str]]:
        """A town or a creature: its kind and its template values."""
        kind = "town" if self.chance(0.75) else "creature"
        return kind, self.pick(WORLD[kind])

    def fact(self, about: dict[str, str], key: str) -> str:
        """A statement of one fact of a town or a creature."""
        return english(self.part(SAYS[key], **about) + ".")

    def question(self, about: dict[str, str], key: str) -> str:
        """A question about one fact, and its answer."""
        return qa(self.part(ASKS[key], **about), about[key])


# --- One function for each kind of document -------------------------------------------------------------


def scene(pen: Pen) -> tuple[dict, list[str]]:
    """What happens in a story: its template values and its threads."""
    v = dict(zip("abcd", pen.cast(4), strict=True))
    v["obj"], v["obj2"] = pen.things(2)
    v["n1"], v["n2"] = pen.sample(WORDS["number"], 2)
    v["town"], v["place"] = pen.sample([*TOWNS], 2)
    v["when"] = pen.part(WHEN, any_month=pen.pick(WORLD["town"])["month"])
    v["rel"] = pen.pick(["sister" if v["b"].they == "she" else "brother", *WORDS["rel"]])
    v |= pen.fill("job goods cargo spot word colour landmark hour errand")
    v["epithet"] = pen.part(EPITHET, **TOWNS[v["town"]])
    v["epithet2"] = pen.part(EPITHET, **TOWNS[v["place"]])
    v["Word"] = v["word"].capitalize()
    v |= pen.pick(WORLD["creature"])
    fact = pen.part(SAYS[pen.pick(FACTS["creature"])], **v)
    v["they_said"] = pen.part(stories.CREATURE_ASIDE, fact=fact, **v)
    return v, pen.sample([*stories.THREADS], pen.pick([2, 3, 3, 4]))


def prose_of(pen: Pen, v: dict, threads: list[str], mute: bool) -> str:
    """A story in words; if mute, its first thread is stated but never paid off."""
    early = [pen.say(stories.STATES[t], **v) for t in pen.sample(threads, len(threads))]
    middle = []
    while len(middle) < pen.pick([1, 1, 2, 2, 3]):
        incident = pen.say(stories.INCIDENTS, **v)
        if not any(incident[:12] == other[:12] for other in middle):
            middle.append(incident)
    paid = threads[1:] if mute else threads
    late = [pen.say(stories.PAYS[t], **v) for t in stories.THREADS if t in paid]
    late.append(pen.say(stories.ENDINGS, **v))
    early.insert(0, pen.say(stories.OPENINGS, **v))
    return "\n".join(" ".join(paragraph) for paragraph in (early, middle, late))


def tell(pen: Pen, mute: bool) -> tuple[str, dict, list[str]]:
    """A story's prose, its template values and its threads."""
    v, threads = scene(pen)
    return prose_of(pen, v, threads, mute), v, threads


def story(pen: Pen) -> str:
    """A journey on which early facts (who, where, how many) are needed at the end."""
    n = pen.pick([0, 1, 1, 2, 3])
    prose, v, threads = tell(pen, mute=n > 0 and pen.chance(0.5))
    questions = []
    for thread in threads[:n]:
        asks, answer = stories.RECALLS[thread], stories.THREADS[thread]
        questions.append(qa(pen.part(asks, **v), answer.format(**v)))
    return below(prose, questions)


def article(pen: Pen) -> str:
    """What is known of a town or a creature, with an anecdote that is taken up again at the end."""
    kind, about = pen.topic()
    (a,), (obj,) = pen.cast(1), pen.things(1)
    v = {"a": a, "obj": obj, **about}
    v["n1"], v["n2"], v["n3"] = pen.sample(WORDS["number"], 3)
    v |= pen.fill("job")
    keys = pen.sample(FACTS[kind], pen.pick([3, 4, 5]) if kind == "town" else 3)
    aside = pen.rng.randrange(1, len(keys))
    lines = []
    for i, key in enumerate(keys):
        if i == aside:
            lines.append(pen.say(articles.COLOUR[kind], **v))
        named = dict(about)
        # "it" only right after a sentence that is about the subject as a whole
        if i not in (0, aside):
            named["s"] = pen.pick([about["s"], "it", about["this"]])
        if i:
            general = about["this"].removeprefix("this ")
            named[kind] = pen.pick([general, about[kind], about[kind]])
        lines.append(pen.fact(named, key))
    questions = []
    if pen.chance(0.6):
        early, late, question, answer = pen.part(articles.VISITS, **v).split("|")
        lines.insert(aside, english(early))
        lines.append(english(late))
        questions.append(qa(question, answer))
    if pen.chance(0.5):
        other = pen.pick([other for other in WORLD[kind] if other is not about])
        key = pen.pick(keys)
        fact = pen.fact(other, key)
        lines.append(pen.say(articles.COMPARES[kind], other=other[kind], fact=fact, **v))
        questions.append(pen.question(other, key))
    questions.append(pen.question(about, pen.pick(keys)))
    pen.rng.shuffle(questions)
    return below(" ".join(lines), questions[: pen.pick([1, 1, 2, 3])])


def quiz(pen: Pen) -> str:
    """Closed-book questions; some follow-ups name their town or creature only by "it"."""
    lines = []
    for _ in range(pen.rng.randint(4, 9)):
        kind, about = pen.topic()
        first, second = pen.sample(FACTS[kind], 2)
        lines.append(pen.question(about, first))
        if pen.chance(0.25):
            lines.append(qa(pen.part(FOLLOWS[second]), about[second]))
    return "\n".join(lines)


def talk(pen: Pen, recall: bool) -> tuple[str, list[dict]]:
    """A conversation and the template values of all that is told in it; if recall, some is asked for again in it."""
    a, b, c = pen.cast(3)
    lines = pen.part(dialogues.GREETINGS, a=a, b=b, town=pen.pick([*TOWNS])).split("|")
    told, facts = [], {}

    def says(speaker: Person, bank: Bank, **values: object) -> None:
        lines.append(f"{speaker}: {pen.say(bank, **values)}")

    def tells(who: Person, topic: str) -> None:
        values = facts[who]
        _, tell, again, asks = dialogues.TOPICS[topic]
        says(who, tell, **values)
        spoken = dialogues.SPOKEN[topic].format(**values)
        more = {"topic": topic, "short": spoken.removeprefix("a "), "spoken": spoken}
        told.append(values | more | {"again": again, "asks": asks})

    for who, other, thing in zip((a, b), (b, a), pen.things(2), strict=True):
        home = pen.pick([*TOWNS])
        facts[who] = {
            "who": who,
            "other": other,
            "obj": thing,
            "home": home,
            "epithet": pen.part(EPITHET, **TOWNS[home]),
            **pen.fill("job pet petname food"),
            "age": pen.pick(range(16, 80)),
            "kin": pen.pick(WORDS["number"][:8]),
        }
    for topic in pen.sample([*dialogues.TOPICS], pen.pick([2, 3, 3, 4])):
        asker, other = (a, b) if pen.chance(0.5) else (b, a)
        says(asker, dialogues.TOPICS[topic][0])
        tells(other, topic)
        if pen.chance(0.5):
            lines[-1] += " " + pen.say(dialogues.BACKS)
            tells(asker, topic)
        elif pen.chance(0.6):
            says(asker, dialogues.REACTIONS)
    for _ in range(pen.pick([0, 1, 1, 2])):
        kind, about = pen.topic()
        key = pen.pick(FACTS[kind])
        says(a, dialogues.WORLD_TALK, question=pen.part(ASKS[key], **about))
        lines.append(f"{b}: {pen.fact(about, key)}")
    if recall:
        for values in pen.sample(told, pen.pick([0, 1, 1, 2])):
            again = pen.part(values["again"], **values)
            says(values["other"], dialogues.REMINDS, b=values["who"], again=again)
            says(values["who"], dialogues.REPLIES, **values)
        if pen.chance(0.4):
            values = pen.pick(told)
            question = pen.part(values["asks"], **values)
            says(c, dialogues.THIRD, b=values["other"], question=question)
            says(values["other"], dialogues.THIRD_REPLIES, **values)
        lines += pen.part(dialogues.FAREWELLS, a=a, b=b).split("|")
    return "\n".join(lines), told


def dialogue(pen: Pen) -> str:
    """Two people tell each other about themselves, and are asked about it later."""
    text, told = talk(pen, recall=True)
    questions = []
    for values in pen.sample(told, pen.pick([0, 1, 2])):
        questions.append(qa(pen.part(values["asks"], **values), values["short"]))
    return below(text, questions)


def in_steps(pen: Pen, opening: str, steps: list[str], closing: str, words: tuple[str, ...]) -> str:
    """Join clauses as numbered lines, or as a paragraph that says First and Finally."""
    if pen.chance(0.4):
        joint, starts = "\n", [f"{i}. " for i, _ in enumerate(steps, 1)]
    else:
        between = [words[(i + len(opening)) % len(words)] for i in range(len(steps) - 2)]
        joint, starts = " ", ["First, ", *between, "Finally, "]
    lines = [english(start + step) + "." for start, step in zip(starts, steps, strict=True)]
    return joint.join([opening, *lines, closing])


def project(pen: Pen) -> dict:
    """What a device, a dish or a journey is made of: its template values, its kind and the numbers of its points."""
    kind = pen.pick([*explanations.PLANS])
    needed, points = explanations.NEEDED[kind], explanations.PLANS[kind][-1]
    v = dict(zip("acd", pen.cast(3), strict=True))
    (v["obj"],) = pen.things(1)
    v["town"], v["town2"] = pen.sample([*TOWNS], 2)
    v |= {f"n{i}": n for i, n in enumerate(pen.sample(WORDS["number"], 5), 1)}
    v |= pen.fill(explanations.PLAN_FIELDS)
    v["m1"], v["m2"] = pen.sample(WORDS["minutes"], 2)
    others = [i for i in range(len(points)) if i not in needed]
    kept = needed | set(pen.sample(others, pen.pick([5, 6, 7]) - len(needed)))
    return v | {"kind": kind, "kept": sorted(kept)}


def notes_of(pen: Pen, v: dict) -> tuple[str, str]:
    """Notes on a project with the question to explain it, and the long answer that the notes imply."""
    head, ask, opening, closing, points = explanations.PLANS[v["kind"]]
    kept = v["kept"]
    heads = pen.part(head, **v).split("|")
    notes = [pen.part((points[i][:2],) * 2, **v) for i in kept]
    split_at = pen.rng.randint(1, len(heads))
    notes = [*heads[:split_at], *notes, *heads[split_at:]]
    if pen.chance(0.3):
        pen.rng.shuffle(notes)
    steps = []
    for n, i in enumerate(kept):
        who = v["a"] if n in (0, len(kept) // 2 + 1) else v["a"].they
        steps.append(pen.part((points[i][2:],) * 2, x=who, **v))
    begin, end = pen.say(opening, **v), pen.say(closing, **v)
    answer = in_steps(pen, begin, steps, end, pen.pick(explanations.ORDER_WORDS))
    lines = ["Notes:", *("- " + english(note) for note in notes)]
    return below("\n".join(lines), [asked(pen.part(ask, **v))]), answer


def explain(pen: Pen) -> str:
    """A long, ordered answer, from notes or (one time in four) from knowledge of the world."""
    if pen.chance(0.75):
        return " ".join(notes_of(pen, project(pen)))
    kind, about = pen.topic()
    ask, opening, closing = explanations.WORLD_EXPLAINS[kind]
    keys, steps = [*FACTS[kind]], []
    pen.rng.shuffle(keys)
    for key in keys:
        named = about | {"s": pen.pick([about["s"], "it"])}
        steps.append(pen.part(SAYS[key], **named))
    begin, end = pen.say(opening, **about), pen.say(closing, **about)
    answer = in_steps(pen, begin, steps, end, ("Second, ", "Also, ", "And "))
    text = qa(pen.part(ask, **about), answer)
    return text + "\n" + pen.question(about, pen.pick(keys))


def items_of(pen: Pen, what: str, n: int) -> list[str]:
    """n different items of a list."""
    pools = {"names": PEOPLE[pen.split], "towns": [*TOWNS], "numbers": range(10, 1000)}
    if what in pools:
        return list(map(str, pen.sample(pools[what], n)))
    if what == "things":
        return pen.things(n)
    pairs = zip(pen.sample(WORDS["number"], n), pen.sample(WORDS["goods"] * 2, n), strict=True)
    return [f"{number} {goods}" for number, goods in pairs]


def recite(pen: Pen) -> tuple[str, str, str]:
    """A list with its story up to the copy, the copy, and what comes after it."""
    a, b = pen.cast(2)
    what = pen.pick([*lists.LENGTHS])
    n = pen.rng.randint(*lists.LENGTHS[what])
    items = items_of(pen, what, n)
    v = {"a": a, "b": b, "town": pen.pick([*TOWNS]), "what": what, "many": n}
    written = ("\n" if n <= 14 and pen.chance(0.4) else ", ").join(items)
    head = f"{pen.say(lists.LIST_OPENINGS, **v)}\n{written}\n{pen.say(lists.LIST_MIDDLES, **v)}\n"
    tail, questions = "\n" + pen.say(lists.LIST_CLOSINGS, **v), []
    i = pen.rng.randrange(n - 1)
    nth = i % len(lists.NTH)
    if pen.chance(0.5):
        questions.append(qa(pen.part(lists.AFTER_ASKS, item=items[i]), items[i + 1]))
    elif pen.chance(0.5):
        questions.append(qa(pen.part(lists.NTH_ASKS, nth=lists.NTH[nth]), items[nth]))
    return head, written, below(tail, questions)


KINDS = {
    "story": story,
    "article": article,
    "quiz": quiz,
    "dialogue": dialogue,
    "explain": explain,
    "list": lambda pen: "".join(recite(pen)),
}
WEIGHTS = (28, 17, 15, 17, 13, 10)  # in percent


# --- What the rest of the project uses ------------------------------------------------------------------


def document(split: str, index: int, seed: int = 0) -> Document:
    """The document at (seed, split, index), 350 to 1900 characters long; those of seed 0 are what models are trained
    and evaluated on."""
    pen = Pen(split, f"{index}", seed)
    kind = pen.rng.choices([*KINDS], WEIGHTS)[0]
    text = ""
    while not 350 <= len(text) <= 1900:
        text = KINDS[kind](pen)
    return Document(kind, text)


def documents(split: str, n: int) -> Iterator[Document]:
    """The first n documents of a split."""
    return (document(split, i) for i in range(n))


def beginnings(tokenizer: Encoding, split: str, n: int, tokens: int) -> list[list[int]]:
    """The beginnings of n stories, dialogues or explanations, `tokens` ids each: at most the last 256 are of the
    document that goes on, and earlier documents precede them."""
    own = min(tokens, 256)
    found, earlier, index = [], [], 0
    while len(found) < n:
        doc = document(split, index)
        ids = tokenizer.encode_ordinary(doc.text)
        long = len(ids) > own and len(earlier) >= tokens - own
        if long and doc.kind in ("story", "dialogue", "explain"):
            found.append(earlier[len(earlier) - tokens + own :] + ids[:own])
        earlier = [*earlier, *ids, tokenizer.eot_token][-tokens:]
        index += 1
    return found


def closed_book_questions(split: str) -> list[Question]:
    """Every fact of the world in every paraphrase of the split; the family is like "town:Tolben:river"."""
    side, found = Pen(split, "").side, []
    for kind, table in WORLD.items():
        for about in table:
            for key in FACTS[kind]:
                family = f"{kind}:{about[kind]}:{key}"
                for ask in ASKS[key][side]:
                    found.append(Question(family, asked(ask, **about), about[key]))
    return found


def recall_questions(split: str, n: int) -> list[Question]:
    """n questions on early facts of stories and dialogues; three in a row are paraphrases on the same text.

    The text states the asked fact once and never comes back to it. Prompts are 350 to 1300 characters long.
    """
    questions, index = [], 0
    while len(questions) < n:
        pen = Pen(split, f"recall/{index}")
        text = ""
        while not 270 <= len(text) <= 1200:
            if index % 3 == 2:
                text, told = talk(pen, recall=False)
                v = pen.pick(told)
                key, answer, asks = v["topic"], v["short"], v["asks"]
            else:
                text, v, (key, *_) = tell(pen, mute=True)
                asks, answer = stories.RECALLS[key], stories.THREADS[key].format(**v)
        for i in sorted(pen.sample(range(len(asks[pen.side])), 3)):
            prompt = below(text, [asked(asks[pen.side][i], **v)])
            questions.append(Question(f"recall:{split}:{index}:{key}", prompt, answer))
        index += 1
    return questions[:n]


def explain_questions(split: str, n: int) -> list[Question]:
    """n sets of notes, each with the question to explain them and the long reference answer."""
    found = []
    for i in range(n):
        pen = Pen(split, f"explain/{i}")
        found.append(Question(f"explain:{split}:{i}", *notes_of(pen, project(pen))))
    return found


def quiz_families(split: str, header: int = 4) -> list[list[Question]]:
    """All wordings of each closed-book question that belongs to a split, after the same few questions with answers.

    Facts are shared out among the splits: what is asked in one isn't asked in another.
    """
    first = {q.family: q for q in reversed(closed_book_questions("train"))}
    names = sorted(first)
    Random("families").shuffle(names)
    head = [f"{first[name].prompt} {first[name].answer}" for name in names[:header]]
    rest, families = names[header:], {}
    for q in closed_book_questions(split):
        again = Question(f"quiz:{q.family}", "\n".join([*head, q.prompt]), q.answer)
        families.setdefault(q.family, []).append(again)
    parts = {"train": rest[96:], "valid": rest[48:96], "test": rest[:48]}
    return [families[name] for name in parts[split]]


def story_families(split: str, n: int) -> list[list[Question]]:
    """n stories, each told in three ways and each time with a question on the same early fact, in other words."""
    families, index = [], 0
    while len(families) < n:
        name = f"retold/{index}"
        v, threads = scene(Pen(split, name))
        key, family = threads[0], []
        answer = stories.THREADS[key].format(**v)
        for i in range(3):
            pen = Pen(split, f"{name}/{i}")
            text, asks = prose_of(pen, v, threads, mute=True), stories.RECALLS[key][pen.side]
            prompt = below(text, [asked(asks[i % len(asks)], **v)])
            family.append(Question(f"story:{split}:{index}:{key}", prompt, answer))
        if all(350 <= len(q.prompt) <= 1300 for q in family):
            families.append(family)
        index += 1
    return families


def notes_families(split: str, n: int) -> list[list[Question]]:
    """n projects, each with three sets of notes, in other words and another order, and the question to explain it."""
    families = []
    for index in range(n):
        name = f"noted/{index}"
        made, family = project(Pen(split, name)), f"notes:{split}:{index}"
        told = [notes_of(Pen(split, f"{name}/{i}"), made) for i in range(3)]
        families.append([Question(family, *one) for one in told])
    return families


def repeated_lists(split: str, n: int) -> list[tuple[str, str]]:
    """n pairs (text up to where the copy of its list begins, the copy)."""
    return [recite(Pen(split, f"list/{i}"))[:2] for i in range(n)]
