"""Plans of devices, dishes and journeys, and the long answers that explain them."""

from typing import NamedTuple

from pocket.sentences.templates import Bank, read_bank, read_sections


class Point(NamedTuple):
    """One point of a plan, each way in two wordings."""

    notes: list[str]
    steps: list[str]  # of the answer


class Plan(NamedTuple):
    """The templates of notes on something that is made, and of the answer that explains it."""

    heads: Bank  # the general notes, with bars between them
    questions: Bank
    openings: Bank  # of the answer
    closings: Bank
    points: list[Point]  # in their order


class Explanation(NamedTuple):
    """The templates of an answer from knowledge of the world."""

    questions: Bank
    openings: Bank
    closings: Bank


def read_plan(blocks: list[str]) -> Plan:
    """Read four banks and then points of four lines each: two notes and two steps."""
    points = []
    for block in blocks[4:]:
        lines = block.split("\n")
        points.append(Point(notes=lines[:2], steps=lines[2:]))
    return Plan(*map(read_bank, blocks[:4]), points)


# Words that fill a plan's templates, in the order in which they are drawn.
PLAN_FIELDS = """
wood metal parts cord vessel seal power signal device purpose danger veg grain fat pot liquid herb secret side
rest dish inn road gate hazard view landmark hour meals colour side_way
"""

