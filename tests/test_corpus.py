"""The corpus is reproducible to the byte, its splits are disjoint, and its questions can be answered."""

import hashlib
import re

import pytest

from pocket import corpus
from pocket.sentences import articles, dialogues, explanations, lists, stories

# sha256 of documents, questions and lists: a change here is a change of the data set.
PINNED = {
    "train": "316f36a3b62b6237e9c3baf1ba1b4596607a567c24b4c7c959a543538ef28115",
    "valid": "a18a8df30a41a842e8167ae01377ec91f997ddab11b44bfb1e034a9708642e41",
    "test": "649f6df880a78c00c9ad7177ec02bb75502a2f73b43d81fe919a179a77b64817",
}


def digest(split: str) -> str:
    texts = [(d.kind, d.text) for d in corpus.documents(split, 200)]
    questions = corpus.closed_book_questions(split) + corpus.recall_questions(split, 30)
    questions += corpus.explain_questions(split, 10)
    texts += [(q.prompt, q.answer) for q in questions]
    texts += corpus.repeated_lists(split, 10)
    for families in (corpus.story_families(split, 5), corpus.notes_families(split, 5)):
        texts += [(q.prompt, q.answer) for family in families for q in family]
    return hashlib.sha256(repr(texts).encode()).hexdigest()


@pytest.mark.parametrize("split", corpus.SPLITS)
def test_the_corpus_is_pinned(split: str) -> None:
    assert digest(split) == PINNED[split]  # whatever Python's seed of hashes is in this process


@pytest.mark.slow
def test_people_and_objects_of_held_out_text_are_new_and_all_other_words_known() -> None:
    words, new = {}, {}
    for split in corpus.SPLITS:
        text = " ".join(d.text for d in corpus.documents(split, 3000 if split == "train" else 1000))
        words[split] = {*re.findall(r"[A-Za-z]+", text)}
        new[split] = {thing.split()[1] for thing in corpus.OBJECTS[split]}
        new[split] |= {person.name for person in corpus.PEOPLE[split]}
    known = {word.lower() for word in words["train"]}
    for split in ("valid", "test"):
        assert len(new[split] & words[split]) > 100
        assert words["train"].isdisjoint(new[split])
        assert {word.lower() for word in words[split] - new[split]} <= known
        assert words[split].isdisjoint(person.name for person in corpus.PEOPLE["train"])


def test_no_held_out_question_is_worded_as_a_training_question() -> None:
    banks = [lists.SUCCESSOR_QUESTIONS, lists.POSITION_QUESTIONS, articles.VISITS]
    banks += [templates.questions for templates in explanations.WORLD_EXPLANATIONS.values()]
    for table in (corpus.FACT_QUESTIONS, corpus.FOLLOW_UPS, stories.QUESTIONS):
        banks += table.values()
    banks += [topic.outside_questions for topic in dialogues.TOPICS.values()]
    banks += [plan.questions for plan in explanations.PLANS.values()]
    for train, held_out in banks:
        assert train and held_out and not set(train) & set(held_out)


def test_recall_answers_stand_in_their_prompts() -> None:
    questions = corpus.recall_questions("test", 300)
    for i, q in enumerate(questions):
        text, question = q.prompt.rsplit("\n\nQuestion: ", 1)
        assert 300 <= len(q.prompt) <= 1350 and question.endswith("\nAnswer:")
        assert q.answer.lower() in text.lower() and q.answer.lower() not in question.lower(), q
        first = questions[i - i % 3]  # of three wordings
        assert first.prompt.startswith(text)
        assert (q.family, q.answer) == (first.family, first.answer)
    assert len({q.prompt for q in questions}) == 300
