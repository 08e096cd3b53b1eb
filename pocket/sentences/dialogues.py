"""Dialogues: what two people ask, tell and remember."""

from typing import NamedTuple

from pocket.sentences.templates import Bank, read_bank, read_sections


class Topic(NamedTuple):
    """What two people say on one of the subjects that they talk about."""

    questions: Bank
    statements: Bank
    later_questions: Bank  # for what was stated, asked again by the same person
    outside_questions: Bank  # for the same of {who}, asked by somebody else


GREETINGS = read_bank("""
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
TOPICS = {
    name: Topic(*map(read_bank, blocks))
    for name, blocks in read_sections("""
home:
Where do you come from?
What town do you live in?
And where is your home?
In which town is your home?
What town do you come from?

I come from {home}, {epithet}.
My home is in {home}. [It is a quiet place|You should see it in spring|I was born there].
I live in {home}, [not far from the market|in a narrow street|above a shop].
{home} is my home. You should see [its market|it in winter|its narrow streets].
I was born in {home}, {epithet}, and I live there.
My home? It is in {home}, [a quiet town|not far from here].

Where did you say you come from?
Which town did you call your home?
What was the name of your town again?

Where does {who} come from?
Which town does {who} live in?
What is the home town of {who}?
Where is the home of {who}?
---
Name the town that {who} comes from.
In which town does {who} live?
Which town is the home of {who}?
job:
What is your work?
And what do you do all day?
What do you do for a living?
What work do you do?
And what do you do for your bread?

I am a {job}, [and my mother was one too|and I like it|though I am still learning].
I work as a {job}, [mostly in winter|six days a week|for an old master].
[Can you not tell by my hands?|Guess!] I am a {job}.
I work all day as a {job}, and I like it.
They call me a good {job}[, but I am still learning|].
My mother was a {job}, and I am one too.

What did you say your work was?
What is it you do for a living, again?
What work did you say you do?

What is the work of {who}?
What does {who} do for a living?
As what does {who} work?
What is {who} by trade?
---
Name the work of {who}.
What work does {who} do?
What is it that {who} does for a living?
pet:
Do you keep any animals?
Who waits for you at home?
Do you live alone?
Do you keep an animal at home?
Do any animals live with you?

I keep a {pet} called {petname}[, who eats everything|, who sleeps on my bed|].
I have a {pet} by the name of {petname}. [We are good friends|The two of us are never bored|The neighbours complain about the noise].
Only my {pet}, {petname}, [lives with me|who follows me everywhere].
I live with a {pet}. {petname} is its name, and it [eats everything|sleeps on my bed].
My {pet} is called {petname}, and the two of us are good friends.
Yes, a {pet}, and I call it {petname}. It follows me everywhere.

What was your {pet} called?
What did you say is the name of your {pet}?
How do you call your {pet}, again?

What is the {pet} of {who} called?
What is the name of the {pet} of {who}?
How is the {pet} of {who} called?
What does {who} call the {pet}?
---
Name the {pet} of {who}.
What name does the {pet} of {who} have?
How does {who} call the {pet}?
food:
What do you like to eat?
What is your favourite dish?
Are you hungry? What would you like?
What is the dish you like best?
What would you like to eat?

[Nothing is better than|I would walk a day for] {food}.
My favourite dish is {food}, [hot|the way my aunt makes it|on a cold day].
I like {food} best of all.
The dish I like best of all is {food}.
I would eat {food} all day[, hot or cold|].
For {food} I would walk [a day|to {home} and back].

What was your favourite dish, again?
Which dish did you say you like best?
What did you say you like to eat?

What is the favourite dish of {who}?
What does {who} like to eat?
Which dish does {who} like best?
What food does {who} like best of all?
---
Name the favourite dish of {who}.
What dish does {who} like best?
Which food is the favourite of {who}?
thing:
What have you got in that bag?
What are you carrying there?
What is that under your arm?
What have you got under your arm?
What is it that you are carrying?

This is a {obj}. [I found it at the market|It was a gift|I am taking it to be mended].
I am carrying a {obj} [for my aunt|to sell|and I hope it does not break].
Only a {obj}. [It is heavier than it looks|It is older than I am].
It is a {obj}, a gift for my [aunt|mother|old master].
I am taking a {obj} to the market to sell it.
A {obj}, and it is [heavier|older] than it looks.

What did you say is in your bag?
What was it that you carry, again?
What was it that you have got there, again?

What is {who} carrying?
What does {who} have in the bag?
Which thing does {who} carry?
{who} carries what?
What has {who} got there?
---
Name the thing that {who} is carrying.
What thing has {who} got in the bag?
What is it that {who} carries?
age:
How old are you, if I may ask?
May I ask your age?
How old are you?
If I may ask, what is your age?
May I ask how old you are?

I am {age}, [and I feel it in my knees|though nobody believes it|since last week].
I turned {age} [in spring|last month|not long ago].
{age}. [And I hope for many more years|I do not hide it].
I am {age} since [spring|last month], and I do not hide it.
Last month I turned {age}[, and my knees feel it|].
My age is {age}, though nobody believes it.

How old did you say you are?
What was your age, again?
How old are you, again?

How old is {who}?
What is the age of {who}?
Of what age is {who}?
How many years old is {who}?
---
Name the age of {who}.
What age is {who}?
How many years of age is {who}?
kin:
Is your family large?
Have you got brothers and sisters?
Do you come from a large family?
Have you got a large family?
Are there brothers and sisters in your family?

I have {kin} brothers and sisters[, and I am the youngest|, all of them loud|].
Large enough: I grew up with {kin} brothers and sisters.
Oh yes, there are {kin} brothers and sisters [at home|to feed|and only one bath].
Oh yes, I have {kin} [loud|] brothers and sisters.
I grew up [at home|in one bed] with {kin} brothers and sisters.
Brothers and sisters? There are {kin}, and I am the youngest.

How many brothers and sisters did you say you have?
How many were you at home, brothers and sisters I mean?
What was the number of your brothers and sisters, again?

How many brothers and sisters does {who} have?
What number of brothers and sisters does {who} have?
With how many brothers and sisters did {who} grow up?
{who} has how many brothers and sisters?
---
Name the number of brothers and sisters of {who}.
How many brothers and sisters did {who} grow up with?
How many brothers and sisters has {who} got?
""").items()
}
# What is stated on each topic, as it is repeated later; "a " isn't part of an answer.
SPOKEN = {
    "home": "{home}",
    "job": "a {job}",
    "pet": "{petname}",
    "food": "{food}",
    "thing": "a {obj}",
    "age": "{age}",
    "kin": "{kin}",
}
REACTIONS = read_bank("""
[How nice|Well, well|I see|Is that so|That is good to hear].
[I thought so|I would not have guessed that|That is good to know].
[Lucky you|That sounds fine to me|I can believe that].
Well, that is [nice|good] to hear.
I see. I would not have guessed that.
That [sounds good|is good to know].
Is that so? [Lucky you|I thought so].
""")
RETURNED_QUESTIONS = read_bank("""
And you?
What about you?
And what about yourself?
And yourself?
And how is that with you?
Now you. What would you say?
""")
REMINDERS = read_bank("""
[Forgive me|Excuse me], {b}, I forget things so easily. {again}
[One more thing|Before I go], {b}. {again}
{b}, I have been wondering. {again}
{b}, forgive me, I forget so many things. {again}
Before I forget it, {b}: {again}
""")
REPLIES = read_bank("""
{spoken}. [I told you so a moment ago|As I said].
{spoken}, [as I told you|just as I said].
{spoken}. [Now do not forget it again|You were not listening].
{spoken}. I said so a moment ago.
As I told you: {spoken}.
""")
THIRD_PERSON_QUESTIONS = read_bank("""
[Good evening|Hello], you two. {question}
I came in late, {b}. {question}
{b}, you know everybody here. {question}
Hello, {b}. You two know everybody. {question}
{b}, I came late and was not listening. {question}
""")
THIRD_PERSON_REPLIES = read_bank("""
{spoken}, [if I remember well|so I was told|I believe].
that is easy: {spoken}.
{spoken}. I heard it [just now|a moment ago].
I was told a moment ago: {spoken}.
{spoken}, if I believe what I heard.
""")
WORLD_QUESTIONS = read_bank("""
[Tell me something|Here is a question]. {question}
I [always|often] wonder about one thing. {question}
You have travelled more than I have. {question}
You know everything. {question}
[You have travelled|You know everything]. Tell me one thing. {question}
I have [a|one more] question. {question}
There is [something|one thing] that I always forget. {question}
""")
FAREWELLS = read_bank("""
{a}: [It is getting late|There is my cart|I must go]. Goodbye, {b}!|{b}: [Goodbye, {a}|Safe travels|Until we meet again]!
{b}: [Come and see me some time|Give my greetings to your family].|{a}: [I will|Gladly]. Goodbye, {b}.
{a}: Goodbye, then.|{b}: Goodbye, {a}, and [mind the step|dress warmly|good luck].
{b}: I must go, {a}. It is late.|{a}: Goodbye, {b}, and [give my greetings at home|good luck].
{a}: There is my [boat|cart]. Goodbye!|{b}: Goodbye, {a}. Come and see me again.
{b}: Until we meet again, {a}.|{a}: I will come and see you, {b}. [Good luck|Safe travels]!
""")
