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

import argparse
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

SPLITS = ("train", "valid", "test")


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

    @property
    def they(self) -> str:
        return "she" if self.female else "he"

    @property
    def them(self) -> str:
        return "her" if self.female else "him"

    @property
    def their(self) -> str:
        return "her" if self.female else "his"


Bank = tuple[list[str], list[str]]  # templates of train, templates of valid and test


def bank(text: str) -> Bank:
    """Split a block of templates, one a line, at its "---" into (train, held-out): for questions."""
    train, held = text.strip().split("\n---\n")
    return train.split("\n"), held.split("\n")


def prose(text: str) -> Bank:
    """Read a block of templates, one a line, that all splits use."""
    templates = text.strip().split("\n")
    return templates, templates


def cells(text: str) -> list[list[str]]:
    """Read a literal table: one row a line, cells between bars."""
    return [[cell.strip() for cell in row.split("|")] for row in text.strip().split("\n")]


def words(text: str) -> list[str]:
    """Read a literal list: entries between bars or line ends."""
    return text.strip().replace("\n", "|").split("|")


# --- The world: 36 towns x 5 facts and 20 creatures x 3 facts, the same in all splits ---------------
# An answer's first word carries the fact, and no value holds for more than three subjects, so that
# always guessing the most common value is right in at most one case in twelve.

TOWN_FACTS = ("river", "trade", "founder", "month", "wood")
TOWNS = {row[0]: dict(zip(TOWN_FACTS, row[1:], strict=True)) for row in cells("""
Tolben       | Tamble | copper bells  | Quentil   | November  | Nightjar Wood
Marwick      | Daunt  | wax candles   | Pryce     | April     | Sorrel Wood
Lindral      | Sarn   | silver thread | Aldreth   | December  | Owlet Wood
Ospen        | Brandle| linen sails   | Dagna     | June      | Foxtail Wood
Cattermoor   | Lisk   | carved spoons | Leofa     | November  | Sorrel Wood
Vorling      | Quenna | goat cheese   | Mordwen   | April     | Rookham Wood
Quillby      | Marl   | salt fish     | Edrick    | May       | Quarley Wood
Dunsey       | Gloam  | goat cheese   | Godric    | September | Hazelrig Wood
Elverton     | Wende  | carved spoons | Ffion     | April     | Wychet Wood
Farrowgate   | Marl   | woven carpets | Ysolde    | September | Greyfern Wood
Grismouth    | Corrow | oak barrels   | Ulfred    | February  | Foxtail Wood
Hexley       | Daunt  | iron gates    | Ingeld    | September | Mosswell Wood
Innerby      | Pelt   | barley bread  | Zeno      | July      | Thistle Wood
Jasperwell   | Quenna | amber glass   | Hunith    | July      | Hazelrig Wood
Kestering    | Brandle| honey cakes   | Frideswide| March     | Ashlock Wood
Lomhurst     | Hesper | silver thread | Nesta     | February  | Rookham Wood
Nettlebridge | Sarn   | woven carpets | Ansgar    | August    | Owlet Wood
Oakmere      | Hesper | blue pottery  | Dunstan   | October   | Larkspur Wood
Pellam       | Ulver  | felt hats     | Rhosyn    | May       | Ashlock Wood
Ravensby     | Fesk   | paper kites   | Ceolric   | June      | Greyfern Wood
Saltry       | Wende  | salt fish     | Gudrin    | March     | Hollin Wood
Thornwick    | Yarl   | leather boots | Odrun     | October   | Mosswell Wood
Umberfield   | Fesk   | blue pottery  | Eluned    | December  | Elmsty Wood
Wexcombe     | Pelt   | leather boots | Ludmil    | August    | Dunmark Wood
Yarrowdale   | Gloam  | iron gates    | Vashti    | July      | Hollin Wood
Zellam       | Ulver  | amber glass   | Cuthwin   | March     | Bramwith Wood
Birchover    | Ivorn  | linen sails   | Thessaly  | January   | Larkspur Wood
Corvane      | Ivorn  | wooden toys   | Kunrad    | June      | Thistle Wood
Dellmarsh    | Neth   | paper kites   | Sigmar    | August    | Wychet Wood
Emberlow     | Corrow | copper bells  | Katrinel  | May       | Elmsty Wood
Foxham       | Orrel  | barley bread  | Bersa     | November  | Dunmark Wood
Garnford     | Lisk   | wooden toys   | Hestor    | December  | Bramwith Wood
Hollowby     | Orrel  | wax candles   | Wynstan   | January   | Quarley Wood
Mistlade     | Tamble | oak barrels   | Jessamy   | October   | Crowden Wood
Pennock      | Neth   | felt hats     | Isbrand   | February  | Nightjar Wood
Stavering    | Yarl   | honey cakes   | Brunhild  | January   | Crowden Wood
""")}

CREATURE_FACTS = ("food", "home", "coat")
CREATURES = {row[0]: dict(zip(CREATURE_FACTS, row[1:], strict=True)) for row in cells("""
ollet      | walnuts   | snowfields  | russet
fernhare   | worms     | treetops    | green
tuskin     | mushrooms | hollow logs | scarlet
glimmerel  | turnips   | ruins       | russet
burrowl    | reeds     | chimneys    | white
quillock   | acorns    | reed beds   | copper
snowmar    | apples    | haystacks   | violet
reedling   | thistles  | cliffs      | blue
stoneback  | snails    | old wells   | ivory
mothwing   | berries   | barns       | amber
thornpig   | beetles   | wheat fields| slate
wicklet    | honey     | orchards    | brown
hushbird   | pinecones | riverbanks  | slate
lumpin     | clover    | hedges      | grey
drakelet   | minnows   | attics      | cream
nightpony  | crickets  | caves       | golden
pebbler    | nettles   | sand dunes  | white
sedgecat   | moss      | cellars     | black
whistlefin | barley    | bogs        | silver
yaffin     | lichen    | stone walls | golden
""")}

# Statements. {s} is the subject: a town's name, "the town" or "it"; "the ollet" or "it".
SAYS = {
    "river": prose("""
{s} stands on the river {river}
{s} lies on the [banks|left bank|right bank] of the {river}
{s} was built [long ago|] beside the {river}
[every house in|every street of] {town} is within sound of the river {river}
the river that runs through {town} is the {river}
the {river} is the river on which {s} stands
{s} lies beside a river, the {river}
in {town} every street runs down to the {river}
"""),
    "trade": prose("""
{s} is known [far and wide|in every market|] for its {trade}
{s} lives by its {trade}
people come from [far away|all around|three valleys] to buy {trade} in {town}
the [shops|market stalls|workshops] of {town} are full of {trade}
the trade of {town} is {trade}
in every market people know {town} for its {trade}
people who want {trade} come to {town}
{s} is full of workshops, and their trade is {trade}
"""),
    "founder": prose("""
{s} was founded by {founder}
{founder} [was the founder of|founded] {town}
the founder of {town} was called {founder}
a stone [in the square|by the well|at the gate] [says|tells everyone] that {founder} founded {town}
the first house of {town} was built by {founder}[, its founder|, who founded the town]
it was {founder} who founded {town}
{s} has a founder called {founder}
by the well a stone with the name of {founder} tells who founded {town}
"""),
    "month": prose("""
{s} holds its festival in {month}
the festival of {town} [is held|takes place|comes round] in {month}
in {month} [the streets fill with music|the whole town dances|lamps are lit everywhere], for that is the festival of {town}
{month} is the month of the festival in {town}
every {month} {town} holds its [great|yearly|merry] festival
when {month} comes, {town} holds its festival
the month in which {town} holds its festival is {month}
{s} has music in its streets in {month}, the month of its festival
"""),
    "wood": prose("""
{s} lies [near|next to|at the edge of] {wood}
the wood nearest to {town} is called {wood}
{wood} begins [just behind|a short walk from] {town}
children from {town} gather [nuts|berries|firewood] in {wood}
the nearest wood to {town} is {wood}
near {town} lies {wood}
a short walk from {town} you come to {wood}
the people of {town} gather firewood in the nearest wood, {wood}
"""),
    "food": prose("""
{s} [eats|likes to eat] {food}
{s} lives [mostly|almost only|] on {food}
the favourite food of the {creature} is {food}
nothing pleases the {creature} more than [a meal of|fresh|plenty of] {food}
[all day|all night] the {creature} looks for {food} to eat
what the {creature} likes to eat is {food}
a meal of {food} is what pleases the {creature} most
for food the {creature} looks for {food}
"""),
    "home": prose("""
{s} makes its home in {home}
{s} lives in {home}
{s} sleeps in {home} [and seldom leaves them|all winter|when the sun is high]
if you want to see the {creature}, look in {home}
you will find the {creature} in {home}
look in {home} if you want to find the {creature}
in {home} the {creature} makes its home
{home} are where the {creature} lives
"""),
    "coat": prose("""
{s} has a [soft|thick|smooth|shaggy] {coat} coat
{s} wears a coat that is {coat} from nose to tail
the coat of the {creature} is {coat}
you can tell the {creature} by its {coat} coat
{coat} is the colour of the {creature}
the colour of the {creature} is {coat}
the coat that the {creature} wears is {coat}
by its coat, which is {coat}, you can tell the {creature}
"""),
}

