"""Names, objects, places, trades: the words that fill the templates."""

from pocket.sentences.templates import prose, words

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
