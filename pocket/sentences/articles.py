"""Articles on towns and creatures."""

from pocket.sentences.templates import read_bank, read_banks

COLOURFUL_DETAILS = read_banks("""
town:
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
creature:
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
VISITS = read_bank("""
{a}, a {job}, once came there with a {obj} and [wanted|hoped] to sell it for {n2} coins.|{a} left with {n3} coins and without the {obj}.|How many coins did {a} get?|{n3}
the {job} {a} spent {n2} days there and lost a {obj} on the way home.|the {obj} of {a} was never found.|What did {a} lose?|{obj}
a {job} called {a} wrote it all down in {n2} books.|all {n2} books of {a} are still kept under glass.|How many books did {a} write?|{n2}
{a} went there to look for a {obj} and stayed for {n2} years.|to this day, {a} has not found the {obj}.|What did {a} look for?|{obj}
---
a {job} called {a} came there to sell a {obj} and stayed for {n2} days.|after {n2} days {a} still had the {obj}.|What did {a} want to sell?|{obj}
once {a}, a {job}, lost {n2} coins there.|the {n2} coins of {a} were never found.|How many coins had {a} lost?|{n2}
""")
COMPARISONS = read_banks("""
town:
things are different in {other}, a town that [is often compared with {town}|lies some days away]. {fact}
visitors often go on to {other}. {fact}
from there [many|most] visitors go on to {other}. {fact}
some days away lies {other}, where things are different. {fact}
creature:
it should not be confused with the {other}. {fact}
some people take it for the {other}, which is [quite|very] different. {fact}
people often take it for the {other}, but the two are different. {fact}
""")