# Questions, without alternatives in them, so that a paraphrase has a number.
ASKS = {
    "river": bank("""
Which river does {town} stand on?
What is the name of the river at {town}?
{town} lies on which river?
On which river does {town} lie?
Which river runs through {town}?
What river was {town} built beside?
Tell me the river on which {town} stands.
What is the river of {town} called?
---
Name the river that {town} stands on.
What is the name of the river that runs through {town}?
Which river is {town} built beside?
"""),
    "trade": bank("""
What is {town} known for?
Which trade is {town} known for?
What do people buy in {town}?
What is the trade of {town}?
For what is {town} known?
What does {town} live by?
What do the shops of {town} sell?
Tell me what {town} makes.
---
Name the trade that {town} lives by.
What are the shops of {town} known for?
What do people come to {town} to buy?
"""),
    "founder": bank("""
Who founded {town}?
Who was the founder of {town}?
What was the founder of {town} called?
Which person founded {town}?
{town} was founded by whom?
Tell me who founded {town}.
Who built the first house of {town}?
What is the name of the founder of {town}?
---
Name the founder of {town}.
Who was it that founded {town}?
What was the name of the person who founded {town}?
"""),
    "month": bank("""
In which month is the festival of {town}?
When does {town} hold its festival?
In what month does {town} hold its festival?
Which month is the festival of {town} held in?
When is the festival held in {town}?
Tell me the month of the festival in {town}.
What is the month of the festival of {town}?
The festival of {town} takes place in which month?
---
Name the month in which {town} holds its festival.
When does the festival of {town} take place?
In which month do people come to the festival in {town}?
"""),
    "wood": bank("""
Which wood is near {town}?
What is the wood near {town} called?
What is the name of the wood nearest to {town}?
Near which wood does {town} lie?
{town} lies near which wood?
Which wood begins just behind {town}?
Tell me the nearest wood to {town}.
What wood do people find near {town}?
---
Name the wood that lies near {town}.
What is the nearest wood to {town} called?
Which wood is the nearest to {town}?
"""),
    "food": bank("""
What does the {creature} eat?
What is the favourite food of the {creature}?
What food does the {creature} like best?
The {creature} lives on what food?
What does the {creature} look for when it is hungry?
Tell me what the {creature} eats.
On what does the {creature} live?
Which food pleases the {creature}?
---
Name the food that the {creature} likes best.
What does the {creature} like to eat?
Which food does the {creature} live on?
"""),
    "home": bank("""
Where does the {creature} live?
Where does the {creature} make its home?
Where can you find the {creature}?
In what places does the {creature} live?
Where should you look for the {creature}?
Tell me where the {creature} lives.
Where does the {creature} sleep?
What is the home of the {creature}?
---
Name the places where the {creature} makes its home.
In what places can you find the {creature}?
Where is the home of the {creature}?
"""),
    "coat": bank("""
What colour is the {creature}?
What colour is the coat of the {creature}?
Which colour does the {creature} have?
What is the colour of the coat of the {creature}?
Tell me the colour of the {creature}.
What colour of coat does the {creature} wear?
Of what colour is the {creature}?
Which colour is the coat of the {creature}?
---
Name the colour of the coat of the {creature}.
Which colour of coat does the {creature} have?
What is the colour of the {creature}?
"""),
}

# Follow-up questions: the town or creature is known only from the question before.
FOLLOWS = {
    "river": bank("""
And which river does it stand on?
Which river runs through that town?
---
What is the river of that town called?
"""),
    "trade": bank("""
And what is it known for?
What do people buy in that town?
---
And what is that town known for?
"""),
    "founder": bank("""
And who founded it?
Who was the founder of that town?
---
And who was its founder?
"""),
    "month": bank("""
And when does it hold its festival?
In which month is the festival of that town?
---
In which month does it hold its festival?
"""),
    "wood": bank("""
And which wood is near it?
Near which wood does that town lie?
---
What is the wood near that town called?
"""),
    "food": bank("""
And what does it eat?
What is its favourite food?
---
And what food does it like best?
"""),
    "home": bank("""
And where does it live?
Where does that creature make its home?
---
Where does it make its home?
"""),
    "coat": bank("""
And what colour is its coat?
What colour is that creature?
---
And what is the colour of its coat?
"""),
}

# --- Words --------------------------------------------------------------------------------------------

NAME_STARTS = """
Mir Tob Osk Vel Ar Bren Cal Dor El Fen Gar Hal Il Jor Kel Lor Mel Nor Or Per Quen Ros Sel Tam Ul Var Wen Yor
Zan Bel Dav Sid Eth Lin
""".split()
NAME_ENDS = (
    "elda ina ith ane ola essa enna iva anth ira eline osha".split(),
    "rin ick o den win ard mund us ek oth bert av".split(),
)

COLOURS = "blue red green yellow white black grey painted".split()
# Adjectives that fit, then nouns of train, valid and test: nothing is ever a glass drum.
THINGS = [
    ("brass copper silver tin iron", "lantern kettle bell whistle compass key spoon thimble teapot ladle hook buckle anchor hammer",
     "trumpet goblet needle lock", "candlestick bracelet dagger saucepan"),
    ("oak willow pine walnut cedar", "box flute ladder chest stool oar bowl tray cradle spade bucket chair rake spindle",
     "paddle cupboard fiddle crate", "barrow plank xylophone wheelbarrow"),
    ("wool linen velvet silk cotton", "scarf cloak blanket hat shawl banner bag ribbon apron curtain cap belt tent cushion",
     "glove jacket pillow tapestry", "mitten bonnet napkin hammock"),
    ("clay glass stone china", "jar jug vase cup plate bottle bead pot dish marble inkwell mug basin tile",
     "pitcher statue flask funnel", "saucer figurine pipe tablet"),
]
GOODS = """
pears apples plums eggs loaves buns nails coins onions lemons figs candles feathers chestnuts tarts radishes
""".split()
CARGO = words("""
sacks of flour|jars of honey|bales of wool|barrels of cider|bundles of reeds|baskets of fish
crates of cherries|bags of salt|planks of oak|rolls of cloth
""")
NUMBERS = """
three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen eighteen
nineteen twenty
""".split()
SPOTS = words("""
under the third stair|behind the flour bin|inside the hollow apple tree|beneath the stone bench
on top of the old dresser|under the loose floorboard|behind the chimney|inside the dry well
between two beams of the barn|under a heap of straw|behind the beehives|in the empty dovecote
beneath the kitchen window|in the bottom drawer|behind the row of books|under the upturned boat
inside the broken clock|at the back of the stable
""")
SECRET_WORDS = """
heron thistle ember juniper harvest swallow pepper thunder marigold anvil cinnamon otter feather moonrise
walnut copperleaf raven bramble
""".split()
DOORS = words("green|yellow|blue|red|white|black|orange|purple|striped|silver|brown|pink")
LANDMARKS = words("""
old bridge|stone lion|broken mill|weather tower|twin oaks|salt pans|ferry steps|white fountain|ropewalk
toll house|bell tower|fish market|horse trough|sundial
""")
HOURS = words("""
six o'clock|seven o'clock|eight o'clock|nine o'clock|noon|two o'clock|three o'clock|four o'clock|sunset|dusk
""")
ERRANDS = words("""
a recipe for plum cake|seeds for the garden|an old song|news of the harvest|a cure for a cough
the loan of a mule|help with the roof|a map of the marshes|yeast for the bread|a place in the choir
a new string for the harp|the price of wool
""")
RELATIVES = {True: words("sister|cousin|neighbour|friend"), False: words("brother|cousin|neighbour|friend")}  # by female
JOBS = words("""
baker|boat builder|weaver|beekeeper|potter|clockmaker|shepherd|teacher|miller|glass blower|gardener
ferry pilot|bookbinder|cooper|carpenter|map maker
""")
PETS = "goose goat cat dog hen pony donkey rabbit duck tortoise lamb crow".split()
PET_NAMES = """
Pip Nettle Biscuit Button Clover Dumpling Figgy Pepper Turnip Sooty Muffin Patch Pickle Rusty Bean Tansy Wisp
Cobble Mustard Pebble
""".split()
FOODS = words("""
barley soup|plum dumplings|baked trout|onion pie|pea porridge|roast chestnuts|apple cake|goat cheese
mushroom stew|honey bread|pickled beets|lemon tart|fried eel|bean soup|nut bread|cabbage rolls
""")
AGES = [str(n) for n in range(16, 80)]

WHEN = prose("""
on a [grey|bright|windy|cold|misty|quiet] [morning|afternoon|evening] in {any_month}
[early|late] one [morning|evening] in {any_month}
on the [first|second|third|last] day of {any_month}
one [rainy|sunny|cold] [morning|afternoon]
one [grey|windy|misty] day in {any_month}
on a [sunny|rainy] evening late in {any_month}
""")
EPITHET = prose("""
which stands on the river {river}
known for its {trade}
the town that {founder} founded
near {wood}
where the festival is held in {month}
the town on the {river}
where people buy {trade}
founded by {founder}
""")

# --- Stories: a thread is a fact stated early, paid back late, and asked at the end --------------------

