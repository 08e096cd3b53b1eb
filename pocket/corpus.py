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
from pocket.sentences.nouns import EPITHETS, OBJECT_NOUNS, TIMES, WORDS
from pocket.sentences.templates import Bank
from pocket.sentences.world import FACT_QUESTIONS, FACT_STATEMENTS, FACTS, FOLLOW_UPS, TOWNS, WORLD

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


def as_sentences(text: str) -> str:
    """Mend spaces, write "an" before vowels, and put capitals at the starts of sentences."""
    text = re.sub(r" +", " ", text).replace(" ,", ",").replace(" .", ".").strip()
    text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)
    return re.sub(r'(^|[.!?] |[.]" )("?)([a-z])', lambda m: m[1] + m[2] + m[3].upper(), text)


def question_prompt(question: str, **values: object) -> str:
    """Return a question as a prompt that ends with "Answer:", its {fields} filled."""
    return f"Question: {as_sentences(question.format(**values))}\nAnswer:"


def answered_question(question: str, answer: str) -> str:
    """Return a question and its answer."""
    return f"{question_prompt(question)} {answer}"


def with_questions(text: str, questions: list[str]) -> str:
    """Return a text and the questions about it, if there are any."""
    return "\n\n".join([text, "\n".join(questions)]).rstrip("\n")


def people_of_splits() -> dict[str, list[Person]]:
    """Cut one fixed shuffle of all syllable names into the people of the three splits."""
    names_in_use = {*WORDS["petname"]}.union(*(town.values() for town in TOWNS.values()))
    people = []
    for start in WORDS["start"]:
        for sex, pronouns in PRONOUNS.items():
            for end in WORDS[sex]:
                if start + end not in names_in_use:
                    people.append(Person(start + end, *pronouns))
    Random("people").shuffle(people)
    return {"train": people[:-220], "valid": people[-220:-110], "test": people[-110:]}


def objects_of(split: str) -> list[str]:
    """Return the objects of a split: each of its nouns with every adjective that suits it."""
    objects = []
    for adjectives, *nouns_of_splits in OBJECT_NOUNS:
        for noun in nouns_of_splits[SPLITS.index(split)].split():
            for adjective in adjectives.split() + WORDS["paint"]:
                objects.append(f"{adjective} {noun}")
    return objects


PEOPLE = people_of_splits()
OBJECTS = {split: objects_of(split) for split in SPLITS}


class Pen:
    """The random choices of one document: all of them follow from its split, name and seed."""

    def __init__(self, split: str, name: str, seed: int = 0) -> None:
        self.split = split
        self.rng = Random(f"{seed}/{split}/{name}")
        self.pick, self.sample = self.rng.choice, self.rng.sample

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    def wordings(self, bank: Bank) -> list[str]:
        """Return the templates of a bank that are for this split."""
        return bank.train if self.split == "train" else bank.held_out

    def fill_one_of(self, templates: list[str], **values: object) -> str:
        """Choose one of these templates and its [this|that] alternatives, and fill its {fields}."""
        text = self.pick(templates)
        while "[" in text:
            text = re.sub(r"\[([^][]*)\]", lambda m: self.pick(m[1].split("|")), text)
        return text.format(**values)

    def fill_template(self, bank: Bank, **values: object) -> str:
        """Choose one of a bank's templates for this split, and fill it as fill_one_of() does."""
        return self.fill_one_of(self.wordings(bank), **values)

    def write_sentence(self, bank: Bank, **values: object) -> str:
        """Fill one of a bank's templates, and return it as whole sentences."""
        return as_sentences(self.fill_template(bank, **values))

    def pick_words(self, fields: str) -> dict[str, str]:
        """Return a word for each of these fields."""
        return {field: self.pick(WORDS[field]) for field in fields.split()}

    def pick_people(self, n: int) -> list[Person]:
        """Return n people with different initials; the second is not of the first one's sex, so that pronouns are
        clear."""
        people = []
        while len(people) < n:
            candidate = self.pick(PEOPLE[self.split])
            same_initial = candidate.name[0] in [person.name[0] for person in people]
            same_sex = len(people) == 1 and candidate.they == people[0].they
            if not same_initial and not same_sex:
                people.append(candidate)
        return people

    def pick_objects(self, n: int) -> list[str]:
        """Return n objects with different nouns."""
        objects = {}
        while len(objects) < n:
            candidate = self.pick(OBJECTS[self.split])
            objects.setdefault(candidate.split()[1], candidate)
        return [*objects.values()]

    def pick_subject(self) -> tuple[str, dict[str, str]]:
        """Return a town or a creature: its kind and its template values."""
        kind = "town" if self.chance(0.75) else "creature"
        return kind, self.pick(WORLD[kind])

    def state_fact(self, subject: dict[str, str], fact: str) -> str:
        """Return a statement of one fact of a town or a creature."""
        return as_sentences(self.fill_template(FACT_STATEMENTS[fact], **subject) + ".")

    def ask(self, bank: Bank, answer: str, **values: object) -> str:
        """Return one of a bank's questions, and its answer."""
        return answered_question(self.fill_template(bank, **values), answer)

    def ask_fact(self, subject: dict[str, str], fact: str) -> str:
        """Return a question about one fact, and its answer."""
        return self.ask(FACT_QUESTIONS[fact], subject[fact], **subject)


