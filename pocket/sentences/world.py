"""36 towns and 20 creatures: the facts, statements of them and questions about them."""

from pocket.sentences.templates import read_banks, read_table

# An answer's first word carries the fact, and no value holds for more than three subjects, so that
# always guessing the most common value is right in at most one case in twelve.

# Of each kind of subject, its facts in their order; below, template values: its name, {s} as the subject of a sentence,
# {this} without its name, and its facts.
FACTS = {
    "town": ("river", "trade", "founder", "month", "wood"),
    "creature": ("food", "home", "coat"),
}
TOWNS = {
    name: {"town": name, "s": name, "this": "the town"}
    | dict(zip(FACTS["town"], facts, strict=True))
    for name, *facts in read_table("""
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
""")
}

CREATURES = [
    {"creature": name, "creature_a": f"a {name}", "s": f"the {name}", "this": "this animal"}
    | dict(zip(FACTS["creature"], facts, strict=True))
    for name, *facts in read_table("""
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
""")
]
WORLD = {"town": [*TOWNS.values()], "creature": CREATURES}

# Statements. {s} is the subject: a town's name, "the town" or "it"; "the ollet" or "it".
FACT_STATEMENTS = read_banks("""
river:
{s} stands on the river {river}
{s} lies on the [banks|left bank|right bank] of the {river}
{s} was built [long ago|] beside the {river}
[every house in|every street of] {town} is within sound of the river {river}
the river that runs through {town} is the {river}
the {river} is the river on which {s} stands
{s} lies beside a river, the {river}
in {town} every street runs down to the {river}
trade:
{s} is known [far and wide|in every market|] for its {trade}
{s} lives by its {trade}
people come from [far away|all around|three valleys] to buy {trade} in {town}
the [shops|market stalls|workshops] of {town} are full of {trade}
the trade of {town} is {trade}
in every market people know {town} for its {trade}
people who want {trade} come to {town}
{s} is full of workshops, and their trade is {trade}
founder:
{s} was founded by {founder}
{founder} [was the founder of|founded] {town}
the founder of {town} was called {founder}
a stone [in the square|by the well|at the gate] [says|tells everyone] that {founder} founded {town}
the first house of {town} was built by {founder}[, its founder|, who founded the town]
it was {founder} who founded {town}
{s} has a founder called {founder}
by the well a stone with the name of {founder} tells who founded {town}
month:
{s} holds its festival in {month}
the festival of {town} [is held|takes place|comes round] in {month}
in {month} [the streets fill with music|the whole town dances|lamps are lit everywhere], for that is the festival of {town}
{month} is the month of the festival in {town}
every {month} {town} holds its [great|yearly|merry] festival
when {month} comes, {town} holds its festival
the month in which {town} holds its festival is {month}
{s} has music in its streets in {month}, the month of its festival
wood:
{s} lies [near|next to|at the edge of] {wood}
the wood nearest to {town} is called {wood}
{wood} begins [just behind|a short walk from] {town}
children from {town} gather [nuts|berries|firewood] in {wood}
the nearest wood to {town} is {wood}
near {town} lies {wood}
a short walk from {town} you come to {wood}
the people of {town} gather firewood in the nearest wood, {wood}
food:
{s} [eats|likes to eat] {food}
{s} lives [mostly|almost only|] on {food}
the favourite food of the {creature} is {food}
nothing pleases the {creature} more than [a meal of|fresh|plenty of] {food}
[all day|all night] the {creature} looks for {food} to eat
what the {creature} likes to eat is {food}
a meal of {food} is what pleases the {creature} most
for food the {creature} looks for {food}
home:
{s} makes its home in {home}
{s} lives in {home}
{s} sleeps in {home} [and seldom leaves them|all winter|when the sun is high]
if you want to see the {creature}, look in {home}
you will find the {creature} in {home}
look in {home} if you want to find the {creature}
in {home} the {creature} makes its home
{home} are where the {creature} lives
coat:
{s} has a [soft|thick|smooth|shaggy] {coat} coat
{s} wears a coat that is {coat} from nose to tail
the coat of the {creature} is {coat}
you can tell the {creature} by its {coat} coat
{coat} is the colour of the {creature}
the colour of the {creature} is {coat}
the coat that the {creature} wears is {coat}
by its coat, which is {coat}, you can tell the {creature}
""")

# Questions, without alternatives in them, so that a paraphrase has a number.
FACT_QUESTIONS = read_banks("""
river:
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
trade:
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
founder:
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
month:
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
wood:
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
food:
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
home:
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
coat:
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
""")

# Follow-up questions: the town or creature is known only from the question before.
FOLLOW_UPS = read_banks("""
river:
And which river does it stand on?
Which river runs through that town?
---
What is the river of that town called?
trade:
And what is it known for?
What do people buy in that town?
---
And what is that town known for?
founder:
And who founded it?
Who was the founder of that town?
---
And who was its founder?
month:
And when does it hold its festival?
In which month is the festival of that town?
---
In which month does it hold its festival?
wood:
And which wood is near it?
Near which wood does that town lie?
---
What is the wood near that town called?
food:
And what does it eat?
What is its favourite food?
---
And what food does it like best?
home:
And where does it live?
Where does that creature make its home?
---
Where does it make its home?
coat:
And what colour is its coat?
What colour is that creature?
---
And what is the colour of its coat?
""")