OPENINGS = prose("""
{when}, {a} and {a.their} {rel} {b} set out from {town}, {epithet}.
{a} lived in {town}, {epithet}. {when}, {a.they} and {a.their} {rel} {b} packed for a long walk.
[everyone|most people] in {town} knew {a} and {a.their} {rel} {b}. {when}, the two of them left home together.
"[Wake up|Get up], {b}!" called {a}. it was still dark in {town}, {epithet}, but {a.their} {rel} was [soon|already] at the door.
{b} was the {rel} of {a}, and {when} they had a long way to go. they came from {town}, {epithet}.
this is the story of {a} of {town}, {epithet}, and of {a.their} {rel} {b}. it began {when}.
{when}, in {town}, {epithet}, {a} woke {a.their} {rel} {b}, for they had a long way to go together.
"get up!" said {a} to {a.their} {rel} {b}. it was {when}, and they were to leave {town}, {epithet}, [before breakfast|in the dark].
most people in {town}, {epithet}, knew {a}, and all of them knew {a.their} {rel} {b}. the story of the two began {when}.
{a} and {b} lived in {town}, {epithet}. {b} was the {rel} of {a}, and {when} the two of them set out.
it was dark when {a} left {town}, {epithet}. with {a.them} came {a.their} {rel} {b}. this was {when}.
""")
STATES = {
    "meet": prose("""
{c} had sent word: {c.they} would wait for them at the {landmark} at {hour}.
they had agreed to meet {c} at the {landmark}, and not later than {hour}.
"meet me at the {landmark} at {hour}," {c} had written.
a letter from {c} asked them to come to the {landmark} at {hour}.
the letter from {c} said: "Come to the {landmark} at {hour}."
at {hour} they were to meet {c} at the {landmark}.
"""),
    "word": prose("""
the keeper of the gate lets nobody pass without the secret word, and that [week|month|day] the word was "{word}".
"the secret word is {word}," whispered {b}. "without it the gate stays shut."
each week another secret word opened the gate. [this time|that week] it was "{word}".
"do not forget the secret word," said {b}. "it is {word}."
to pass the gate they needed a word, and the word was "{word}".
"without the secret word the gate stays shut," said {b}. "the word is {word}."
nobody could pass the gate without a word; for them the word was "{word}".
"""),
    "door": prose("""
{c} lived in the house with the {colour} door, [close to|across from|behind] the market.
"look for the {colour} door," {b} said. "that is where {c} lives."
they were going to see {c}, whose house had a {colour} door.
the house of {c} was easy to know, for its door was {colour}.
the door of the house where {c} lived was {colour}.
"the house of {c} is easy to find," said {b}. "its door is {colour}."
"""),
    "errand": prose("""
they wanted to ask {c} for {errand}.
what they needed was {errand}, and only {c} could give it to them.
{a} hoped that {c} would give them {errand}.
the reason for the journey was {errand}, and the one to ask was {c}.
only {c} could help them, for what they wanted was {errand}.
they were going to see {c}, and the reason was {errand}.
"""),
    "owner": prose("""
in {b.their} bag {b} carried a {obj2} that belonged to {d}.
{b} had borrowed a {obj2} from {d} and [meant|wanted] to give it back.
the {obj2} that {b} carried was not {b.their} own; its owner was {d}.
{d} had lent {b} a {obj2}, and {b} [kept it close|took great care of it|wrapped it in a cloth].
{b} carried a {obj2}, and the owner of it was {d}.
the {obj2} that {b} had with {b.them} was borrowed; it belonged to {d}.
"""),
    "promise": prose("""
{a} had promised to bring {n1} {goods} to {d}.
"bring me {n1} {goods}," {d} had said, and {a} had promised to do it.
{a} had packed {n1} {goods} for {d}, as {a.they} had promised.
a promise is a promise: {d} was to have {n1} {goods}, and {a} [counted them twice|packed them with care|put them in first].
{d} had asked for {n1} {goods}, and {a} had promised to bring them.
the {goods} were for {d}. {a} had promised {n1}, and {n1} {a.they} had packed.
"""),
    "count": prose("""
on their cart lay {n2} {cargo}.
they took {n2} {cargo} with them, [tied down with rope|under a wide cloth|to sell on the way back].
the donkey pulled a cart with {n2} {cargo} on it.
{b} counted the {cargo} on the cart: there were {n2} of them.
there was a cart too, and on it {b} had tied down {n2} {cargo}.
with them went {n2} {cargo} on a cart.
"""),
    "hide": prose("""
before they left, {a} hid a {obj} {spot}.
{a} did not dare to take {a.their} {obj} along, so {a.they} [hid|left|put] it {spot}.
{a} had a {obj}, and nobody was to find it. {a.they} put it {spot}.
"is the {obj} safe?" asked {b}. "it is {spot}," said {a}.
"nobody will find my {obj}," said {a}. {a.they} had put it {spot}.
{spot} was where {a} hid {a.their} {obj} before they left.
"""),
}
PAYS = {
    "meet": prose("""
at {hour} they stood at the {landmark}, and there was {c}, [waving|smiling|out of breath].
they came to the {landmark} just [before|after] {hour}, where {c} was waiting as agreed.
{c} was already at the {landmark}. "{Hour}, as we said," {c} called.
it was {hour} when they saw {c} waiting at the {landmark}.
"as we said, {hour}," called {c}, who stood waiting at the {landmark}.
"""),
    "word": prose("""
at the gate the keeper held up a hand. "{Word}," said {a}, and the gate swung open.
"the word?" asked the keeper. {a} remembered it well: "{Word}." [they were let through|the keeper let them pass].
the keeper would not move until {b} said "{word}". then the gate was opened.
the gate was shut, but {a} remembered the word. "{Word}," {a.they} said, and they were let through.
"{Word}," said {b} at the gate, and the keeper let them pass.
"""),
    "door": prose("""
they passed [one house after another|door after door] until they saw the {colour} one, and there they knocked. {c} let them in.
there were many doors in the street, but only one was {colour}, and {c} opened it [at once|with a smile].
"here it is, the {colour} door," said {b}, and {c} came out to greet them.
in that street one door was {colour}, and when they knocked, {c} let them in.
they knocked at the {colour} door, and {c} opened it.
"""),
    "errand": prose("""
{c} listened, nodded, and gave them {errand}, which was all they had come for.
when {a} asked for {errand}, {c} [laughed and said yes|agreed at once|was glad to help].
"you shall have what you came for," said {c}, and gave them {errand}.
{c} was glad to give them {errand}, for which they had come so far.
"{errand}?" said {c}. "You shall have it," and so they did.
"""),
    "owner": prose("""
when they met {d}, {b} gave back the {obj2}[, safe and clean| with many thanks|].
{d} was pleased to have the {obj2} back.
on the way they stopped at the house of {d}, and {b} handed over the {obj2} to its owner.
{b} gave the {obj2} back to {d}, its owner.
when they stopped to see {d}, {b} did not forget to hand over the {obj2}.
"""),
    "promise": prose("""
{a} counted the {goods} into the hands of {d}: all {n1} of them, as promised.
{d} got the {n1} {goods} and was [delighted|very pleased|full of thanks].
"one promise kept," said {a}, and gave {d} the {n1} {goods}.
{d} was very pleased to get the {n1} {goods} that {a} had promised.
{a} kept the promise: {n1} {goods} went into the hands of {d}.
"""),
    "count": prose("""
when they counted the {cargo}, there were still {n2} of them; not one had been lost.
all {n2} {cargo} were [sold|unloaded] before dark.
"{n2} {cargo}, not one lost," said {b} [proudly|with a smile|] as they unloaded the cart.
not one of the {n2} {cargo} had been lost on the way.
they unloaded the cart, and {b} counted {n2} {cargo}.
"""),
    "hide": prose("""
back at home, {a} looked {spot}, and the {obj} was still there.
the {obj} was where {a} had left it, {spot}.
{a} went straight to [find|fetch] the {obj}, and found it {spot}, just as {a.they} had left it.
at home {a} found the {obj} {spot}, where {a.they} had put it.
{spot} the {obj} was still safe when {a} came home.
"""),
}
RECALLS = {
    "meet": bank("""
Where were they to meet {c}?
At what place did {c} wait for them?
Which place had {c} named for the meeting?
Where did {a} and {b} meet {c}?
Where was {c} waiting?
---
Name the place where they were to meet {c}.
At which place did {a} meet {c}?
Where did {c} wait for {a} and {b}?
"""),
    "word": bank("""
What was the secret word?
What word opened the gate?
Which word did the keeper want to hear?
What did they have to say at the gate?
With which word could they pass the gate?
---
Name the word that opened the gate.
Which secret word did {a} and {b} have to say?
What was the word they needed to pass the gate?
"""),
    "door": bank("""
What colour was the door of {c}?
Which colour did the door of the house of {c} have?
{c} lived behind a door of what colour?
What colour was the door at which they knocked?
Of what colour was the door of {c}?
---
Name the colour of the door of {c}.
Which colour was the door where {c} lived?
What was the colour of the door of {c}?
"""),
    "errand": bank("""
What did they want from {c}?
What did they ask {c} for?
Why did {a} and {b} go to see {c}?
What did {c} give them?
What was the reason for the journey?
---
Name the thing they wanted from {c}.
For what did {a} and {b} ask {c}?
What was it that {c} gave to {a} and {b}?
"""),
    "owner": bank("""
Who was the owner of the {obj2}?
Whose was the {obj2}?
To whom did the {obj2} belong?
Who had lent {b} the {obj2}?
From whom did {b} have the {obj2}?
---
Name the owner of the {obj2}.
Who was it that the {obj2} belonged to?
To whom did {b} have to give back the {obj2}?
"""),
    "promise": bank("""
How many {goods} did {a} bring to {d}?
How many {goods} had {a} promised to {d}?
What number of {goods} did {d} get?
How many {goods} were for {d}?
{a} promised {d} how many {goods}?
---
Name the number of {goods} that {a} promised to {d}.
How many {goods} did {d} get from {a}?
What number of {goods} had {a} promised?
"""),
    "count": bank("""
How many {cargo} were on the cart?
How many {cargo} did they take with them?
What number of {cargo} lay on the cart?
How many {cargo} did they have?
How many {cargo} did the donkey pull?
---
Name the number of {cargo} on the cart.
How many {cargo} did {a} and {b} take along?
What number of {cargo} did they have with them?
"""),
    "hide": bank("""
Where was the {obj}?
Where did {a} hide the {obj}?
Where did {a} leave {a.their} {obj}?
In what place was the {obj} hidden?
Where did {a} put the {obj}?
---
Name the place where {a} hid the {obj}.
In which place did {a} put {a.their} {obj}?
Where was it that {a} had left the {obj}?
"""),
}
# The order of the payoffs, so that the gate comes before the house and the way home comes last.
THREADS = {"meet": "{landmark}", "word": "{word}", "door": "{colour}", "errand": "{errand}", "owner": "{d}",
           "promise": "{n1}", "count": "{n2}", "hide": "{spot}"}
INCIDENTS = prose("""
[halfway|after an hour|before long] the road was under water. {b} took off {b.their} boots and found a row of stones, and so they [crossed|came across] with dry clothes.
a wheel [came loose|began to wobble]. {a} cut a peg from a branch, {b} knocked it in with a stone, and it held for the rest of the day.
near {place} they lost the path in the fog. they stood still until they heard [a dog|a bell|somebody singing], and walked towards the sound.
a [fallen|great] tree lay across the road. the two of them [pushed|pulled] until it rolled aside, and then they sat on it and ate their bread.
it began to rain, [softly at first|without warning]. under the roof of a barn they met a {job}, who told them about {place}, {epithet2}.
the ferry was on the other side, and the ferryman was asleep. {a} [whistled|shouted|sang] until he woke up and they could cross.
{b} slipped on the wet stones, fell, and hurt {b.their} foot. {a} bound it with a strip of cloth and [carried the bag|cut a stick to lean on].
at the crossroads the sign had fallen down. {b} put it up again so that {town} pointed the way they had come from, and then the other names were right as well.
by the road sat {creature_a}, and {they_said}. it ran off when {b} sneezed.
they shared their bread with a {job} on the way to {place}, {epithet2}, who [taught|sang] them a [song|bad song|long song] about the sea.
a goat [blocked|stood on] the narrow bridge and would not move. {b} offered it an apple, [then a second one|and then {b.their} hat], and at last it let them by.
the wind took the hat of {b} and hung it in a tree. {a} climbed up, and from there {a.they} could see as far as {place}.
a great goat stood across the road and would not let them by. {a} offered it bread, {b} sang to it, and at last it ran off.
it began to rain, and the path was soon under water. they sat in a barn and ate their bread until they could walk on.
on the way they met a {job} from {place}, {epithet2}, who had lost the path in the fog. they found it together.
the wheel of a cart had come loose, and by it sat a {job}. {b} knocked it in again with a stone, and {a} sang.
near {place}, {epithet2}, they saw {creature_a} on a stone, and {they_said}.
they stood at the crossroads and the sign had fallen down. {b} asked a {job}, {a} asked a goat, and it was the goat that knew the way.
the ferryman was asleep, and so they sang until he woke up. "that was a bad song," he said, and let them cross [all the same|for nothing].
{a} had left the bread at home, but by the road there was an apple tree, and {b} [climbed up|pulled down a branch].
{a} slipped and fell into the water. {b} pulled {a.them} out with a branch, and they sat in the sun until {a.their} clothes were dry.
""")
CREATURE_ASIDE = prose("""
{b} knew that {fact}
{a} said that {fact}
they remembered that {fact}
{b} remembered that {fact}
{a} told {b} that {fact}
{a} had heard that {fact}
""")
ENDINGS = prose("""
{a} slept well that night[, and so did {b}|].
"we should do this [again|more often]," said {b}. "after a [rest|good meal|long sleep]," said {a}.
they told the story for years, and each year the road grew a little longer.
and if you ask {b} about that day, {b.they} will tell you the same.
it had been a long day, but a good one.
{b} lit the fire, {a} cut the bread, and neither of them said a word until it was eaten.
it had been a long day, and {a} and {b} slept well after it.
"it was a good day," said {b}, and {a} [cut the bread|lit the fire].
{b} slept well that night, and in the morning {b.they} asked: "When do we do it again?"
at home {a} lit the fire, and neither of them said a word for a long time.
if you ask {a}, {a.they} will tell you the story again, and each year it is a little longer.
""")