# --- One function for each kind of document -------------------------------------------------------------


class Plot(NamedTuple):
    """What happens in a story."""

    values: dict  # of its templates' fields
    # Details that are stated early and needed late, in the order of stories.THREAD_ANSWERS.
    threads: list[str]


def draw_plot(pen: Pen) -> Plot:
    """Return the plot of a story."""
    values = dict(zip("abcd", pen.pick_people(4), strict=True))
    values["obj"], values["obj2"] = pen.pick_objects(2)
    values["n1"], values["n2"] = pen.sample(WORDS["number"], 2)
    values["town"], values["place"] = pen.sample([*TOWNS], 2)
    values["when"] = pen.fill_template(TIMES, any_month=pen.pick(WORLD["town"])["month"])
    sibling = "sister" if values["b"].they == "she" else "brother"
    values["rel"] = pen.pick([sibling, *WORDS["rel"]])
    values |= pen.pick_words("job goods cargo spot word colour landmark hour errand")
    values["epithet"] = pen.fill_template(EPITHETS, **TOWNS[values["town"]])
    values["epithet2"] = pen.fill_template(EPITHETS, **TOWNS[values["place"]])
    values["Word"] = values["word"].capitalize()
    values |= pen.pick(WORLD["creature"])
    fact = pen.fill_template(FACT_STATEMENTS[pen.pick(FACTS["creature"])], **values)
    values["they_said"] = pen.fill_template(stories.CREATURE_ASIDES, fact=fact, **values)
    return Plot(values, pen.sample([*stories.THREAD_ANSWERS], pen.pick([2, 3, 3, 4])))


def story_prose(pen: Pen, plot: Plot, mute: bool) -> str:
    """Return a story in words; if mute, its first thread is stated but never paid off."""
    values, threads = plot
    early = []
    for thread in pen.sample(threads, len(threads)):
        early.append(pen.write_sentence(stories.STATEMENTS[thread], **values))
    middle = []
    while len(middle) < pen.pick([1, 1, 2, 2, 3]):
        incident = pen.write_sentence(stories.INCIDENTS, **values)
        if not any(incident[:12] == other[:12] for other in middle):
            middle.append(incident)
    paid_off = threads[1:] if mute else threads
    late = []
    for thread, bank in stories.PAYOFFS.items():
        if thread in paid_off:
            late.append(pen.write_sentence(bank, **values))
    late.append(pen.write_sentence(stories.ENDINGS, **values))
    early.insert(0, pen.write_sentence(stories.OPENINGS, **values))
    return "\n".join(" ".join(sentences) for sentences in (early, middle, late))


def tell_story(pen: Pen, mute: bool) -> tuple[str, Plot]:
    """Return a story's prose and its plot."""
    plot = draw_plot(pen)
    return story_prose(pen, plot, mute), plot


