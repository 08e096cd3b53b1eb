"""Stories: how they open, what they state early and pay back late, what happens on the way."""

from pocket.sentences.templates import read_bank, read_banks

OPENINGS = read_bank("""
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
STATEMENTS = read_banks("""
meet:
{c} had sent word: {c.they} would wait for them at the {landmark} at {hour}.
they had agreed to meet {c} at the {landmark}, and not later than {hour}.
"meet me at the {landmark} at {hour}," {c} had written.
a letter from {c} asked them to come to the {landmark} at {hour}.
the letter from {c} said: "Come to the {landmark} at {hour}."
at {hour} they were to meet {c} at the {landmark}.
word:
the keeper of the gate lets nobody pass without the secret word, and that [week|month|day] the word was "{word}".
"the secret word is {word}," whispered {b}. "without it the gate stays shut."
each week another secret word opened the gate. [this time|that week] it was "{word}".
"do not forget the secret word," said {b}. "it is {word}."
to pass the gate they needed a word, and the word was "{word}".
"without the secret word the gate stays shut," said {b}. "the word is {word}."
nobody could pass the gate without a word; for them the word was "{word}".
door:
{c} lived in the house with the {colour} door, [close to|across from|behind] the market.
"look for the {colour} door," {b} said. "that is where {c} lives."
they were going to see {c}, whose house had a {colour} door.
the house of {c} was easy to know, for its door was {colour}.
the door of the house where {c} lived was {colour}.
"the house of {c} is easy to find," said {b}. "its door is {colour}."
errand:
they wanted to ask {c} for {errand}.
what they needed was {errand}, and only {c} could give it to them.
{a} hoped that {c} would give them {errand}.
the reason for the journey was {errand}, and the one to ask was {c}.
only {c} could help them, for what they wanted was {errand}.
they were going to see {c}, and the reason was {errand}.
owner:
in {b.their} bag {b} carried a {obj2} that belonged to {d}.
{b} had borrowed a {obj2} from {d} and [meant|wanted] to give it back.
the {obj2} that {b} carried was not {b.their} own; its owner was {d}.
{d} had lent {b} a {obj2}, and {b} [kept it close|took great care of it|wrapped it in a cloth].
{b} carried a {obj2}, and the owner of it was {d}.
the {obj2} that {b} had with {b.them} was borrowed; it belonged to {d}.
promise:
{a} had promised to bring {n1} {goods} to {d}.
"bring me {n1} {goods}," {d} had said, and {a} had promised to do it.
{a} had packed {n1} {goods} for {d}, as {a.they} had promised.
a promise is a promise: {d} was to have {n1} {goods}, and {a} [counted them twice|packed them with care|put them in first].
{d} had asked for {n1} {goods}, and {a} had promised to bring them.
the {goods} were for {d}. {a} had promised {n1}, and {n1} {a.they} had packed.
count:
on their cart lay {n2} {cargo}.
they took {n2} {cargo} with them, [tied down with rope|under a wide cloth|to sell on the way back].
the donkey pulled a cart with {n2} {cargo} on it.
{b} counted the {cargo} on the cart: there were {n2} of them.
there was a cart too, and on it {b} had tied down {n2} {cargo}.
with them went {n2} {cargo} on a cart.
hide:
before they left, {a} hid a {obj} {spot}.
{a} did not dare to take {a.their} {obj} along, so {a.they} [hid|left|put] it {spot}.
{a} had a {obj}, and nobody was to find it. {a.they} put it {spot}.
"is the {obj} safe?" asked {b}. "it is {spot}," said {a}.
"nobody will find my {obj}," said {a}. {a.they} had put it {spot}.
{spot} was where {a} hid {a.their} {obj} before they left.
""")
PAYOFFS = read_banks("""
meet:
at {hour} they stood at the {landmark}, and there was {c}, [waving|smiling|out of breath].
they came to the {landmark} just [before|after] {hour}, where {c} was waiting as agreed.
{c} was already at the {landmark}. "{hour}, as we said," {c} called.
it was {hour} when they saw {c} waiting at the {landmark}.
"as we said, {hour}," called {c}, who stood waiting at the {landmark}.
word:
at the gate the keeper held up a hand. "{Word}," said {a}, and the gate swung open.
"the word?" asked the keeper. {a} remembered it well: "{Word}." [they were let through|the keeper let them pass].
the keeper would not move until {b} said "{word}". then the gate was opened.
the gate was shut, but {a} remembered the word. "{Word}," {a.they} said, and they were let through.
"{Word}," said {b} at the gate, and the keeper let them pass.
door:
they passed [one house after another|door after door] until they saw the {colour} one, and there they knocked. {c} let them in.
there were many doors in the street, but only one was {colour}, and {c} opened it [at once|with a smile].
"here it is, the {colour} door," said {b}, and {c} came out to greet them.
in that street one door was {colour}, and when they knocked, {c} let them in.
they knocked at the {colour} door, and {c} opened it.
errand:
{c} listened, nodded, and gave them {errand}, which was all they had come for.
when {a} asked for {errand}, {c} [laughed and said yes|agreed at once|was glad to help].
"you shall have what you came for," said {c}, and gave them {errand}.
{c} was glad to give them {errand}, for which they had come so far.
"{errand}?" said {c}. "You shall have it," and so they did.
owner:
when they met {d}, {b} gave back the {obj2}[, safe and clean| with many thanks|].
{d} was pleased to have the {obj2} back.
on the way they stopped at the house of {d}, and {b} handed over the {obj2} to its owner.
{b} gave the {obj2} back to {d}, its owner.
when they stopped to see {d}, {b} did not forget to hand over the {obj2}.
promise:
{a} counted the {goods} into the hands of {d}: all {n1} of them, as promised.
{d} got the {n1} {goods} and was [delighted|very pleased|full of thanks].
"one promise kept," said {a}, and gave {d} the {n1} {goods}.
{d} was very pleased to get the {n1} {goods} that {a} had promised.
{a} kept the promise: {n1} {goods} went into the hands of {d}.
count:
when they counted the {cargo}, there were still {n2} of them; not one had been lost.
all {n2} {cargo} were [sold|unloaded] before dark.
"{n2} {cargo}, not one lost," said {b} [proudly|with a smile|] as they unloaded the cart.
not one of the {n2} {cargo} had been lost on the way.
they unloaded the cart, and {b} counted {n2} {cargo}.
hide:
back at home, {a} looked {spot}, and the {obj} was still there.
the {obj} was where {a} had left it, {spot}.
{a} went straight to [find|fetch] the {obj}, and found it {spot}, just as {a.they} had left it.
at home {a} found the {obj} {spot}, where {a.they} had put it.
{spot} the {obj} was still safe when {a} came home.
""")
QUESTIONS = read_banks("""
meet:
Where were they to meet {c}?
At what place did {c} wait for them?
Which place had {c} named for the meeting?
Where did {a} and {b} meet {c}?
Where was {c} waiting?
---
Name the place where they were to meet {c}.
At which place did {a} meet {c}?
Where did {c} wait for {a} and {b}?
word:
What was the secret word?
What word opened the gate?
Which word did the keeper want to hear?
What did they have to say at the gate?
With which word could they pass the gate?
---
Name the word that opened the gate.
Which secret word did {a} and {b} have to say?
What was the word they needed to pass the gate?
door:
What colour was the door of {c}?
Which colour did the door of the house of {c} have?
{c} lived behind a door of what colour?
What colour was the door at which they knocked?
Of what colour was the door of {c}?
---
Name the colour of the door of {c}.
Which colour was the door where {c} lived?
What was the colour of the door of {c}?
errand:
What did they want from {c}?
What did they ask {c} for?
Why did {a} and {b} go to see {c}?
What did {c} give them?
What was the reason for the journey?
---
Name the thing they wanted from {c}.
For what did {a} and {b} ask {c}?
What was it that {c} gave to {a} and {b}?
owner:
Who was the owner of the {obj2}?
Whose was the {obj2}?
To whom did the {obj2} belong?
Who had lent {b} the {obj2}?
From whom did {b} have the {obj2}?
---
Name the owner of the {obj2}.
Who was it that the {obj2} belonged to?
To whom did {b} have to give back the {obj2}?
promise:
How many {goods} did {a} bring to {d}?
How many {goods} had {a} promised to {d}?
What number of {goods} did {d} get?
How many {goods} were for {d}?
{a} promised {d} how many {goods}?
---
Name the number of {goods} that {a} promised to {d}.
How many {goods} did {d} get from {a}?
What number of {goods} had {a} promised?
count:
How many {cargo} were on the cart?
How many {cargo} did they take with them?
What number of {cargo} lay on the cart?
How many {cargo} did they have?
How many {cargo} did the donkey pull?
---
Name the number of {cargo} on the cart.
How many {cargo} did {a} and {b} take along?
What number of {cargo} did they have with them?
hide:
Where was the {obj}?
Where did {a} hide the {obj}?
Where did {a} leave {a.their} {obj}?
In what place was the {obj} hidden?
Where did {a} put the {obj}?
---
Name the place where {a} hid the {obj}.
In which place did {a} put {a.their} {obj}?
Where was it that {a} had left the {obj}?
""")
# The order of the payoffs, so that the gate comes before the house and the way home comes last.
THREAD_ANSWERS = {
    "meet": "{landmark}",
    "word": "{word}",
    "door": "{colour}",
    "errand": "{errand}",
    "owner": "{d}",
    "promise": "{n1}",
    "count": "{n2}",
    "hide": "{spot}",
}
INCIDENTS = read_bank("""
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
CREATURE_ASIDES = read_bank("""
{b} knew that {fact}
{a} said that {fact}
they remembered that {fact}
{b} remembered that {fact}
{a} told {b} that {fact}
{a} had heard that {fact}
""")
ENDINGS = read_bank("""
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