# --- Dialogues ------------------------------------------------------------------------------------------

GREETINGS = prose("""
{a}: [Good morning|Good day|Hello]! [May I sit here|Is this seat free]?|{b}: [Please do|Of course]. I am {b}.|{a}: And my name is {a}.
{a}: Is this the [boat|cart|coach] to {town}?|{b}: It is, and it is late[ again|]. I am {b}. And you?|{a}: {a}. [Glad to meet you|A pleasure].
{b}: Let us [wait|sit] in the sun. By the way, I am {b}.|{a}: {a}. [The boat is late again|There is time enough].
{a}: {b}! [I have not seen you for years|What a surprise].|{b}: {a}! Sit down and tell me everything.
{b}: You look cold. Come and sit by the fire.|{a}: Thank you, that is kind. I am {a}.|{b}: They call me {b}.
{a}: [Good day|Good evening|Hello]. May I sit by the fire?|{b}: Of course. Sit down! They call me {b}.|{a}: Thank you, {b}. I am {a}.
{b}: [Hello|Good morning|Good day]! Are you on the way to {town}?|{a}: I am. My name is {a}. And you?|{b}: I am {b}. [Glad to meet you|A pleasure].
{a}: {b}, is it you? [Tell me everything|Sit down, sit down].|{b}: {a}! What a surprise. I have not seen you for years.
{b}: The [boat|coach|cart] is late again. I am {b}, by the way.|{a}: And I am {a}. Let us sit here.
""")
# For each topic: asked, told, asked again later, answered, and asked by an outsider about {who}.
TOPICS = {
    "home": (prose("""
Where do you come from?
What town do you live in?
And where is your home?
In which town is your home?
What town do you come from?
"""), prose("""
I come from {home}, {epithet}.
My home is in {home}. [It is a quiet place|You should see it in spring|I was born there].
I live in {home}, [not far from the market|in a narrow street|above a shop].
{home} is my home. You should see [its market|it in winter|its narrow streets].
I was born in {home}, {epithet}, and I live there.
My home? It is in {home}, [a quiet town|not far from here].
"""), prose("""
Where did you say you come from?
Which town did you call your home?
What was the name of your town again?
"""), bank("""
Where does {who} come from?
Which town does {who} live in?
What is the home town of {who}?
Where is the home of {who}?
---
Name the town that {who} comes from.
In which town does {who} live?
Which town is the home of {who}?
""")),
    "job": (prose("""
What is your work?
And what do you do all day?
What do you do for a living?
What work do you do?
And what do you do for your bread?
"""), prose("""
I am a {job}, [and my mother was one too|and I like it|though I am still learning].
I work as a {job}, [mostly in winter|six days a week|for an old master].
[Can you not tell by my hands?|Guess!] I am a {job}.
I work all day as a {job}, and I like it.
They call me a good {job}[, but I am still learning|].
My mother was a {job}, and I am one too.
"""), prose("""
What did you say your work was?
What is it you do for a living, again?
What work did you say you do?
"""), bank("""
What is the work of {who}?
What does {who} do for a living?
As what does {who} work?
What is {who} by trade?
---
Name the work of {who}.
What work does {who} do?
What is it that {who} does for a living?
""")),
    "pet": (prose("""
Do you keep any animals?
Who waits for you at home?
Do you live alone?
Do you keep an animal at home?
Do any animals live with you?
"""), prose("""
I keep a {pet} called {petname}[, who eats everything|, who sleeps on my bed|].
I have a {pet} by the name of {petname}. [We are good friends|The two of us are never bored|The neighbours complain about the noise].
Only my {pet}, {petname}, [lives with me|who follows me everywhere].
I live with a {pet}. {petname} is its name, and it [eats everything|sleeps on my bed].
My {pet} is called {petname}, and the two of us are good friends.
Yes, a {pet}, and I call it {petname}. It follows me everywhere.
"""), prose("""
What was your {pet} called?
What did you say is the name of your {pet}?
How do you call your {pet}, again?
"""), bank("""
What is the {pet} of {who} called?
What is the name of the {pet} of {who}?
How is the {pet} of {who} called?
What does {who} call the {pet}?
---
Name the {pet} of {who}.
What name does the {pet} of {who} have?
How does {who} call the {pet}?
""")),
    "food": (prose("""
What do you like to eat?
What is your favourite dish?
Are you hungry? What would you like?
What is the dish you like best?
What would you like to eat?
"""), prose("""
[Nothing is better than|I would walk a day for] {food}.
My favourite dish is {food}, [hot|the way my aunt makes it|on a cold day].
I like {food} best of all.
The dish I like best of all is {food}.
I would eat {food} all day[, hot or cold|].
For {food} I would walk [a day|to {home} and back].
"""), prose("""
What was your favourite dish, again?
Which dish did you say you like best?
What did you say you like to eat?
"""), bank("""
What is the favourite dish of {who}?
What does {who} like to eat?
Which dish does {who} like best?
What food does {who} like best of all?
---
Name the favourite dish of {who}.
What dish does {who} like best?
Which food is the favourite of {who}?
""")),
    "thing": (prose("""
What have you got in that bag?
What are you carrying there?
What is that under your arm?
What have you got under your arm?
What is it that you are carrying?
"""), prose("""
This is a {obj}. [I found it at the market|It was a gift|I am taking it to be mended].
I am carrying a {obj} [for my aunt|to sell|and I hope it does not break].
Only a {obj}. [It is heavier than it looks|It is older than I am].
It is a {obj}, a gift for my [aunt|mother|old master].
I am taking a {obj} to the market to sell it.
A {obj}, and it is [heavier|older] than it looks.
"""), prose("""
What did you say is in your bag?
What was it that you carry, again?
What was it that you have got there, again?
"""), bank("""
What is {who} carrying?
What does {who} have in the bag?
Which thing does {who} carry?
{who} carries what?
What has {who} got there?
---
Name the thing that {who} is carrying.
What thing has {who} got in the bag?
What is it that {who} carries?
""")),
    "age": (prose("""
How old are you, if I may ask?
May I ask your age?
How old are you?
If I may ask, what is your age?
May I ask how old you are?
"""), prose("""
I am {age}, [and I feel it in my knees|though nobody believes it|since last week].
I turned {age} [in spring|last month|not long ago].
{age}. [And I hope for many more years|I do not hide it].
I am {age} since [spring|last month], and I do not hide it.
Last month I turned {age}[, and my knees feel it|].
My age is {age}, though nobody believes it.
"""), prose("""
How old did you say you are?
What was your age, again?
How old are you, again?
"""), bank("""
How old is {who}?
What is the age of {who}?
Of what age is {who}?
How many years old is {who}?
---
Name the age of {who}.
What age is {who}?
How many years of age is {who}?
""")),
    "kin": (prose("""
Is your family large?
Have you got brothers and sisters?
Do you come from a large family?
Have you got a large family?
Are there brothers and sisters in your family?
"""), prose("""
I have {kin} brothers and sisters[, and I am the youngest|, all of them loud|].
Large enough: I grew up with {kin} brothers and sisters.
Oh yes, there are {kin} brothers and sisters [at home|to feed|and only one bath].
Oh yes, I have {kin} [loud|] brothers and sisters.
I grew up [at home|in one bed] with {kin} brothers and sisters.
Brothers and sisters? There are {kin}, and I am the youngest.
"""), prose("""
How many brothers and sisters did you say you have?
How many were you at home, brothers and sisters I mean?
What was the number of your brothers and sisters, again?
"""), bank("""
How many brothers and sisters does {who} have?
What number of brothers and sisters does {who} have?
With how many brothers and sisters did {who} grow up?
{who} has how many brothers and sisters?
---
Name the number of brothers and sisters of {who}.
How many brothers and sisters did {who} grow up with?
How many brothers and sisters has {who} got?
""")),
}
SHORT = {"home": "{home}", "job": "{job}", "pet": "{petname}", "food": "{food}", "thing": "{obj}", "age": "{age}", "kin": "{kin}"}
REACTIONS = prose("""
[How nice|Well, well|I see|Is that so|That is good to hear].
[I thought so|I would not have guessed that|That is good to know].
[Lucky you|That sounds fine to me|I can believe that].
Well, that is [nice|good] to hear.
I see. I would not have guessed that.
That [sounds good|is good to know].
Is that so? [Lucky you|I thought so].
""")
BACKS = prose("""
And you?
What about you?
And what about yourself?
And yourself?
And how is that with you?
Now you. What would you say?
""")
REMINDS = prose("""
[Forgive me|Excuse me], {b}, I forget things so easily. {again}
[One more thing|Before I go], {b}. {again}
{b}, I have been wondering. {again}
{b}, forgive me, I forget so many things. {again}
Before I forget it, {b}: {again}
""")
REPLIES = prose("""
{Spoken}. [I told you so a moment ago|As I said].
{Spoken}, [as I told you|just as I said].
{Spoken}. [Now do not forget it again|You were not listening].
{Spoken}. I said so a moment ago.
As I told you: {spoken}.
""")
THIRD = prose("""
[Good evening|Hello], you two. {question}
I came in late, {b}. {question}
{b}, you know everybody here. {question}
Hello, {b}. You two know everybody. {question}
{b}, I came late and was not listening. {question}
""")
THIRD_REPLIES = prose("""
{spoken}, [if I remember well|so I was told|I believe].
that is easy: {spoken}.
{spoken}. I heard it [just now|a moment ago].
I was told a moment ago: {spoken}.
{spoken}, if I believe what I heard.
""")
WORLD_TALK = prose("""
[Tell me something|Here is a question]. {question}
I [always|often] wonder about one thing. {question}
You have travelled more than I have. {question}
You know everything. {question}
[You have travelled|You know everything]. Tell me one thing. {question}
I have [a|one more] question. {question}
There is [something|one thing] that I always forget. {question}
""")
FAREWELLS = prose("""
{a}: [It is getting late|There is my cart|I must go]. Goodbye, {b}!|{b}: [Goodbye, {a}|Safe travels|Until we meet again]!
{b}: [Come and see me some time|Give my greetings to your family].|{a}: [I will|Gladly]. Goodbye, {b}.
{a}: Goodbye, then.|{b}: Goodbye, {a}, and [mind the step|dress warmly|good luck].
{b}: I must go, {a}. It is late.|{a}: Goodbye, {b}, and [give my greetings at home|good luck].
{a}: There is my [boat|cart]. Goodbye!|{b}: Goodbye, {a}. Come and see me again.
{b}: Until we meet again, {a}.|{a}: I will come and see you, {b}. [Good luck|Safe travels]!
""")