def story(pen: Pen) -> str:
    """A journey on which early facts (who, where, how many) are needed at the end."""
    count = pen.pick([0, 1, 1, 2, 3])
    prose, (values, threads) = tell_story(pen, mute=count > 0 and pen.chance(0.5))
    questions = []
    for thread in threads[:count]:
        answer = stories.THREAD_ANSWERS[thread].format(**values)
        questions.append(pen.ask(stories.QUESTIONS[thread], answer, **values))
    return with_questions(prose, questions)


def article(pen: Pen) -> str:
    """What is known of a town or a creature, with an anecdote that is taken up again at the end."""
    kind, subject = pen.pick_subject()
    (person,), (thing,) = pen.pick_people(1), pen.pick_objects(1)
    values = {"a": person, "obj": thing, **subject}
    values["n1"], values["n2"], values["n3"] = pen.sample(WORDS["number"], 3)
    values |= pen.pick_words("job")
    facts = pen.sample(FACTS[kind], pen.pick([3, 4, 5]) if kind == "town" else 3)
    aside = pen.rng.randrange(1, len(facts))
    sentences = []
    for i, fact in enumerate(facts):
        if i == aside:
            sentences.append(pen.write_sentence(articles.COLOURFUL_DETAILS[kind], **values))
        renamed = dict(subject)
        # "it" only right after a sentence that is about the subject as a whole
        if i not in (0, aside):
            renamed["s"] = pen.pick([subject["s"], "it", subject["this"]])
        if i:
            general = subject["this"].removeprefix("this ")
            renamed[kind] = pen.pick([general, subject[kind], subject[kind]])
        sentences.append(pen.state_fact(renamed, fact))
    questions = []
    if pen.chance(0.6):
        visit = pen.fill_template(articles.VISITS, **values)
        early, late, question, answer = visit.split("|")
        sentences.insert(aside, as_sentences(early))
        sentences.append(as_sentences(late))
        questions.append(answered_question(question, answer))
    if pen.chance(0.5):
        other = pen.pick([other for other in WORLD[kind] if other is not subject])
        compared = pen.pick(facts)
        fact = pen.state_fact(other, compared)
        comparison = articles.COMPARISONS[kind]
        sentences.append(pen.write_sentence(comparison, other=other[kind], fact=fact, **values))
        questions.append(pen.ask_fact(other, compared))
    questions.append(pen.ask_fact(subject, pen.pick(facts)))
    pen.rng.shuffle(questions)
    return with_questions(" ".join(sentences), questions[: pen.pick([1, 1, 2, 3])])


def quiz(pen: Pen) -> str:
    """Closed-book questions; some follow-ups name their town or creature only by "it"."""
    questions = []
    for _ in range(pen.rng.randint(4, 9)):
        kind, subject = pen.pick_subject()
        first, second = pen.sample(FACTS[kind], 2)
        questions.append(pen.ask_fact(subject, first))
        if pen.chance(0.25):
            questions.append(pen.ask(FOLLOW_UPS[second], subject[second]))
    return "\n".join(questions)


class Told(NamedTuple):
    """What a speaker has told of one topic."""

    topic: str
    values: dict  # of templates' fields: the speaker {who}, the {other}, and what was told as it is {spoken}
    answer: str  # to a question about it


