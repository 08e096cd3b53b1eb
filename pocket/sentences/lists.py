"""Lists that are read twice."""

from pocket.sentences.templates import read_bank

OPENINGS = read_bank("""
{a} of {town} [wrote down|made a list of] {many} {what}, and this is what it said:
before the [market|journey|festival] began, {a} read out {many} {what} to {b}:
here are the {many} {what} that {a} [found|wrote] in an old book:
{b} asked for the list, and {a} handed it over. it had {many} {what} on it:
this is the list of {many} {what} that {a} of {town} [handed|read out] to {b}:
before the [journey|festival], {b} wrote down {many} {what} in a book of {a}:
{a} asked {b} for {many} {what}, and {b} had them on a list:
""")
MIDDLES = read_bank("""
{b} [folded the paper|closed the book] and [looked out of the window|had a cup of tea]. then {b.they} said it all again, in the same order:
"[now you|your turn]," said {a}. {b} thought for a moment and [repeated|said] the list, leaving nothing out:
the paper [got wet|was eaten by a goat], but {b} remembered every word and wrote the list a second time:
{a} lost the paper on the way to {town}. luckily {b} had a copy:
"is that all?" asked {b}. "that is all," said {a}. so {b} read it back, word for word:
the paper [was lost|fell into the soup], but {b} thought for a moment and wrote it all a second time in the same order:
"now read it back," said {a}, and {b} [read|repeated] the list word for word:
{b} closed the book and said the list again, and {b.they} left nothing out:
""")
CLOSINGS = read_bank("""
nothing was missing, and {a} was [pleased|satisfied].
"not one mistake," said {a}.
{a} checked it twice. it was right both times.
it was right[ every time|], and {a} was [pleased|satisfied].
{a} was pleased: there was not one mistake in it.
{a} checked it. "not one is missing," {a.they} said.
""")
SUCCESSOR_QUESTIONS = read_bank("""
What comes right after {item} in the list?
Which one follows {item} in the list?
In the list, what comes after {item}?
---
Name the one that comes right after {item} in the list.
What follows {item} in the list?
""")
POSITION_QUESTIONS = read_bank("""
Which is the {nth} one in the list?
What is {nth} in the list?
---
Name the {nth} one in the list.
""")
LENGTHS = {  # by what a list is of, the fewest and the most items
    "things": (8, 13),
    "names": (12, 20),
    "towns": (10, 18),
    "numbers": (18, 25),
    "goods": (10, 16),
}
ORDINALS = "first second third fourth fifth".split()
