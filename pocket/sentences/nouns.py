"""Names, objects, places, trades: the words that fill the templates."""

from pocket.sentences.templates import read_bank, read_table, read_words

# By the field of a template that they fill, mostly.
WORDS = read_words("""
start: Mir|Tob|Osk|Vel|Ar|Bren|Cal|Dor|El|Fen|Gar|Hal|Il|Jor|Kel|Lor|Mel|Nor|Or|Per|Quen|Ros|Sel|Tam|Ul|Var|Wen|Yor
Zan|Bel|Dav|Sid|Eth|Lin
woman: elda|ina|ith|ane|ola|essa|enna|iva|anth|ira|eline|osha
man: rin|ick|o|den|win|ard|mund|us|ek|oth|bert|av
paint: blue|red|green|yellow|white|black|grey|painted
number: three|four|five|six|seven|eight|nine|ten|eleven|twelve|thirteen|fourteen|fifteen|sixteen|seventeen|eighteen
nineteen|twenty
rel: cousin|neighbour|friend
job: baker|boat builder|weaver|beekeeper|potter|clockmaker|shepherd|teacher|miller|glass blower|gardener
ferry pilot|bookbinder|cooper|carpenter|map maker
goods: pears|apples|plums|eggs|loaves|buns|nails|coins|onions|lemons|figs|candles|feathers|chestnuts|tarts|radishes
cargo: sacks of flour|jars of honey|bales of wool|barrels of cider|bundles of reeds|baskets of fish
crates of cherries|bags of salt|planks of oak|rolls of cloth
spot: under the third stair|behind the flour bin|inside the hollow apple tree|beneath the stone bench
on top of the old dresser|under the loose floorboard|behind the chimney|inside the dry well
between two beams of the barn|under a heap of straw|behind the beehives|in the empty dovecote
beneath the kitchen window|in the bottom drawer|behind the row of books|under the upturned boat
inside the broken clock|at the back of the stable
word: heron|thistle|ember|juniper|harvest|swallow|pepper|thunder|marigold|anvil|cinnamon|otter|feather|moonrise
walnut|copperleaf|raven|bramble
colour: green|yellow|blue|red|white|black|orange|purple|striped|silver|brown|pink
landmark: old bridge|stone lion|broken mill|weather tower|twin oaks|salt pans|ferry steps|white fountain|ropewalk
toll house|bell tower|fish market|horse trough|sundial
hour: six o'clock|seven o'clock|eight o'clock|nine o'clock|noon|two o'clock|three o'clock|four o'clock|sunset|dusk
errand: a recipe for plum cake|seeds for the garden|an old song|news of the harvest|a cure for a cough
the loan of a mule|help with the roof|a map of the marshes|yeast for the bread|a place in the choir
a new string for the harp|the price of wool
pet: goose|goat|cat|dog|hen|pony|donkey|rabbit|duck|tortoise|lamb|crow
petname: Pip|Nettle|Biscuit|Button|Clover|Dumpling|Figgy|Pepper|Turnip|Sooty|Muffin|Patch|Pickle|Rusty|Bean|Tansy
Wisp|Cobble|Mustard|Pebble
food: barley soup|plum dumplings|baked trout|onion pie|pea porridge|roast chestnuts|apple cake|goat cheese
mushroom stew|honey bread|pickled beets|lemon tart|fried eel|bean soup|nut bread|cabbage rolls
minutes: ten|fifteen|twenty|thirty|forty|fifty
wood: oak|ash|elm|cedar|pine|walnut|birch|maple
metal: brass|copper|tin|iron|silver|bronze
parts: pipes|wheels|posts|hooks|levers|rings|springs|plates
cord: waxed string|horsehair|flax rope|leather straps|fishing line|twisted wire
vessel: copper pan|clay bowl|glass globe|tin bucket|stone weight|wooden ball|leather bag|iron cup
seal: pine tar|beeswax|wet clay|fish glue|soft lead|linseed paste
power: falling water|the north wind|a slow weight|a turning crank|the evening tide|a patient mule|rising steam
signal: rings a small bell|lifts a red flag|drops a pebble into a dish|plays three notes|lights a lamp|beats a drum
opens a little door
device: water clock|tide bell|wind harp|signal lamp|fog horn|shadow dial|weather tower|singing gate|sand clock
flag machine
purpose: to wake the bakers before dawn|to warn the ferry of fog|to open the market on time
to call the shepherds home|to tell when the tide turns|to announce the mail cart|to keep watch over the harbour
to mark the hours of school
danger: frost|rust|mice|strong wind|damp|curious children|woodworm|lightning
veg: leeks|carrots|turnips|onions|parsnips|beets|cabbages|mushrooms
grain: lentils|oats|red beans|split peas|chickpeas|white beans|rye grains|dried plums
fat: butter|goose fat|walnut oil|bacon|cream
pot: deep iron pot|clay pot|wide copper pan|stone dish|black kettle
liquid: cider|milk|spring water|fish broth|dark beer|chicken broth
herb: thyme|sage|parsley|dill|wild garlic|mustard seed|fennel
secret: a spoon of honey|a pinch of smoked salt|the peel of a lemon|a slow fire|a rusty nail in the pot
never lifting the lid|a handful of raisins
side: black bread|pickled onions|baked apples|soft cheese|a mug of cider|toasted nuts
rest: under a cloth|by the window|beside the fire|in the cellar|in a box of hay
dish: winter soup|harvest stew|wedding pie|fishing porridge|festival broth|midnight stew|miller's pudding
inn: Blue Heron|Old Anchor|Three Geese|Sleepy Fox|Silver Oar|Merry Miller|Golden Pear|Patient Snail
road: canal path|old salt road|river path|ridge road|sheep track|king's road
gate: north|south|east|west
hazard: the fog|quicksand|geese that bite|falling stones|thieves|the spring flood|wild bees
view: a row of tall poplars|two round towers|the smoke of its bakeries|a white windmill|a roof of green tiles
an old wall with flags
meals: pears|apples|plums|eggs|loaves|buns|onions|lemons|figs|tarts
side_way: left|right
""")
# Adjectives that fit, then nouns of train, valid and test: nothing is ever a glass drum.
OBJECT_NOUNS = read_table("""
brass copper silver tin iron | lantern kettle bell whistle compass key spoon thimble teapot ladle hook buckle anchor hammer | trumpet goblet needle lock | candlestick bracelet dagger saucepan
oak willow pine walnut cedar | box flute ladder chest stool oar bowl tray cradle spade bucket chair rake spindle | paddle cupboard fiddle crate | barrow plank xylophone wheelbarrow
wool linen velvet silk cotton | scarf cloak blanket hat shawl banner bag ribbon apron curtain cap belt tent cushion | glove jacket pillow tapestry | mitten bonnet napkin hammock
clay glass stone china | jar jug vase cup plate bottle bead pot dish marble inkwell mug basin tile | pitcher statue flask funnel | saucer figurine pipe tablet
""")

TIMES = read_bank("""
on a [grey|bright|windy|cold|misty|quiet] [morning|afternoon|evening] in {any_month}
[early|late] one [morning|evening] in {any_month}
on the [first|second|third|last] day of {any_month}
one [rainy|sunny|cold] [morning|afternoon]
one [grey|windy|misty] day in {any_month}
on a [sunny|rainy] evening late in {any_month}
""")
EPITHETS = read_bank("""
which stands on the river {river}
known for its {trade}
the town that {founder} founded
near {wood}
where the festival is held in {month}
the town on the {river}
where people buy {trade}
founded by {founder}
""")