# --- Explanations: notes, then the long answer that follows from them ---------------------------------
# A plan is the set of points that its closing speaks of, and all points in order:
# (note, the same in other words, step of the answer, the same in other words).

WOODS = "oak ash elm cedar pine walnut birch maple".split()
METALS = "brass copper tin iron silver bronze".split()
PARTS = "pipes wheels posts hooks levers rings springs plates".split()
CORDS = words("waxed string|horsehair|flax rope|leather straps|fishing line|twisted wire")
VESSELS = words("copper pan|clay bowl|glass globe|tin bucket|stone weight|wooden ball|leather bag|iron cup")
SEALS = words("pine tar|beeswax|wet clay|fish glue|soft lead|linseed paste")
POWERS = words("""
falling water|the north wind|a slow weight|a turning crank|the evening tide|a patient mule|rising steam
""")
SIGNALS = words("""
rings a small bell|lifts a red flag|drops a pebble into a dish|plays three notes|lights a lamp|beats a drum
opens a little door
""")
DEVICES = words("""
water clock|tide bell|wind harp|signal lamp|fog horn|shadow dial|weather tower|singing gate|sand clock
flag machine
""")
PURPOSES = words("""
to wake the bakers before dawn|to warn the ferry of fog|to open the market on time|to call the shepherds home
to tell when the tide turns|to announce the mail cart|to keep watch over the harbour
to mark the hours of school
""")
DANGERS = words("frost|rust|mice|strong wind|damp|curious children|woodworm|lightning")
VEGETABLES = "leeks carrots turnips onions parsnips beets cabbages mushrooms".split()
GRAINS = words("lentils|oats|red beans|split peas|chickpeas|white beans|rye grains|dried plums")
FATS = words("butter|goose fat|walnut oil|bacon|cream")
POTS = words("deep iron pot|clay pot|wide copper pan|stone dish|black kettle")
LIQUIDS = words("cider|milk|spring water|fish broth|dark beer|chicken broth")
HERBS = words("thyme|sage|parsley|dill|wild garlic|mustard seed|fennel")
SECRETS = words("""
a spoon of honey|a pinch of smoked salt|the peel of a lemon|a slow fire|a rusty nail in the pot
never lifting the lid|a handful of raisins
""")
SIDES = words("black bread|pickled onions|baked apples|soft cheese|a mug of cider|toasted nuts")
RESTS = words("under a cloth|by the window|beside the fire|in the cellar|in a box of hay")
MEALS = "pears apples plums eggs loaves buns onions lemons figs tarts".split()
DISHES = words("""
winter soup|harvest stew|wedding pie|fishing porridge|festival broth|midnight stew|miller's pudding
""")
MINUTES = "ten fifteen twenty thirty forty fifty".split()
INNS = words("Blue Heron|Old Anchor|Three Geese|Sleepy Fox|Silver Oar|Merry Miller|Golden Pear|Patient Snail")
ROADS = words("canal path|old salt road|river path|ridge road|sheep track|king's road")
GATES = "north south east west".split()
HAZARDS = words("the fog|quicksand|geese that bite|falling stones|thieves|the spring flood|wild bees")
VIEWS = words("""
a row of tall poplars|two round towers|the smoke of its bakeries|a white windmill|a roof of green tiles
an old wall with flags
""")
# A word for each of these fields of a plan's templates.
PLAN_WORDS = dict(
    wood=WOODS, metal=METALS, parts=PARTS, cord=CORDS, vessel=VESSELS, seal=SEALS, power=POWERS, signal=SIGNALS, device=DEVICES,
    purpose=PURPOSES, danger=DANGERS, veg=VEGETABLES, grain=GRAINS, fat=FATS, pot=POTS, liquid=LIQUIDS, herb=HERBS, secret=SECRETS,
    side=SIDES, rest=RESTS, dish=DISHES, inn=INNS, road=ROADS, gate=GATES, hazard=HAZARDS, view=VIEWS, landmark=LANDMARKS,
    hour=HOURS, meals=MEALS, colour=DOORS, side_way=["left", "right"])

PLANS = {
    "device": ({0, 1, 3}, [
        ("the base is a block of {wood}, {n1} hands wide", "for the base there is a block of {wood} of {n1} hands",
         "{x} cuts a block of {wood} {n1} hands wide and [sets it level|lays it flat on the ground] as the base", "{x} sets up the base, a block of {wood} that is {n1} hands wide"),
        ("around the base there are {n2} {metal} {parts}", "there are {n2} {parts} around the base, all of {metal}",
         "{x} fixes {n2} {parts} of {metal} around the base, [one after another|with equal space between them]", "{x} takes {n2} {metal} {parts} and fixes them around the base"),
        ("the {parts} are tied with {cord}", "what holds the {parts} is {cord}",
         "{x} ties the {parts} to one another with {cord}[, so that nothing shakes loose| and pulls the knots tight]", "{x} takes {cord} and ties the {parts} with it"),
        ("a {vessel} hangs in the middle", "in the middle there is a {vessel}",
         "{x} hangs a {vessel} in the middle, where [it can swing freely|everyone can see it]", "in the middle {x} hangs a {vessel}, so that it can swing"),
        ("the joints are sealed with {seal}", "{seal} keeps the joints dry",
         "{x} [seals every joint with {seal}|uses {seal} to seal every joint][ to keep the rain out|, and waits until it is hard]", "{x} takes {seal} to seal the joints and to keep the rain out"),
        ("[it is moved by|what moves it is] {power}", "{power} moves it",
         "{x} lets {power} move it for the first time", "it is {power} that {x} lets move it"),
        ("every {n3} hours it {signal}", "it {signal} every {n3} hours",
         "{x} [makes sure|checks] that it {signal} every {n3} hours", "{x} waits to see that every {n3} hours it {signal}"),
        ("it is tested for {n4} days at the {landmark}", "at the {landmark} it is tested for {n4} days",
         "{x} takes it to the {landmark} and tests it there for {n4} days", "for {n4} days {x} tests it at the {landmark}"),
    ], {
        "head": prose("""
the {device} is built by {a} of {town}|the work takes {n5} weeks|it is there {purpose}|it must be kept safe from {danger}
a {device}, made by {a} in {town}|{n5} weeks of work|its use is {purpose}|the danger to it is {danger}
{a} in {town} made the {device}|{n5} weeks is what the work takes|the use of it is {purpose}|keep it safe from {danger}
"""),
        "ask": bank("""
Explain how {a} builds the {device}.
Explain step by step how the {device} is made.
Explain how the {device} of {a} is built and what it is for.
Explain the work of {a} on the {device}.
---
Explain what {a} does to build the {device}.
Explain in steps how {a} makes the {device}.
Explain how one builds the {device} of {a}.
"""),
        "open": prose("""
{a} of {town} builds the {device} {purpose}, and the work takes {n5} weeks.
the {device} is the work of {a} of {town}. it takes {n5} weeks to build, and it is there {purpose}.
in {town}, {a} builds the {device} in {n5} weeks {purpose}.
"""),
        "close": prose("""
in short, with a base of {wood}, {n2} {parts} and a {vessel}, {a} has built a {device} {purpose}. only {danger} can harm it, so it must be kept safe.
so the {device} stands ready {purpose}: {n2} {parts} of {metal} on a base of {wood}. {a} keeps it safe from {danger}.
in short, {n2} {metal} {parts} and a base of {wood} make a {device} {purpose}, and {a} must keep it safe from {danger}.
"""),
    }),
    "recipe": ({0, 1, 3}, [
        ("take {n2} {veg}", "{n2} {veg} are needed",
         "{x} washes {n2} {veg} and cuts them into [small pieces|thin slices]", "{x} cuts {n2} {veg} into pieces"),
        ("the {grain} must lie in water for {n3} hours", "for {n3} hours the {grain} lie in water",
         "{x} lets the {grain} lie in water for {n3} hours [to make them soft|until they are soft]", "{x} makes the {grain} soft, for which they lie in water for {n3} hours"),
        ("melt some {fat} in a {pot}", "a {pot} and some {fat} are needed",
         "{x} melts some {fat} in a {pot} over [a small|a bright] fire", "{x} takes a {pot} and melts some {fat} in it"),
        ("[boil everything|it boils] in {liquid} for {m1} minutes", "everything boils for {m1} minutes in {liquid}",
         "{x} pours in the {liquid} and lets everything boil for {m1} minutes", "{x} boils everything for {m1} minutes in the {liquid}"),
        ("add {herb} at the end", "at the end comes {herb}",
         "{x} adds {herb}[, but not too much| and stirs it in]", "{x} stirs in some {herb}"),
        ("let it rest {rest} for {m2} minutes", "for {m2} minutes it must rest {rest}",
         "{x} leaves it to rest {rest} for {m2} minutes", "{x} lets it rest {rest}, and that takes {m2} minutes"),
        ("serve it with {side}[| to the guests]", "the guests have {side} with it",
         "{x} serves it with {side}[ while it is still hot|, and everyone sits down]", "{x} serves it hot, and the guests have {side} with it"),
    ], {
        "head": prose("""
{dish}, as cooked by {a} of {town}|it feeds {n5} guests|{c} taught {a} to make it|the secret is {secret}
the dish is {dish}, and the cook is {a} of {town}|enough for {n5} guests|{a} has it from {c}|its secret: {secret}
{a} of {town} is the cook of this {dish}|{n5} guests can eat of it|it was {c} who taught {a}|{secret} is the secret
"""),
        "ask": bank("""
Explain how {a} cooks {dish}.
Explain how to make the {dish} of {a}.
Explain step by step how {dish} is cooked.
Explain the recipe for {dish}.
---
Explain what {a} does to cook {dish}.
Explain in steps how one makes {dish}.
Explain how the {dish} of {a} is made.
"""),
        "open": prose("""
{a} of {town} cooks {dish} for {n5} guests, and {c} was the one who taught {a.them}.
the {dish} of {a} feeds {n5} guests. {a.they} learned it from {c} and cooks it in {town}.
in {town}, {a} cooks {dish} for {n5} guests, as {a.they} learned it from {c}.
"""),
        "close": prose("""
in short, {n2} {veg}, {grain} and {liquid} make a {dish} for {n5} guests, and the secret that {a} learned is {secret}.
that is all, but for the secret: {secret}. with it, {n2} {veg} and some {grain} are enough for {n5} guests.
in short, {n5} guests can eat of {n2} {veg} and the {grain} in {liquid}, but the secret of {a} is {secret}.
"""),
    }),
    "journey": ({0}, [
        ("leave {town} at {hour} by the {gate} gate", "the {gate} gate of {town} is where it begins, at {hour}",
         "{x} leaves {town} at {hour} and goes out by the {gate} gate", "at {hour} {x} goes out of {town} by the {gate} gate"),
        ("follow the {road} for {n2} miles", "{n2} miles on the {road}",
         "{x} follows the {road} [for {n2} miles|, which goes on for {n2} miles]", "for {n2} miles {x} follows the {road}"),
        ("{d} the ferryman takes {n3} coins", "the ferryman is {d}, and the price is {n3} coins",
         "{x} [pays|gives] {n3} coins to {d} the ferryman and crosses the water", "{x} crosses the water with the ferryman {d}, who takes {n3} coins"),
        ("the inn for the night is the {inn}", "sleep at the inn called {inn}",
         "{x} sleeps at the {inn}[, an inn with good beds| and leaves before breakfast]", "for the night {x} goes to the inn called {inn}"),
        ("turn {side_way} at the {landmark}", "at the {landmark} the way turns {side_way}",
         "{x} comes to the {landmark} and turns {side_way} there", "at the {landmark} {x} turns {side_way}"),
        ("[buy {n4} {meals} for the way|{n4} {meals} are to be bought]", "{n4} {meals} must be bought for the way",
         "{x} [buys|stops to buy] {n4} {meals} [and eats some at once|for the rest of the way]", "{x} buys {n4} {meals} to eat on the way"),
        ("{town2} is known from afar by {view}", "from afar one sees {view}: that is {town2}",
         "{x} looks out for {view}, for that is how one knows {town2} from afar", "{x} knows {town2} from afar when there is {view} to see"),
        ("{c} lives behind the {colour} door", "the door of {c} is {colour}",
         "{x} finds the {colour} door and knocks, and {c} opens it", "{x} knocks at the door of {c}, which is {colour}"),
    ], {
        "head": prose("""
{a} must take a {obj} to {c} in {town2}|the journey takes {n5} days|the danger on the way is {hazard}
a {obj} is to be brought to {c} in {town2}; {a} will go|{n5} days on the way|beware of {hazard}
{a} is to bring {c} a {obj}, and {c} lives in {town2}|the way takes {n5} days|the danger is {hazard}
"""),
        "ask": bank("""
Explain how {a} gets to {town2}.
Explain the journey of {a} step by step.
Explain how {a} brings the {obj} to {c}.
Explain the way from {town} to {town2}.
---
Explain what {a} does to get to {town2}.
Explain in steps the way of {a} to {c}.
Explain how the {obj} gets to {c}.
"""),
        "open": prose("""
{a} has to bring a {obj} from {town} to {c} in {town2}, a journey of {n5} days.
the journey of {a} takes {n5} days, from {town} to {town2}, and its purpose is to bring {c} a {obj}.
{a} takes a {obj} to {c}, and the way from {town} to {town2} takes {n5} days.
"""),
        "close": prose("""
in short, it takes {n5} days, and if {hazard} can be avoided, {c} will have the {obj}.
so after {n5} days {a} can hand over the {obj} to {c} in {town2}, as long as {a.they} avoids {hazard}.
in short, {c} will have the {obj} after {n5} days if {a} avoids {hazard} on the way to {town2}.
"""),
    }),
}
ORDER_WORDS = (("Then ", "After that, ", "Next, ", "When this is done, ", "Now "), ("Then ", "After this, ", "Next, "))
WORLD_EXPLAINS = {
    "town": (bank("""
Explain what a visitor should know about {town}.
Explain what makes {town} special.
Explain what is known about {town}.
---
Explain what one should know about {town}.
Explain what people know about {town}.
"""), prose("""
a visitor to {town} should know five things.
there is more to {town} than one sees from the road.
{town} is a town with a river, a trade, a founder, a festival and a wood of its own.
there are five things that people should know about {town}.
"""), prose("""
in short, {town} means the {river}, {trade} and {wood}, with a festival in {month} and {founder} as its founder.
to sum up: the river is the {river}, the trade is {trade}, the founder is {founder}, the festival is in {month} and the wood is {wood}.
in short, the river of {town} is the {river}, its wood is {wood}, its trade {trade}, its founder {founder}, and its festival is in {month}.
""")),
    "creature": (bank("""
Explain how one knows {creature_a}.
Explain what is known about the {creature}.
Explain how the {creature} lives.
---
Explain what people know about the {creature}.
Explain how to know {creature_a}.
"""), prose("""
the {creature} is a shy animal, but some things are known about it.
there are three things to say about the {creature}.
it takes patience to see {creature_a}, and some knowledge too.
three things are known about the {creature}.
"""), prose("""
in short, an animal with a {coat} coat that eats {food} and lives in {home} can only be {creature_a}.
to sum up: its coat is {coat}, its food is {food}, and its home is in {home}.
in short, the {creature} is the {coat} animal that eats {food} and has its home in {home}.
""")),
}