# The points of a plan that its closing speaks of.
REQUIRED_POINTS = {"device": {0, 1, 3}, "recipe": {0, 1, 3}, "journey": {0}}
PLANS = {
    kind: read_plan(blocks)
    for kind, blocks in read_sections("""
device:
the {device} is built by {a} of {town}|the work takes {n5} weeks|it is there {purpose}|it must be kept safe from {danger}
a {device}, made by {a} in {town}|{n5} weeks of work|its use is {purpose}|the danger to it is {danger}
{a} in {town} made the {device}|{n5} weeks is what the work takes|the use of it is {purpose}|keep it safe from {danger}

Explain how {a} builds the {device}.
Explain step by step how the {device} is made.
Explain how the {device} of {a} is built and what it is for.
Explain the work of {a} on the {device}.
---
Explain what {a} does to build the {device}.
Explain in steps how {a} makes the {device}.
Explain how one builds the {device} of {a}.

{a} of {town} builds the {device} {purpose}, and the work takes {n5} weeks.
the {device} is the work of {a} of {town}. it takes {n5} weeks to build, and it is there {purpose}.
in {town}, {a} builds the {device} in {n5} weeks {purpose}.

in short, with a base of {wood}, {n2} {parts} and a {vessel}, {a} has built a {device} {purpose}. only {danger} can harm it, so it must be kept safe.
so the {device} stands ready {purpose}: {n2} {parts} of {metal} on a base of {wood}. {a} keeps it safe from {danger}.
in short, {n2} {metal} {parts} and a base of {wood} make a {device} {purpose}, and {a} must keep it safe from {danger}.

the base is a block of {wood}, {n1} hands wide
for the base there is a block of {wood} of {n1} hands
{x} cuts a block of {wood} {n1} hands wide and [sets it level|lays it flat on the ground] as the base
{x} sets up the base, a block of {wood} that is {n1} hands wide

around the base there are {n2} {metal} {parts}
there are {n2} {parts} around the base, all of {metal}
{x} fixes {n2} {parts} of {metal} around the base, [one after another|with equal space between them]
{x} takes {n2} {metal} {parts} and fixes them around the base

the {parts} are tied with {cord}
what holds the {parts} is {cord}
{x} ties the {parts} to one another with {cord}[, so that nothing shakes loose| and pulls the knots tight]
{x} takes {cord} and ties the {parts} with it

a {vessel} hangs in the middle
in the middle there is a {vessel}
{x} hangs a {vessel} in the middle, where [it can swing freely|everyone can see it]
in the middle {x} hangs a {vessel}, so that it can swing

the joints are sealed with {seal}
{seal} keeps the joints dry
{x} [seals every joint with {seal}|uses {seal} to seal every joint][ to keep the rain out|, and waits until it is hard]
{x} takes {seal} to seal the joints and to keep the rain out

[it is moved by|what moves it is] {power}
{power} moves it
{x} lets {power} move it for the first time
it is {power} that {x} lets move it

every {n3} hours it {signal}
it {signal} every {n3} hours
{x} [makes sure|checks] that it {signal} every {n3} hours
{x} waits to see that every {n3} hours it {signal}

it is tested for {n4} days at the {landmark}
at the {landmark} it is tested for {n4} days
{x} takes it to the {landmark} and tests it there for {n4} days
for {n4} days {x} tests it at the {landmark}
recipe:
{dish}, as cooked by {a} of {town}|it feeds {n5} guests|{c} taught {a} to make it|the secret is {secret}
the dish is {dish}, and the cook is {a} of {town}|enough for {n5} guests|{a} has it from {c}|its secret: {secret}
{a} of {town} is the cook of this {dish}|{n5} guests can eat of it|it was {c} who taught {a}|{secret} is the secret

Explain how {a} cooks {dish}.
Explain how to make the {dish} of {a}.
Explain step by step how {dish} is cooked.
Explain the recipe for {dish}.
---
Explain what {a} does to cook {dish}.
Explain in steps how one makes {dish}.
Explain how the {dish} of {a} is made.

{a} of {town} cooks {dish} for {n5} guests, and {c} was the one who taught {a.them}.
the {dish} of {a} feeds {n5} guests. {a.they} learned it from {c} and cooks it in {town}.
in {town}, {a} cooks {dish} for {n5} guests, as {a.they} learned it from {c}.

in short, {n2} {veg}, {grain} and {liquid} make a {dish} for {n5} guests, and the secret that {a} learned is {secret}.
that is all, but for the secret: {secret}. with it, {n2} {veg} and some {grain} are enough for {n5} guests.
in short, {n5} guests can eat of {n2} {veg} and the {grain} in {liquid}, but the secret of {a} is {secret}.

take {n2} {veg}
{n2} {veg} are needed
{x} washes {n2} {veg} and cuts them into [small pieces|thin slices]
{x} cuts {n2} {veg} into pieces

the {grain} must lie in water for {n3} hours
for {n3} hours the {grain} lie in water
{x} lets the {grain} lie in water for {n3} hours [to make them soft|until they are soft]
{x} makes the {grain} soft, for which they lie in water for {n3} hours

melt some {fat} in a {pot}
a {pot} and some {fat} are needed
{x} melts some {fat} in a {pot} over [a small|a bright] fire
{x} takes a {pot} and melts some {fat} in it

[boil everything|it boils] in {liquid} for {m1} minutes
everything boils for {m1} minutes in {liquid}
{x} pours in the {liquid} and lets everything boil for {m1} minutes
{x} boils everything for {m1} minutes in the {liquid}

add {herb} at the end
at the end comes {herb}
{x} adds {herb}[, but not too much| and stirs it in]
{x} stirs in some {herb}

let it rest {rest} for {m2} minutes
for {m2} minutes it must rest {rest}
{x} leaves it to rest {rest} for {m2} minutes
{x} lets it rest {rest}, and that takes {m2} minutes

serve it with {side}[| to the guests]
the guests have {side} with it
{x} serves it with {side}[ while it is still hot|, and everyone sits down]
{x} serves it hot, and the guests have {side} with it
journey:
{a} must take a {obj} to {c} in {town2}|the journey takes {n5} days|the danger on the way is {hazard}
a {obj} is to be brought to {c} in {town2}; {a} will go|{n5} days on the way|beware of {hazard}
{a} is to bring {c} a {obj}, and {c} lives in {town2}|the way takes {n5} days|the danger is {hazard}

Explain how {a} gets to {town2}.
Explain the journey of {a} step by step.
Explain how {a} brings the {obj} to {c}.
Explain the way from {town} to {town2}.
---
Explain what {a} does to get to {town2}.
Explain in steps the way of {a} to {c}.
Explain how the {obj} gets to {c}.

{a} has to bring a {obj} from {town} to {c} in {town2}, a journey of {n5} days.
the journey of {a} takes {n5} days, from {town} to {town2}, and its purpose is to bring {c} a {obj}.
{a} takes a {obj} to {c}, and the way from {town} to {town2} takes {n5} days.

in short, it takes {n5} days, and if {hazard} can be avoided, {c} will have the {obj}.
so after {n5} days {a} can hand over the {obj} to {c} in {town2}, as long as {a.they} avoids {hazard}.
in short, {c} will have the {obj} after {n5} days if {a} avoids {hazard} on the way to {town2}.

leave {town} at {hour} by the {gate} gate
the {gate} gate of {town} is where it begins, at {hour}
{x} leaves {town} at {hour} and goes out by the {gate} gate
at {hour} {x} goes out of {town} by the {gate} gate

follow the {road} for {n2} miles
{n2} miles on the {road}
{x} follows the {road} [for {n2} miles|, which goes on for {n2} miles]
for {n2} miles {x} follows the {road}

{d} the ferryman takes {n3} coins
the ferryman is {d}, and the price is {n3} coins
{x} [pays|gives] {n3} coins to {d} the ferryman and crosses the water
{x} crosses the water with the ferryman {d}, who takes {n3} coins

the inn for the night is the {inn}
sleep at the inn called {inn}
{x} sleeps at the {inn}[, an inn with good beds| and leaves before breakfast]
for the night {x} goes to the inn called {inn}

turn {side_way} at the {landmark}
at the {landmark} the way turns {side_way}
{x} comes to the {landmark} and turns {side_way} there
at the {landmark} {x} turns {side_way}

[buy {n4} {meals} for the way|{n4} {meals} are to be bought]
{n4} {meals} must be bought for the way
{x} [buys|stops to buy] {n4} {meals} [and eats some at once|for the rest of the way]
{x} buys {n4} {meals} to eat on the way

{town2} is known from afar by {view}
from afar one sees {view}: that is {town2}
{x} looks out for {view}, for that is how one knows {town2} from afar
{x} knows {town2} from afar when there is {view} to see

{c} lives behind the {colour} door
the door of {c} is {colour}
{x} finds the {colour} door and knocks, and {c} opens it
{x} knocks at the door of {c}, which is {colour}
""").items()
}
ORDER_WORDS = (
    ("Then ", "After that, ", "Next, ", "When this is done, ", "Now "),
    ("Then ", "After this, ", "Next, "),
)
WORLD_EXPLANATIONS = {
    kind: Explanation(*map(read_bank, blocks))
    for kind, blocks in read_sections("""
town:
Explain what a visitor should know about {town}.
Explain what makes {town} special.
Explain what is known about {town}.
---
Explain what one should know about {town}.
Explain what people know about {town}.

a visitor to {town} should know five things.
there is more to {town} than one sees from the road.
{town} is a town with a river, a trade, a founder, a festival and a wood of its own.
there are five things that people should know about {town}.

in short, {town} means the {river}, {trade} and {wood}, with a festival in {month} and {founder} as its founder.
to sum up: the river is the {river}, the trade is {trade}, the founder is {founder}, the festival is in {month} and the wood is {wood}.
in short, the river of {town} is the {river}, its wood is {wood}, its trade {trade}, its founder {founder}, and its festival is in {month}.
creature:
Explain how one knows {creature_a}.
Explain what is known about the {creature}.
Explain how the {creature} lives.
---
Explain what people know about the {creature}.
Explain how to know {creature_a}.

the {creature} is a shy animal, but some things are known about it.
there are three things to say about the {creature}.
it takes patience to see {creature_a}, and some knowledge too.
three things are known about the {creature}.

in short, an animal with a {coat} coat that eats {food} and lives in {home} can only be {creature_a}.
to sum up: its coat is {coat}, its food is {food}, and its home is in {home}.
in short, the {creature} is the {coat} animal that eats {food} and has its home in {home}.
""").items()
}