class Conversation:
    """Two people tell each other about themselves."""

    def __init__(self, pen: Pen) -> None:
        self.pen = pen
        self.first, self.second, self.listener = pen.pick_people(3)
        self.names = {"a": self.first, "b": self.second}
        town = pen.pick([*TOWNS])
        greetings = pen.fill_template(dialogues.GREETINGS, **self.names, town=town)
        self.lines = greetings.split("|")
        self.told: list[Told] = []
        first_object, second_object = pen.pick_objects(2)
        self.facts = {
            self.first: self.draw_facts(self.first, self.second, first_object),
            self.second: self.draw_facts(self.second, self.first, second_object),
        }

    def draw_facts(self, who: Person, other: Person, thing: str) -> dict[str, object]:
        """Return the template values of what a speaker may tell."""
        home = self.pen.pick([*TOWNS])
        return {
            "who": who,
            "other": other,
            "obj": thing,
            "home": home,
            "epithet": self.pen.fill_template(EPITHETS, **TOWNS[home]),
            **self.pen.pick_words("job pet petname food"),
            "age": self.pen.pick(range(16, 80)),
            "kin": self.pen.pick(WORDS["number"][:8]),
        }

    def say(self, speaker: Person, bank: Bank, **values: object) -> None:
        """Add a line."""
        self.lines.append(f"{speaker}: {self.pen.write_sentence(bank, **values)}")

    def tell(self, speaker: Person, topic: str) -> None:
        """Let a speaker tell the facts of a topic."""
        values = self.facts[speaker]
        self.say(speaker, dialogues.TOPICS[topic].statements, **values)
        spoken = dialogues.SPOKEN[topic].format(**values)
        self.told.append(Told(topic, values | {"spoken": spoken}, spoken.removeprefix("a ")))

    def discuss(self, topic: str) -> None:
        """Let one speaker ask and the other tell; perhaps the first one tells, too."""
        asker, other = self.first, self.second
        if not self.pen.chance(0.5):
            asker, other = other, asker
        self.say(asker, dialogues.TOPICS[topic].questions)
        self.tell(other, topic)
        if self.pen.chance(0.5):
            self.lines[-1] += " " + self.pen.write_sentence(dialogues.RETURNED_QUESTIONS)
            self.tell(asker, topic)
        elif self.pen.chance(0.6):
            self.say(asker, dialogues.REACTIONS)

    def ask_about_the_world(self) -> None:
        """Let one speaker ask about a town or a creature and the other answer."""
        kind, subject = self.pen.pick_subject()
        fact = self.pen.pick(FACTS[kind])
        question = self.pen.fill_template(FACT_QUESTIONS[fact], **subject)
        self.say(self.first, dialogues.WORLD_QUESTIONS, question=question)
        self.lines.append(f"{self.second}: {self.pen.state_fact(subject, fact)}")

    def recall(self) -> None:
        """Let the speakers and a listener ask again for what was told, and say goodbye."""
        pen = self.pen
        for topic, values, _ in pen.sample(self.told, pen.pick([0, 1, 1, 2])):
            again = pen.fill_template(dialogues.TOPICS[topic].later_questions, **values)
            self.say(values["other"], dialogues.REMINDERS, b=values["who"], again=again)
            self.say(values["who"], dialogues.REPLIES, **values)
        if pen.chance(0.4):
            topic, values, _ = pen.pick(self.told)
            other = values["other"]
            question = pen.fill_template(dialogues.TOPICS[topic].outside_questions, **values)
            self.say(self.listener, dialogues.THIRD_PERSON_QUESTIONS, b=other, question=question)
            self.say(other, dialogues.THIRD_PERSON_REPLIES, **values)
        self.lines += pen.fill_template(dialogues.FAREWELLS, **self.names).split("|")


def hold_conversation(pen: Pen, recall: bool) -> tuple[str, list[Told]]:
    """Return a conversation and all that is told in it; if recall, some of it is asked for again in it."""
    conversation = Conversation(pen)
    for topic in pen.sample([*dialogues.TOPICS], pen.pick([2, 3, 3, 4])):
        conversation.discuss(topic)
    for _ in range(pen.pick([0, 1, 1, 2])):
        conversation.ask_about_the_world()
    if recall:
        conversation.recall()
    return "\n".join(conversation.lines), conversation.told


def dialogue(pen: Pen) -> str:
    """Two people tell each other about themselves, and are asked about it later."""
    text, all_told = hold_conversation(pen, recall=True)
    questions = []
    for topic, values, answer in pen.sample(all_told, pen.pick([0, 1, 2])):
        questions.append(pen.ask(dialogues.TOPICS[topic].outside_questions, answer, **values))
    return with_questions(text, questions)