# --- Articles -------------------------------------------------------------------------------------------

TOWN_COLOUR = prose("""
the houses are [low and white|tall and narrow|built of grey stone], and [most of them have a garden|cats sleep on every roof].
[old people|the children] like to tell that it was once [larger|under water|ruled by geese].
a visitor does best to come on foot and to stay for [a day|a week|the soup].
[in winter|on market days] the inn is [full to the roof|the warmest place of all], and a bed there costs {n1} coins.
on the square stands a [fountain|clock|great tree|row of trees] that nobody [may touch|can explain].
there are {n1} bridges, and the people are proud of every one.
the people are proud of the square, on which there are {n1} great trees.
cats sleep on the [old|white] bridges, and nobody can [tell|explain] why.
a bed at the inn costs {n1} coins, and with it comes [the soup|a good breakfast].
the houses have [white|grey] walls, and {n1} of them are [very old|never opened].
""")
CREATURE_COLOUR = prose("""
it is shy, and [most people|even old shepherds] have seen it only once or twice.
its voice sounds like [a rusty hinge|a kettle|somebody laughing in the next room].
[mothers|old people] say that it brings good luck to [bakers|sailors|people who walk slowly].
a young one is no larger than [an egg|a thumb|a loaf of bread], and it is never alone.
it sleeps for {n1} hours a day and [dreams|snores] loudly.
when it is afraid it [rolls up|holds its breath|sits quite still] and waits.
it is seldom alone and sleeps for {n1} hours a day.
old people say that its voice brings luck.
most people have seen it only when it [sits still and is afraid|is asleep].
it is no larger than [a loaf of bread|an egg], but its voice is that of a [great dog|kettle].
""")
VISITS = bank("""
{a}, a {job}, once came there with a {obj} and [wanted|hoped] to sell it for {n2} coins.|{a} left with {n3} coins and without the {obj}.|How many coins did {a} get?|{n3}
the {job} {a} spent {n2} days there and lost a {obj} on the way home.|the {obj} of {a} was never found.|What did {a} lose?|{obj}
a {job} called {a} wrote it all down in {n2} books.|all {n2} books of {a} are still kept under glass.|How many books did {a} write?|{n2}
{a} went there to look for a {obj} and stayed for {n2} years.|to this day, {a} has not found the {obj}.|What did {a} look for?|{obj}
---
a {job} called {a} came there to sell a {obj} and stayed for {n2} days.|after {n2} days {a} still had the {obj}.|What did {a} want to sell?|{obj}
once {a}, a {job}, lost {n2} coins there.|the {n2} coins of {a} were never found.|How many coins had {a} lost?|{n2}
""")
COMPARES = {
    "town": prose("""
things are different in {other}, a town that [is often compared with {town}|lies some days away]. {fact}
visitors often go on to {other}. {fact}
from there [many|most] visitors go on to {other}. {fact}
some days away lies {other}, where things are different. {fact}
"""),
    "creature": prose("""
it should not be confused with the {other}. {fact}
some people take it for the {other}, which is [quite|very] different. {fact}
people often take it for the {other}, but the two are different. {fact}
"""),
}

# --- Lists ----------------------------------------------------------------------------------------------

LIST_OPENINGS = prose("""
{a} of {town} [wrote down|made a list of] {many} {what}, and this is what it said:
before the [market|journey|festival] began, {a} read out {many} {what} to {b}:
here are the {many} {what} that {a} [found|wrote] in an old book:
{b} asked for the list, and {a} handed it over. it had {many} {what} on it:
this is the list of {many} {what} that {a} of {town} [handed|read out] to {b}:
before the [journey|festival], {b} wrote down {many} {what} in a book of {a}:
{a} asked {b} for {many} {what}, and {b} had them on a list:
""")
LIST_MIDDLES = prose("""
{b} [folded the paper|closed the book] and [looked out of the window|had a cup of tea]. then {b.they} said it all again, in the same order:
"[now you|your turn]," said {a}. {b} thought for a moment and [repeated|said] the list, leaving nothing out:
the paper [got wet|was eaten by a goat], but {b} remembered every word and wrote the list a second time:
{a} lost the paper on the way to {town}. luckily {b} had a copy:
"is that all?" asked {b}. "that is all," said {a}. so {b} read it back, word for word:
the paper [was lost|fell into the soup], but {b} thought for a moment and wrote it all a second time in the same order:
"now read it back," said {a}, and {b} [read|repeated] the list word for word:
{b} closed the book and said the list again, and {b.they} left nothing out:
""")
LIST_CLOSINGS = prose("""
nothing was missing, and {a} was [pleased|satisfied].
"not one mistake," said {a}.
{a} checked it twice. it was right both times.
it was right[ every time|], and {a} was [pleased|satisfied].
{a} was pleased: there was not one mistake in it.
{a} checked it. "not one is missing," {a.they} said.
""")
AFTER_ASKS = bank("""
What comes right after {item} in the list?
Which one follows {item} in the list?
In the list, what comes after {item}?
---
Name the one that comes right after {item} in the list.
What follows {item} in the list?
""")
NTH_ASKS = bank("""
Which is the {nth} one in the list?
What is {nth} in the list?
---
Name the {nth} one in the list.
""")
NTH = "first second third fourth fifth".split()

# --- Choosing and filling -------------------------------------------------------------------------------


def english(text: str) -> str:
    """Mend spaces, write "an" before vowels, and put capitals at the starts of sentences."""
    text = re.sub(r" +", " ", text).replace(" ,", ",").replace(" .", ".").strip()
    text = re.sub(r"\b([Aa]) (?=[aeiouAEIOU])", r"\1n ", text)
    return re.sub(r'(^|[.!?] |[.]" )("?)([a-z])', lambda m: m[1] + m[2] + m[3].upper(), text)


def qa(question: str, answer: str) -> str:
    return f"Question: {question}\nAnswer: {answer}"


def _people() -> dict[str, list[Person]]:
    """Cut one fixed shuffle of all syllable names into the casts of the three splits."""
    taken = {*TOWNS, *PET_NAMES, *(town[key] for town in TOWNS.values() for key in ("river", "founder"))}
    people = [Person(start + end, female) for start in NAME_STARTS
              for ends, female in zip(NAME_ENDS, (True, False), strict=True)
              for end in ends if start + end not in taken]
    Random("people").shuffle(people)
    return {"train": people[:-220], "valid": people[-220:-110], "test": people[-110:]}


