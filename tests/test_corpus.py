"""The corpus is reproducible to the byte, its splits are disjoint, and its questions can be answered."""

import hashlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pocket import corpus
from pocket.sentences import articles, dialogues, explanations, lists, stories
from pocket.sentences.nouns import WORDS

# sha256 of the first 200 documents of each split at seed 0: a change here is a change of the data set.
PINNED = {
    "train": "847830c1f26eff4d6ae740f8baa54794744b0e40998474297e8b533ca3f8e6a9",
    "valid": "22a51736bac779b595df86721bf353e7e60a9fd3fa749534e41433349627c980",
    "test": "cfce218838c347a1fc2f82e3d3ee6ad74507646cf6b4cf2d890883820df55c1b",
}
ROOT = Path(__file__).resolve().parent.parent
HELD_OUT = ("valid", "test")


@pytest.fixture(scope="module")
def docs() -> dict[str, list[corpus.Document]]:
    return {
        split: list(corpus.documents(split, 3000 if split == "train" else 1000))
        for split in corpus.SPLITS
    }


@pytest.mark.parametrize("split", corpus.SPLITS)
def test_documents_are_pinned(split):
    told = "\0".join(f"{d.kind}\1{d.text}" for d in corpus.documents(split, 200))
    assert hashlib.sha256(told.encode()).hexdigest() == PINNED[split]


def test_documents_do_not_depend_on_the_process():
    code = "from pocket import corpus\nprint([d.text for d in corpus.documents('test', 50)])"
    environment = {**os.environ, "PYTHONHASHSEED": "4321"}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=ROOT)
    assert done.stdout == f"{[d.text for d in corpus.documents('test', 50)]}\n", done.stderr


def test_documents_are_addressed_by_index_split_and_seed():
    some = list(corpus.documents("train", 5, seed=3))
    assert some == [corpus.document("train", i, seed=3) for i in range(5)]
    assert some[0] not in (corpus.document("train", 0, seed=4), corpus.document("valid", 0, seed=3))


@pytest.mark.parametrize("split", corpus.SPLITS)
def test_every_kind_occurs_and_text_is_clean(docs, split):
    assert {d.kind for d in docs[split]} == set(corpus.KINDS)
    for d in docs[split]:
        assert 300 <= len(d.text) <= 2100, d
        assert d.text.isascii() and d.text == d.text.strip(), d
        assert not re.search(
            r"  |[][{}|]| [,.]|\.\.|,,|\ba [aeiouAEIOU]|\ban [^aeiouhAEIOU]", d.text
        ), d
        assert d.kind == "list" or not re.search(r"(?m)(?:^|\. )[a-z]", d.text), d
    average = sum(len(d.text) for d in docs[split]) / len(docs[split])
    assert 650 < average < 900


def words_of(docs: list[corpus.Document]) -> set[str]:
    return {word for d in docs for word in re.findall(r"[A-Za-z]+", d.text)}


def test_people_and_objects_of_the_splits_are_disjoint_in_the_text(docs):
    words = {split: words_of(docs[split]) for split in corpus.SPLITS}
    for split in corpus.SPLITS:
        nouns = {thing.split()[1] for thing in corpus.OBJECTS[split]}
        names = {person.name for person in corpus.PEOPLE[split]}
        assert nouns <= words[split] and len(names & words[split]) >= min(90, len(names))
        for other in {*corpus.SPLITS} - {split}:
            assert not names & words[other]
            if other == "train":
                assert not nouns & words[other]


def masked_questions(docs: list[corpus.Document]) -> set[str]:
    """Question lines with everything that is not template replaced by a dot."""
    tables = [
        corpus.TOWNS,
        corpus.CREATURES,
        *(WORDS[field] for field in ("goods", "cargo", "pet", "dish", "device")),
        *corpus.OBJECTS.values(),
        *([p.name for p in people] for people in corpus.PEOPLE.values()),
    ]
    mask = re.compile(
        r"\b(?:" + "|".join(sorted({w for t in tables for w in t}, key=len, reverse=True)) + r")\b"
    )
    lines = (
        line
        for d in docs
        if d.kind != "list"
        for line in d.text.split("\n")
        if line.startswith("Question: ")
    )
    return {
        re.sub(r"\bh(?:is|er)\b", ".", re.sub(r"\ban?\b", "a", mask.sub(".", line)))
        for line in lines
    }


def test_questions_of_held_out_text_are_worded_as_none_of_train(docs):
    train = masked_questions(docs["train"])
    for split in HELD_OUT:
        held = masked_questions(docs[split])
        assert len(held) >= 60 and not held & train


def test_no_held_out_question_is_worded_as_a_training_question():
    banks = [lists.AFTER_ASKS, lists.NTH_ASKS, articles.VISITS]
    banks += [asks for asks, _, _ in explanations.WORLD_EXPLAINS.values()]
    banks += [b for table in (corpus.ASKS, corpus.FOLLOWS, stories.RECALLS) for b in table.values()]
    banks += [asked_by_others for _, _, _, asked_by_others in dialogues.TOPICS.values()]
    banks += [asks for _, asks, *_ in explanations.PLANS.values()]
    for train, held in banks:
        assert train and held and not set(train) & set(held)
        assert len(set(train)) == len(train) and len(set(held)) == len(held)
    for train, held in [*corpus.ASKS.values(), *stories.RECALLS.values()]:
        assert len(train) >= 5 and len(held) >= 3