def join_steps(
    pen: Pen, opening: str, steps: list[str], closing: str, order_words: tuple[str, ...]
) -> str:
    """Join clauses as numbered lines, or as a paragraph that says First and Finally."""
    if pen.chance(0.4):
        separator = "\n"
        starts = [f"{i}. " for i, _ in enumerate(steps, 1)]
    else:
        separator = " "
        starts = ["First, "]
        for i in range(len(steps) - 2):
            starts.append(order_words[(i + len(opening)) % len(order_words)])
        starts.append("Finally, ")
    lines = [as_sentences(start + step) + "." for start, step in zip(starts, steps, strict=True)]
    return separator.join([opening, *lines, closing])


class Project(NamedTuple):
    """A device, a dish or a journey that somebody plans."""

    kind: str
    values: dict  # of its templates' fields
    points: list[int]  # numbers of its plan's points


def draw_project(pen: Pen) -> Project:
    """Return a project."""
    kind = pen.pick([*explanations.PLANS])
    required, n_points = explanations.REQUIRED_POINTS[kind], len(explanations.PLANS[kind].points)
    values = dict(zip("acd", pen.pick_people(3), strict=True))
    (values["obj"],) = pen.pick_objects(1)
    values["town"], values["town2"] = pen.sample([*TOWNS], 2)
    for i, number in enumerate(pen.sample(WORDS["number"], 5), 1):
        values[f"n{i}"] = number
    values |= pen.pick_words(explanations.PLAN_FIELDS)
    values["m1"], values["m2"] = pen.sample(WORDS["minutes"], 2)
    optional = [i for i in range(n_points) if i not in required]
    chosen = pen.sample(optional, pen.pick([5, 6, 7]) - len(required))
    return Project(kind, values, sorted([*required, *chosen]))