PEOPLE = _people()
OBJECTS = {split: [f"{adjective} {noun}" for adjectives, *nouns in THINGS for noun in nouns[i].split()
                   for adjective in adjectives.split() + COLOURS] for i, split in enumerate(SPLITS)}


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

    def say(self, templates: Bank, **values: object) -> str:
        """The same as whole sentences."""
        return english(self.part(templates, **values))

    def cast(self, n: int) -> list[Person]:
        """n people with different initials; the second is not of the first one's sex, so that pronouns are clear."""
        people: list[Person] = []
        while len(people) < n:
            new = self.pick(PEOPLE[self.split])
            if new.name[0] not in [p.name[0] for p in people] and (len(people) != 1 or new.female != people[0].female):
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

    def when(self) -> str:
        return self.part(WHEN, any_month=self.pick([town["month"] for town in TOWNS.values()]))

    def topic(self) -> tuple[str, str]:
        """A town or a creature: its kind and its name."""
        kind = "town" if self.chance(0.75) else "creature"
        return kind, self.pick(list(TOWNS if kind == "town" else CREATURES))

    def fact(self, kind: str, name: str, key: str, subject: str, again: str | None = None) -> str:
        """A statement of one fact, as a part; `again` is how templates name the town or animal inside a sentence."""
        return self.part(SAYS[key], **{**world(kind, name), kind: again or name, "s": subject})


def world(kind: str, name: str) -> dict[str, str]:
    """All facts of a town or a creature as template values, its name among them."""
    return {kind: name, "creature_a": f"a {name}", **(TOWNS if kind == "town" else CREATURES)[name]}


def facts_of(kind: str) -> tuple[str, ...]:
    return TOWN_FACTS if kind == "town" else CREATURE_FACTS


def named(kind: str, name: str) -> str:
    return name if kind == "town" else f"the {name}"


# --- One function for each kind of document -------------------------------------------------------------


def scene(pen: Pen) -> tuple[dict, list[str]]:
    """What happens in a story: its template values and its threads."""
    a, b, c, d = pen.cast(4)
    obj, obj2 = pen.things(2)
    n1, n2 = pen.rng.sample(NUMBERS, 2)
    town, place = pen.towns(2)
    v = dict(a=a, b=b, c=c, d=d, obj=obj, obj2=obj2, n1=n1, n2=n2, town=town, place=place, when=pen.when(),
             rel=pen.pick(RELATIVES[b.female]), job=pen.pick(JOBS), goods=pen.pick(GOODS), cargo=pen.pick(CARGO),
             spot=pen.pick(SPOTS), word=pen.pick(SECRET_WORDS), colour=pen.pick(DOORS), landmark=pen.pick(LANDMARKS),
             hour=pen.pick(HOURS), errand=pen.pick(ERRANDS), epithet=pen.epithet(town), epithet2=pen.epithet(place))
    v["Word"], v["Hour"] = v["word"].capitalize(), v["hour"].capitalize()
    creature = pen.pick(list(CREATURES))
    fact = pen.fact("creature", creature, pen.pick(CREATURE_FACTS), f"the {creature}")
    v["creature_a"], v["they_said"] = f"a {creature}", pen.part(CREATURE_ASIDE, fact=fact, **v)

    return v, pen.rng.sample(list(THREADS), pen.pick([2, 3, 3, 4]))


def prose_of(pen: Pen, v: dict, threads: list[str], mute: bool) -> str:
    """A story in words; if mute, its first thread is stated but never paid back."""
    early = [pen.say(STATES[t], **v) for t in pen.rng.sample(threads, len(threads))]
    middle: list[str] = []
    while len(middle) < pen.pick([1, 1, 2, 2, 3]):
        incident = pen.say(INCIDENTS, **v)
        if not any(incident[:12] == other[:12] for other in middle):
            middle.append(incident)
    late = [pen.say(PAYS[t], **v) for t in THREADS if t in threads and not (mute and t == threads[0])]
    closing = [pen.say(ENDINGS, **v)]
    paragraphs = [[pen.say(OPENINGS, **v), *early], middle, [*late, *closing]]
    return "\n".join(" ".join(p) for p in paragraphs)


def tell(pen: Pen, mute: bool) -> tuple[str, dict, list[str]]:
    """A story's prose, its template values and its threads."""
    v, threads = scene(pen)
    return prose_of(pen, v, threads, mute), v, threads


def story(pen: Pen) -> str:
    """A journey on which early facts (who, where, how many) are needed at the end."""
    asked = pen.pick([0, 1, 1, 2, 3])
    prose, v, threads = tell(pen, mute=asked > 0 and pen.chance(0.5))
    questions = [qa(pen.say(RECALLS[t], **v), THREADS[t].format(**v)) for t in threads[:asked]]
    return prose + "\n\n" * bool(questions) + "\n".join(questions)


def article(pen: Pen) -> str:
    """What is known of a town or a creature, with an anecdote that is taken up again at the end."""
    kind, name = pen.topic()
    the, (a,), (obj,) = named(kind, name), pen.cast(1), pen.things(1)
    n1, n2, n3 = pen.rng.sample(NUMBERS, 3)
    v = dict(a=a, obj=obj, n1=n1, n2=n2, n3=n3, job=pen.pick(JOBS), **world(kind, name))
    keys = facts_of(kind)
    keys = pen.rng.sample(keys, pen.pick([3, 4, 5]) if kind == "town" else 3)
    again = ["the town", name, name] if kind == "town" else ["animal", name, name]
    aside = pen.rng.randrange(1, len(keys))
    lines: list[str] = []
    for i, key in enumerate(keys):
        if i == aside:
            lines.append(pen.say(TOWN_COLOUR if kind == "town" else CREATURE_COLOUR, **v))
        # "it" only right after a sentence that is about the subject as a whole
        subject = the if i in (0, aside) else pen.pick([the, "it", "the town" if kind == "town" else "this animal"])
        lines.append(english(pen.fact(kind, name, key, subject, pen.pick(again) if i else None) + "."))
    questions = []
    if pen.chance(0.6):
        visit = pen.part(VISITS, **v).split("|")
        lines.insert(aside, english(visit[0]))
        lines.append(english(visit[1]))
        questions.append(qa(english(visit[2]), visit[3]))
    if pen.chance(0.5):
        other = pen.pick([n for n in (TOWNS if kind == "town" else CREATURES) if n != name])
        key = pen.pick(keys)
        fact = english(pen.fact(kind, other, key, named(kind, other)) + ".")
        lines.append(pen.say(COMPARES[kind], other=other, fact=fact, **v))
        questions.append(qa(pen.say(ASKS[key], **world(kind, other)), world(kind, other)[key]))
    key = pen.pick(keys)
    questions.append(qa(pen.say(ASKS[key], **v), v[key]))
    pen.rng.shuffle(questions)
    return "\n\n".join([" ".join(lines), "\n".join(questions[:pen.pick([1, 1, 2, 3])])])


def quiz(pen: Pen) -> str:
    """Closed-book questions; some follow-ups name their town or creature only by "it"."""
    lines: list[str] = []
    for _ in range(pen.rng.randint(4, 9)):
        kind, name = pen.topic()
        first, second = pen.rng.sample(facts_of(kind), 2)
        values = world(kind, name)
        lines.append(qa(pen.say(ASKS[first], **values), values[first]))
        if pen.chance(0.25):
            lines.append(qa(pen.say(FOLLOWS[second]), values[second]))
    return "\n".join(lines)


def talk(pen: Pen, recall: bool) -> tuple[str, list[tuple[str, dict]]]:
    """A conversation and the (topic, template values) told in it; if recall, some are asked for again in it."""
    a, b, c = pen.cast(3)
    here = pen.pick(list(TOWNS))
    lines = pen.part(GREETINGS, a=a, b=b, town=here).split("|")
    told: list[tuple[str, dict]] = []

    def tells(who: Person, topic: str, values: dict) -> None:
        lines.append(f"{who}: {pen.say(TOPICS[topic][1], **values)}")
        short = SHORT[topic].format(**values)
        spoken = f"a {short}" if topic in ("job", "thing") else short
        told.append((topic, {**values, "who": who, "short": short, "spoken": spoken, "Spoken": english(spoken)}))

    facts = {}
    for who, thing in zip((a, b), pen.things(2), strict=True):
        home = pen.pick(list(TOWNS))
        facts[who] = dict(home=home, epithet=pen.epithet(home), job=pen.pick(JOBS),
                          pet=pen.pick(PETS), petname=pen.pick(PET_NAMES), food=pen.pick(FOODS),
                          obj=thing, age=pen.pick(AGES), kin=pen.pick(NUMBERS[:8]))
    for topic in pen.rng.sample(list(TOPICS), pen.pick([2, 3, 3, 4])):
        asker, other = (a, b) if pen.chance(0.5) else (b, a)
        lines.append(f"{asker}: {pen.say(TOPICS[topic][0])}")
        tells(other, topic, facts[other])
        if pen.chance(0.5):
            lines[-1] += " " + pen.say(BACKS)
            tells(asker, topic, facts[asker])
        elif pen.chance(0.6):
            lines.append(f"{asker}: {pen.say(REACTIONS)}")
    for _ in range(pen.pick([0, 1, 1, 2])):
        kind, name = pen.topic()
        key = pen.pick(facts_of(kind))
        lines.append(f"{a}: {pen.say(WORLD_TALK, question=pen.part(ASKS[key], **world(kind, name)))}")
        lines.append(f"{b}: {english(pen.fact(kind, name, key, named(kind, name)) + '.')}")
    if recall:
        for topic, values in pen.rng.sample(told, pen.pick([0, 1, 1, 2])):
            who = values["who"]
            asker = b if who is a else a
            lines.append(f"{asker}: {pen.say(REMINDS, b=who, again=pen.part(TOPICS[topic][2], **values))}")
            lines.append(f"{who}: {pen.say(REPLIES, **values)}")
        if pen.chance(0.4):
            topic, values = pen.pick(told)
            other = b if values["who"] is a else a
            lines.append(f"{c}: {pen.say(THIRD, b=other, question=pen.part(TOPICS[topic][3], **values))}")
            lines.append(f"{other}: {pen.say(THIRD_REPLIES, **values)}")
        lines += pen.part(FAREWELLS, a=a, b=b).split("|")
    return "\n".join(lines), told


def dialogue(pen: Pen) -> str:
    """Two people tell each other about themselves, and are asked about it later."""
    text, told = talk(pen, recall=True)
    asked = pen.rng.sample(told, pen.pick([0, 1, 2]))
    questions = [qa(pen.say(TOPICS[topic][3], **values), values["short"]) for topic, values in asked]
    return text + "\n\n" * bool(questions) + "\n".join(questions)