def test_held_out_words_are_known_from_train(docs):
    known = {word.lower() for word in words_of(docs["train"])}
    for split in HELD_OUT:
        nouns = {thing.split()[1] for thing in corpus.OBJECTS[split]}
        names = {person.name.lower() for person in corpus.PEOPLE[split]}
        words = {word.lower() for word in words_of(docs[split])}
        assert not words - known - nouns - names


def test_world_has_many_values_for_each_fact():
    for table, keys in (
        (corpus.TOWNS, corpus.TOWN_FACTS),
        (corpus.CREATURES, corpus.CREATURE_FACTS),
    ):
        for key in keys:
            first_words = [facts[key].split()[0] for facts in table.values()]
            assert len(set(first_words)) >= 12
            assert len(set(first_words)) == len({facts[key] for facts in table.values()})
            assert max(map(first_words.count, first_words)) <= len(table) / 10
            assert not {"the", "a", "an", "The"} & set(first_words)


@pytest.mark.parametrize("split", corpus.SPLITS)
def test_closed_book_questions_agree_with_the_world(split):
    questions = corpus.closed_book_questions(split)
    assert len({q.family for q in questions}) == 36 * 5 + 20 * 3
    assert (
        len({q.prompt for q in questions}) == len(questions) == 240 * (8 if split == "train" else 3)
    )
    for q in questions:
        kind, name, key = q.family.split(":")
        assert {"town": corpus.TOWNS, "creature": corpus.CREATURES}[kind][name][key] == q.answer
        assert (
            q.prompt.startswith("Question: ")
            and q.prompt.endswith("\nAnswer:")
            and name in q.prompt
        )


def test_quizzes_are_answered_by_the_world(docs):
    answers = {
        q.prompt: q.answer
        for split in ("train", "valid")
        for q in corpus.closed_book_questions(split)
    }
    pairs = [
        p
        for split in corpus.SPLITS
        for d in docs[split]
        for p in re.findall(r"(Question: .*\nAnswer:) (.*)", d.text)
    ]
    asked = [(prompt, answer) for prompt, answer in pairs if prompt in answers]
    assert len(asked) > 2000
    assert all(answers[prompt] == answer for prompt, answer in asked)


@pytest.mark.parametrize("split", corpus.SPLITS)
def test_recall_answers_stand_in_their_prompts(split):
    questions = corpus.recall_questions(split, 300)
    assert len(questions) == 300 and questions == corpus.recall_questions(split, 300)
    assert questions != corpus.recall_questions(split, 300, seed=1)
    for q in questions:
        text, question = q.prompt.rsplit("\n\nQuestion: ", 1)
        assert 300 <= len(q.prompt) <= 1350 and question.endswith("\nAnswer:")
        assert q.answer.lower() in text.lower() and q.answer.lower() not in question.lower(), q
    for q, r, s in zip(*[iter(questions)] * 3, strict=True):
        assert q.family == r.family == s.family and q.answer == r.answer == s.answer
        assert len({q.paraphrase, r.paraphrase, s.paraphrase}) == 3
        assert len({p.prompt.rsplit("\n\n", 1)[0] for p in (q, r, s)}) == 1


@pytest.mark.parametrize("split", corpus.SPLITS)
def test_explanations_follow_from_their_notes(split):
    """Every number, name, object and other particular of the answer stands in the prompt."""
    things = re.compile(
        r"\b(?:"
        + "|".join(
            [
                *(
                    w
                    for field in ["number", "minutes", *explanations.PLAN_FIELDS.split()]
                    for w in WORDS[field]
                ),
                *corpus.TOWNS,
                *corpus.OBJECTS[split],
                *(p.name for p in corpus.PEOPLE[split]),
            ]
        )
        + r")\b"
    )
    for q in corpus.explain_questions(split, 200):
        assert (
            q.prompt.startswith("Notes:\n- ")
            and "\n\nQuestion: Explain " in q.prompt
            and q.prompt.endswith("\nAnswer:")
        )
        assert 350 <= len(q.answer) <= 1050 and not q.answer.startswith(" ")
        used = set(things.findall(q.answer))
        assert len(used) >= 8
        assert all(re.search(rf"(?i)\b{word}\b", q.prompt) for word in used), (used, q)


@pytest.mark.parametrize("split", corpus.SPLITS)
def test_repeated_lists_are_copies(split):
    for head, copy in corpus.repeated_lists(split, 200):
        assert head.endswith("\n") and head.count(copy) == 1
        assert 8 <= len(re.split(r", |\n", copy)) <= 25


@pytest.mark.parametrize("call", [corpus.documents, corpus.recall_questions, corpus.repeated_lists])
def test_unknown_split_is_refused(call):
    with pytest.raises(ValueError, match="^split must be one of train, valid, test, got 'x'$"):
        call("x", 1)