def notes_and_answer(pen: Pen, project: Project) -> tuple[str, str]:
    """Return notes on a project with the question to explain it, and the long answer that the notes imply."""
    kind, values, point_numbers = project
    plan = explanations.PLANS[kind]
    points = [plan.points[i] for i in point_numbers]
    heads = pen.fill_template(plan.heads, **values).split("|")
    notes = [pen.fill_one_of(point.notes, **values) for point in points]
    split_at = pen.rng.randint(1, len(heads))
    notes = [*heads[:split_at], *notes, *heads[split_at:]]
    if pen.chance(0.3):
        pen.rng.shuffle(notes)
    steps = []
    for i, point in enumerate(points):
        named = i in (0, len(points) // 2 + 1)
        who = values["a"] if named else values["a"].they
        steps.append(pen.fill_one_of(point.steps, x=who, **values))
    opening = pen.write_sentence(plan.openings, **values)
    closing = pen.write_sentence(plan.closings, **values)
    answer = join_steps(pen, opening, steps, closing, pen.pick(explanations.ORDER_WORDS))
    lines = ["Notes:", *("- " + as_sentences(note) for note in notes)]
    question = question_prompt(pen.fill_template(plan.questions, **values))
    return with_questions("\n".join(lines), [question]), answer


def explanation(pen: Pen) -> str:
    """A long, ordered answer, from notes or (one time in four) from knowledge of the world."""
    if pen.chance(0.75):
        return " ".join(notes_and_answer(pen, draw_project(pen)))
    kind, subject = pen.pick_subject()
    templates = explanations.WORLD_EXPLANATIONS[kind]
    facts, steps = [*FACTS[kind]], []
    pen.rng.shuffle(facts)
    for fact in facts:
        renamed = subject | {"s": pen.pick([subject["s"], "it"])}
        steps.append(pen.fill_template(FACT_STATEMENTS[fact], **renamed))
    opening = pen.write_sentence(templates.openings, **subject)
    closing = pen.write_sentence(templates.closings, **subject)
    answer = join_steps(pen, opening, steps, closing, ("Second, ", "Also, ", "And "))
    question = pen.ask(templates.questions, answer, **subject)
    return question + "\n" + pen.ask_fact(subject, pen.pick(facts))


def draw_items(pen: Pen, kind: str, n: int) -> list[str]:
    """Return n different items of a list."""
    pools = {"names": PEOPLE[pen.split], "towns": [*TOWNS], "numbers": range(10, 1000)}
    if kind in pools:
        return list(map(str, pen.sample(pools[kind], n)))
    if kind == "things":
        return pen.pick_objects(n)
    numbers, goods = pen.sample(WORDS["number"], n), pen.sample(WORDS["goods"] * 2, n)
    return [f"{number} {item}" for number, item in zip(numbers, goods, strict=True)]


def recite_list(pen: Pen) -> tuple[str, str, str]:
    """Return a list with its story up to the copy, the copy, and what comes after it."""
    first, second = pen.pick_people(2)
    kind = pen.pick([*lists.LENGTHS])
    n = pen.rng.randint(*lists.LENGTHS[kind])
    items = draw_items(pen, kind, n)
    town = pen.pick([*TOWNS])
    values = {"a": first, "b": second, "town": town, "what": kind, "many": n}
    on_lines = n <= 14 and pen.chance(0.4)
    copy = ("\n" if on_lines else ", ").join(items)
    opening = pen.write_sentence(lists.OPENINGS, **values)
    middle = pen.write_sentence(lists.MIDDLES, **values)
    closing = "\n" + pen.write_sentence(lists.CLOSINGS, **values)
    i = pen.rng.randrange(n - 1)
    position = i % len(lists.ORDINALS)
    questions = []
    if pen.chance(0.5):
        questions.append(pen.ask(lists.SUCCESSOR_QUESTIONS, items[i + 1], item=items[i]))
    elif pen.chance(0.5):
        nth = lists.ORDINALS[position]
        questions.append(pen.ask(lists.POSITION_QUESTIONS, items[position], nth=nth))
    return f"{opening}\n{copy}\n{middle}\n", copy, with_questions(closing, questions)


KINDS = {
    "story": story,
    "article": article,
    "quiz": quiz,
    "dialogue": dialogue,
    "explain": explanation,
    "list": lambda pen: "".join(recite_list(pen)),
}
WEIGHTS = (28, 17, 15, 17, 13, 10)  # in percent


# --- What the rest of the project uses ------------------------------------------------------------------


def document(split: str, index: int, seed: int = 0) -> Document:
    """Return the document at (seed, split, index), 350 to 1900 characters long; those of seed 0 are what models are
    trained and evaluated on."""
    pen = Pen(split, f"{index}", seed)
    kind = pen.rng.choices([*KINDS], WEIGHTS)[0]
    text = ""
    while not 350 <= len(text) <= 1900:
        text = KINDS[kind](pen)
    return Document(kind, text)


def documents(split: str, n: int, seed: int = 0) -> Iterator[Document]:
    """Return the first n documents of a split."""
    return (document(split, i, seed) for i in range(n))


def beginnings(tokenizer: Encoding, split: str, n: int, length: int) -> list[list[int]]:
    """Return the beginnings of n stories, dialogues or explanations, `length` tokens each: at most
    the last 256 belong to the document that is to be continued, and earlier documents precede
    them."""
    n_own = min(length, 256)
    n_earlier = length - n_own
    rows, earlier, index = [], [], 0
    while len(rows) < n:
        kind, text = document(split, index)
        ids = tokenizer.encode_ordinary(text)
        if (
            kind in ("story", "dialogue", "explain")
            and len(ids) > n_own
            and len(earlier) >= n_earlier
        ):
            rows.append(earlier[len(earlier) - n_earlier :] + ids[:n_own])
        earlier = [*earlier, *ids, tokenizer.eot_token][-length:]
        index += 1
    return rows


def closed_book_questions(split: str) -> list[Question]:
    """Return every fact of the world in every wording of the split; the family is like "town:Tolben:river"."""
    pen, questions = Pen(split, ""), []
    for kind, subjects in WORLD.items():
        for subject in subjects:
            for fact in FACTS[kind]:
                family = f"{kind}:{subject[kind]}:{fact}"
                for template in pen.wordings(FACT_QUESTIONS[fact]):
                    prompt = question_prompt(template, **subject)
                    questions.append(Question(family, prompt, subject[fact]))
    return questions


def recall_questions(split: str, n: int) -> list[Question]:
    """Return n questions on early facts of stories and dialogues; three in a row are paraphrases on the same text.

    The text states the asked fact once and never comes back to it. Prompts are 350 to 1300 characters long.
    """
    questions, index = [], 0
    while len(questions) < n:
        pen = Pen(split, f"recall/{index}")
        text = ""
        while not 270 <= len(text) <= 1200:
            if index % 3 == 2:
                text, all_told = hold_conversation(pen, recall=False)
                name, values, answer = pen.pick(all_told)
                bank = dialogues.TOPICS[name].outside_questions
            else:
                text, (values, threads) = tell_story(pen, mute=True)
                name = threads[0]
                bank = stories.QUESTIONS[name]
                answer = stories.THREAD_ANSWERS[name].format(**values)
        templates = pen.wordings(bank)
        for i in sorted(pen.sample(range(len(templates)), 3)):
            prompt = with_questions(text, [question_prompt(templates[i], **values)])
            questions.append(Question(f"recall:{split}:{index}:{name}", prompt, answer))
        index += 1
    return questions[:n]


def explain_questions(split: str, n: int) -> list[Question]:
    """Return n sets of notes, each with the question to explain them and the long reference answer."""
    questions = []
    for i in range(n):
        pen = Pen(split, f"explain/{i}")
        prompt, answer = notes_and_answer(pen, draw_project(pen))
        questions.append(Question(f"explain:{split}:{i}", prompt, answer))
    return questions


def quiz_families(split: str, header: int = 4) -> list[list[Question]]:
    """Return all wordings of each closed-book question that belongs to a split, after the same few questions with
    answers.

    Facts are shared out among the splits: what is asked in one isn't asked in another.
    """
    first_wordings = {}
    for question in closed_book_questions("train"):
        first_wordings.setdefault(question.family, question)
    names = sorted(first_wordings)
    Random("families").shuffle(names)
    examples = []
    for name in names[:header]:
        question = first_wordings[name]
        examples.append(f"{question.prompt} {question.answer}")
    names = names[header:]
    families = {}
    for question in closed_book_questions(split):
        prompt = "\n".join([*examples, question.prompt])
        member = Question(f"quiz:{question.family}", prompt, question.answer)
        families.setdefault(question.family, []).append(member)
    names_of_splits = {"train": names[96:], "valid": names[48:96], "test": names[:48]}
    return [families[name] for name in names_of_splits[split]]


def story_families(split: str, n: int) -> list[list[Question]]:
    """Return n stories, each told in three ways and each time with a question on the same early fact, in other
    words."""
    families, index = [], 0
    while len(families) < n:
        name = f"retold/{index}"
        plot = draw_plot(Pen(split, name))
        thread = plot.threads[0]
        answer = stories.THREAD_ANSWERS[thread].format(**plot.values)
        family = []
        for i in range(3):
            pen = Pen(split, f"{name}/{i}")
            text = story_prose(pen, plot, mute=True)
            templates = pen.wordings(stories.QUESTIONS[thread])
            question = question_prompt(templates[i % len(templates)], **plot.values)
            prompt = with_questions(text, [question])
            family.append(Question(f"story:{split}:{index}:{thread}", prompt, answer))
        if all(350 <= len(question.prompt) <= 1300 for question in family):
            families.append(family)
        index += 1
    return families


def notes_families(split: str, n: int) -> list[list[Question]]:
    """Return n projects, each with three sets of notes, in other words and another order, and the question to explain
    it."""
    families = []
    for index in range(n):
        name = f"noted/{index}"
        project = draw_project(Pen(split, name))
        family = []
        for i in range(3):
            prompt, answer = notes_and_answer(Pen(split, f"{name}/{i}"), project)
            family.append(Question(f"notes:{split}:{index}", prompt, answer))
        families.append(family)
    return families


def repeated_lists(split: str, n: int) -> list[tuple[str, str]]:
    """Return n pairs (text up to where the copy of its list begins, the copy)."""
    return [recite_list(Pen(split, f"list/{i}"))[:2] for i in range(n)]