def in_steps(pen: Pen, opening: str, steps: list[str], closing: str, words: tuple[str, ...]) -> str:
    """Join clauses as numbered lines, or as a paragraph that says First and Finally."""
    if pen.chance(0.4):
        return "\n".join([opening, *(f"{i}. {english(s)}." for i, s in enumerate(steps, 1)), closing])
    starts = ["First, ", *(words[(i + len(opening)) % len(words)] for i in range(len(steps) - 2)), "Finally, "]
    return " ".join([opening, *(english(start + s) + "." for start, s in zip(starts, steps, strict=True)), closing])


def project(pen: Pen) -> tuple[str, dict, list[int]]:
    """What a device, a dish or a journey is made of: its kind, its template values and the numbers of its points."""
    kind = pen.pick(list(PLANS))
    needed, points, _ = PLANS[kind]
    (a, c, d), (obj,), (town, town2) = pen.cast(3), pen.things(1), pen.towns(2)
    v: dict = {f"n{i}": n for i, n in enumerate(pen.rng.sample(NUMBERS, 5), 1)}
    v |= {name: pen.pick(words) for name, words in PLAN_WORDS.items()}
    v |= dict(a=a, c=c, d=d, obj=obj, town=town, town2=town2)
    v["m1"], v["m2"] = pen.rng.sample(MINUTES, 2)

    others = [i for i in range(len(points)) if i not in needed]
    kept = needed | set(pen.rng.sample(others, pen.pick([5, 6, 7]) - len(needed)))
    return kind, v, sorted(kept)


def notes_of(pen: Pen, kind: str, v: dict, kept: list[int]) -> tuple[str, str, str]:
    """Notes on a project, the question to explain it, and the long answer that the notes imply."""
    _, points, banks = PLANS[kind]
    a, chosen = v["a"], [points[i] for i in kept]
    heads = pen.part(banks["head"], **v).split("|")
    notes = [pen.part((p[:2], p[:2]), **v) for p in chosen]
    split_at = pen.rng.randint(1, len(heads))
    notes = [*heads[:split_at], *notes, *heads[split_at:]]
    if pen.chance(0.3):
        pen.rng.shuffle(notes)
    steps = [pen.part((p[2:], p[2:]), x=a if i in (0, len(chosen) // 2 + 1) else a.they, **v)
             for i, p in enumerate(chosen)]
    answer = in_steps(pen, pen.say(banks["open"], **v), steps, pen.say(banks["close"], **v), pen.pick(ORDER_WORDS))
    return "Notes:\n" + "\n".join("- " + english(note) for note in notes), pen.say(banks["ask"], **v), answer


def plan(pen: Pen) -> tuple[str, str, str]:
    """Notes on a device, a dish or a journey, the question to explain it, and the long answer that the notes imply."""
    return notes_of(pen, *project(pen))


def explain(pen: Pen) -> str:
    """A long, ordered answer, from notes or (one time in four) from knowledge of the world."""
    if pen.chance(0.75):
        notes, question, answer = plan(pen)
        return f"{notes}\n\n{qa(question, answer)}"
    kind, name = pen.topic()
    v, keys = world(kind, name), list(facts_of(kind))
    ask, opening, closing = WORLD_EXPLAINS[kind]
    pen.rng.shuffle(keys)
    steps = [pen.fact(kind, name, key, pen.pick([named(kind, name), "it"])) for key in keys]
    answer = in_steps(pen, pen.say(opening, **v), steps, pen.say(closing, **v), ("Second, ", "Also, ", "And "))
    text = qa(pen.say(ask, **v), answer)
    key = pen.pick(keys)
    return text + "\n" + qa(pen.say(ASKS[key], **v), v[key])


def recite(pen: Pen) -> tuple[str, str, str]:
    """A list with its story up to the copy, the copy, and what comes after it."""
    a, b = pen.cast(2)
    what, least, most = pen.pick([("things", 8, 13), ("names", 12, 20), ("towns", 10, 18),
                                  ("numbers", 18, 25), ("goods", 10, 16)])
    n = pen.rng.randint(least, most)
    if what == "things":
        items = pen.things(n)
    elif what == "names":
        items = [p.name for p in pen.rng.sample(PEOPLE[pen.split], n)]
    elif what == "towns":
        items = pen.towns(n)
    elif what == "numbers":
        items = [str(i) for i in pen.rng.sample(range(10, 1000), n)]
    else:
        items = [f"{i} {goods}" for i, goods in zip(pen.rng.sample(NUMBERS, n), pen.rng.sample(GOODS * 2, n), strict=True)]
    v = dict(a=a, b=b, town=pen.pick(list(TOWNS)), what=what, many=n)
    written = ("\n" if n <= 14 and pen.chance(0.4) else ", ").join(items)
    head = f"{pen.say(LIST_OPENINGS, **v)}\n{written}\n{pen.say(LIST_MIDDLES, **v)}\n"
    tail = "\n" + pen.say(LIST_CLOSINGS, **v)
    i = pen.rng.randrange(n - 1)
    if pen.chance(0.5):
        tail += "\n\n" + qa(pen.say(AFTER_ASKS, item=items[i]), items[i + 1])
    elif pen.chance(0.5):
        tail += "\n\n" + qa(pen.say(NTH_ASKS, nth=NTH[i % len(NTH)]), items[i % len(NTH)])
    return head, written, tail


def listing(pen: Pen) -> str:
    """A list that is repeated word for word."""
    return "".join(recite(pen))


KINDS = {"story": (story, 28), "article": (article, 17), "quiz": (quiz, 15), "dialogue": (dialogue, 17),
         "explain": (explain, 13), "list": (listing, 10)}  # function, weight in percent


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


def documents(split: str, n: int, seed: int = 0, start: int = 0) -> Iterator[Document]:
    """The documents start .. start + n - 1 of a split."""
    Pen(split, "")  # an unknown split is refused here, not at the first next()
    return (document(split, start + i, seed) for i in range(n))


def closed_book_questions(split: str) -> list[Question]:
    """Every fact of the world in every paraphrase of the split; the family is like "town:Tolben:river"."""
    side = Pen(split, "").side
    return [Question(f"{kind}:{name}:{key}", i, f"Question: {english(ask.format(**{kind: name}))}\nAnswer:", table[name][key])
            for kind, table in (("town", TOWNS), ("creature", CREATURES))
            for name in table for key in facts_of(kind) for i, ask in enumerate(ASKS[key][side])]


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
                asks, answer = TOPICS[key][3], v["short"]
            else:
                text, v, (key, *_) = tell(pen, mute=True)
                asks, answer = RECALLS[key], THREADS[key].format(**v)
        for i in sorted(pen.rng.sample(range(len(asks[pen.side])), 3)):
            question = english(asks[pen.side][i].format(**v))
            prompt = f"{text}\n\nQuestion: {question}\nAnswer:"
            questions.append(Question(f"recall:{split}:{seed}:{index}:{key}", i, prompt, answer))
        index += 1
    return questions[:n]


def explain_questions(split: str, n: int, seed: int = 0) -> list[Question]:
    """n sets of notes, each with the question to explain them and the long reference answer."""
    questions = []
    for i in range(n):
        notes, question, answer = plan(Pen(split, f"{seed}/{split}/explain/{i}"))
        questions.append(Question(f"explain:{split}:{seed}:{i}", 0, f"{notes}\n\nQuestion: {question}\nAnswer:", answer))
    return questions


def quiz_families(split: str, header: int = 4) -> list[list[Question]]:
    """All wordings of each closed-book question that belongs to a split, after the same few questions with answers.

    Facts are shared out among the splits: what is asked in one isn't asked in another.
    """
    asked = closed_book_questions(split)
    names = sorted({q.family for q in closed_book_questions("train")})
    Random("families").shuffle(names)
    first = {q.family: q for q in reversed(closed_book_questions("train"))}
    head = "\n".join(f"{first[name].prompt} {first[name].answer}" for name in names[:header])
    rest = names[header:]
    parts = {"train": rest[96:], "valid": rest[48:96], "test": rest[:48]}[split]
    return [[Question(f"quiz:{name}", q.paraphrase, f"{head}\n{q.prompt}", q.answer) for q in asked if q.family == name]
            for name in parts]


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
            text, asks = prose_of(pen, v, threads, mute=True), RECALLS[key][pen.side]
            prompt = f"{text}\n\nQuestion: {english(asks[i % len(asks)].format(**v))}\nAnswer:"
            family.append(Question(f"story:{split}:{seed}:{index}:{key}", i, prompt, THREADS[key].format(**v)))
        if all(350 <= len(q.prompt) <= 1300 for q in family):
            families.append(family)
        index += 1
    return families


def notes_families(split: str, n: int, tellings: int, seed: int = 0) -> list[list[Question]]:
    """n projects, each with several sets of notes, in other words and another order, and the question to explain it."""
    families = []
    for index in range(n):
        name, family = f"{seed}/{split}/noted/{index}", []
        made = project(Pen(split, name))
        for i in range(tellings):
            notes, question, answer = notes_of(Pen(split, f"{name}/{i}"), *made)
            prompt = f"{notes}\n\nQuestion: {question}\nAnswer:"
            family.append(Question(f"notes:{split}:{seed}:{index}", i, prompt, answer))
        families.append(family)
    return families


def repeated_lists(split: str, n: int, seed: int = 0) -> list[tuple[str, str]]:
    """n pairs (text up to where the copy of its list begins, the copy)."""
    return [recite(Pen(split, f"{seed}/{split}/list/{i}"))[:2] for i in range(n)]


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:
        self.exit(2, f"{self.prog}: {message}\n")


def main() -> None:
    parser = _Parser(description="Print documents of the corpus with their kinds.",
                     formatter_class=argparse.ArgumentDefaultsHelpFormatter,
                     epilog="example: python pocket/corpus.py --split valid --n 3 --seed 0")
    parser.add_argument("--split", default="train", help="train, valid or test")
    parser.add_argument("--n", type=int, default=3, help="number of documents")
    parser.add_argument("--seed", type=int, default=0, help="seed of the corpus")
    parser.add_argument("--start", type=int, default=0, help="index of the first document")
    args = parser.parse_args()
    if args.n < 1:
        parser.error(f"--n must be 1 or more, got {args.n}")
    try:
        for i, doc in enumerate(documents(args.split, args.n, args.seed, args.start), args.start):
            print(f"--- {args.split} {i}: {doc.kind}, {len(doc.text)} characters\n{doc.text}\n", flush=True)
    except ValueError as error:
        parser.error(str(error))
    except BrokenPipeError:  # the reader has seen enough; give Python's own last flush nowhere to fail
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


if __name__ == "__main__":
    main()
