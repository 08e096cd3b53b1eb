"""The texts in data/real, invented ones of several kinds and excerpts of this repository; questions about the facts in
six of them, and prompts; and files of pairs of similar prompts, such as data/capitals.csv."""

from collections.abc import Iterable
from pathlib import Path
from random import Random
from typing import NamedTuple

import tiktoken

from support.files import read_csv, read_text

FOLDER = Path(__file__).resolve().parent.parent / "data" / "real"
CAPITALS = FOLDER.parent / "capitals.csv"  # pairs of questions about capitals

Family = list[tuple[str, str]]  # paraphrases: prompt and answer
Splits = dict[str, list[Family]]  # for fitting ("train"), choosing ("valid") and measuring ("test")


class FactQuestion(NamedTuple):
    """A question about a text, and the words that a right answer contains."""

    question: str
    answer: str


def read_texts() -> dict[str, str]:
    """Return the texts by the names of their files, such as "story"."""
    return {path.stem: read_text(path).strip() for path in sorted(FOLDER.glob("*.txt"))}


def read_technical_texts() -> list[str]:
    """Return twelve beginnings of sections and classes of this repository, as they were in November 2026: pages with
    tables and listings, code, and diffs."""
    return read_text(FOLDER / "technical.md").split("\n\n=====\n\n")


def read_questions() -> dict[str, list[FactQuestion]]:
    """Return the questions about each text that has any, by its name."""
    questions: dict[str, list[FactQuestion]] = {}
    for row in read_csv(FOLDER / "questions.csv", "text", "question", "answer"):
        question = FactQuestion(row["question"], row["answer"])
        questions.setdefault(row["text"], []).append(question)
    return questions


def read_prompts_of_kind(kind: str) -> list[str]:
    """Return the prompts that ask for a text of one kind: "open", or "rewrite", to repeat a text with changes."""
    rows = read_csv(FOLDER / "prompts.csv", "kind", "prompt")
    return [row["prompt"] for row in rows if row["kind"] == kind]


def rows_of_tokens(
    tokenizer: tiktoken.Encoding, length: int, texts: Iterable[str] | None = None
) -> list[list[int]]:
    """Return the first `length` tokens of every text that has so many, by default of the invented
    ones in data/real."""
    texts = map(tokenizer.encode_ordinary, read_texts().values() if texts is None else texts)
    return [ids[:length] for ids in texts if len(ids) >= length]


def read_pairs(path: Path, seed: int = 0, max_families: int | None = None) -> Splits:
    """Return the pairs of a CSV file as families by split, three fifths of them for training and a
    fifth each for validation and test; columns: source, target, and optionally answer.

    Pairs that share a text are one family, and an answer is that of both prompts of its pair.
    max_families: of each split. Raises ValueError if columns are missing, a prompt is empty, or there are fewer than 15
    families.
    """
    family_of: dict[str, dict[str, str]] = {}  # text -> its family: prompts and their answers
    for row in read_csv(path, "source", "target"):
        if not row["source"] or not row["target"]:
            raise ValueError(f"{path} has a pair with an empty prompt")
        merged = family_of.get(row["source"], {}) | family_of.get(row["target"], {})
        for text in (row["source"], row["target"]):
            merged[text] = (row.get("answer") or merged.get(text, "")).strip()
        family_of |= dict.fromkeys(merged, merged)
    distinct_families = {id(family): family for family in family_of.values()}.values()
    families = [[*family.items()] for family in distinct_families if len(family) > 1]
    if len(families) < 15:
        raise ValueError(f"{path} has {len(families)} families of prompts: 15 are needed")
    Random(seed).shuffle(families)
    fifth = len(families) // 5
    splits = {
        "train": families[2 * fifth :],
        "valid": families[fifth : 2 * fifth],
        "test": families[:fifth],
    }
    return {split: chosen[:max_families] for split, chosen in splits.items()}
