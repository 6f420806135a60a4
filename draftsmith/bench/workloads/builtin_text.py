"""Built-in prompts of two kinds that carry a text: summarising and translation.

Assembled by `builtin`. Written for this project. Invariant: each kind has six prompts, some of several turns;
the passages are prose of 80 to 250 words about things made up for them.
"""

from __future__ import annotations

SUMMARISING: tuple[tuple[str, ...], ...] = (
    (
        """Summarise the report in three sentences.

The town of Marlow Bridge closed its main street to cars for one summer. Before the trial, shop owners feared for
their trade, and four of them collected signatures against it. The council promised to count visitors, to ask
residents, and to end the trial early if sales fell by more than a tenth. In June, with much rain, sales were
indeed seven percent below those of the year before. In July and August they were twelve and fifteen percent
above. The counters at both ends of the street registered a third more people on foot than in the summers before,
and they stayed longer: the average visit grew from twenty-five to forty minutes. Not everybody was content.
Deliveries had to be finished by ten in the morning, which the furniture shop found impossible; residents of two
side streets complained about cars looking for parking; and the bus needed four minutes more for its detour. Of
the residents who answered the survey, 61 percent want the street to stay closed in summers, 22 percent want it
closed all year, and 17 percent want the cars back. The council will decide in November. It has already ordered a
study of parking in the side streets and has asked the bus company for a shorter detour.""",
        "Now write it as five bullet points for someone who only cares about the shops.",
    ),
    (
        """Write a heading of at most eight words and a summary of two sentences.

When the beekeeper's hives on the roof of the concert hall died in the third winter, she did not buy new ones.
She opened the boxes, photographed every frame and sent samples of wax to a laboratory. The answer surprised her:
it was neither mites nor cold, but damp. The ventilators of the hall blew warm, wet air across the roof on
evenings with concerts, and in frost the water settled inside the boxes. The hall's engineer, who had never
thought of the bees as neighbours, had a sheet of metal bent and screwed it in front of the outlet. It cost less
than a ticket for the front row. The following spring she set up two hives again, one behind the sheet and one
without its protection, and weighed both each week. After the first winter the protected one was alive and heavy,
the other one alive but light, with mould on the outer frames. She moved it behind the sheet as well. The honey is
now sold in the interval, in small glasses, with the programme of the season as a label.""",
    ),
    (
        """Summarise the meeting as a list of decisions, each with who does what by when.

Ruth opened at nine and said the heating was the first topic. Omar had three offers; the cheapest is from Keller,
but they can only come in October. After some discussion all agreed to take Keller if they promise the first week
of October in writing. Omar will ask for that by Friday. The second topic was the leaking window in the hall. Lena
had looked at it: the frame is sound, the seal is not. She can do it herself if someone buys the material; Ruth
will, this week. Then the summer party. Jonas proposed the 19th of July, Lena the 26th, because of the holidays;
the 26th it is. Jonas books the band, Omar asks the neighbours for tables. Nobody wanted to cook, so Ruth will get
prices from two caterers until the next meeting. The treasurer's report was postponed, since Mira was ill. The
next meeting is on the 2nd of May at nine.""",
        "Write the short e-mail that Ruth sends to everyone after the meeting.",
    ),
    (
        """Explain the main argument of the text in one paragraph, and then its weakest point in one sentence.

Maps for hikers have become worse, and it is not for lack of data. Every bend of every path is known to the
metre; satellites see to that. What is missing is judgement. The old map of our valley, drawn by a man who walked
it for thirty years, shows a path as a thick line where a child can go and as dots where one should think twice.
It leaves out a shortcut that everybody knows, because after rain it is a slide. The new map shows the shortcut in
the same brown as everything else. One may say that the hiker should judge for himself. But he cannot judge what
he cannot see, and what he sees on a screen of the size of a hand is a line. A map is not a copy of the land; it
is advice, given by somebody who has been there. When nobody has been there, there is no advice, however sharp the
picture is.""",
    ),
    (
        """Summarise each paragraph in one sentence.

The pump house at the old canal was built to lift water eleven metres to the upper basin. For sixty years a steam engine
did it, burning four tonnes of coal on a busy day; a second engine stood beside it, cleaned and oiled every week, and
was used on nine days in all.

Electric pumps replaced both in a single night, because the canal could not be closed for longer. The crew had
practised with wooden models of the parts. At four in the morning the water stood too low by a hand's width, and
two barges had to wait until noon; nothing else went wrong.

Today the canal carries only pleasure boats, and the pumps run for an hour in the evening. The house is a museum.
On the first Sunday of each month the second engine, which has hardly worked in its life, is put under steam for
the visitors and lifts water that then runs back through a pipe.""",
    ),
    (
        """A customer wrote this letter. Summarise the complaint, what the customer wants, and what is unclear, in
that order.

I ordered the folding table on the 3rd and was told it would come within a week. On the 12th a parcel arrived
with the legs, but not the top. I called and a friendly man said that the top was on its way and that I should
keep the legs. On the 15th came a second parcel: legs again. I now own eight legs. I called again, and this time
nobody knew about the first call. The lady wanted me to send everything back at my own cost and to order anew,
which I refused. I do still want the table, my daughter's party is on the 28th and we are fourteen. If the top
cannot be here by the 26th, I want my money back and I want somebody to fetch the legs. Also, the invoice says
walnut; I am quite sure I chose oak, but I threw the confirmation away.""",
    ),
)

TRANSLATION: tuple[tuple[str, ...], ...] = (
    (
        """Translate into German.

The night train to the coast was late, as always in autumn, and the station café had closed at ten. Three people
waited on the platform: a soldier with a violin case, an old woman who counted her coins, and a boy who should
have been in bed. Nobody spoke until the loudspeaker announced another forty minutes. Then the woman said that she
had a bag full of apples, that it was too heavy for her anyway, and that whoever could play something was welcome
to two.""",
    ),
    (
        """Translate into French.

To replace the filter, first switch the machine off and wait until the green light has gone out. Open the flap at
the back by pressing both clips at the same time. Pull the old filter out by its handle; a little water may drip,
so keep a cloth ready. Push the new filter in until it clicks. Close the flap, switch the machine on and press the
button for three seconds. The light blinks while the filter is being rinsed. Do not drink the first litre of
water.""",
        "Now translate your French text back into English, as literally as you can.",
    ),
    (
        """Translate into Spanish. Keep the numbering.

1. The kitchen is open to all tenants from six in the morning until eleven at night.
2. Whoever uses the oven cleans it on the same day.
3. Food in the refrigerator bears a name and a date; what bears neither is thrown away on Sundays.
4. Bicycles belong in the yard, not in the stairwell.
5. Guests who stay longer than a week are to be announced to the house management.
6. After ten in the evening music is played only with headphones.""",
    ),
    (
        """Translate into English.

Am Rand des Dorfes steht eine Werkstatt, in der seit vier Generationen Glocken gegossen werden. Der Meister
mischt Kupfer und Zinn nach einem Rezept, das nirgends aufgeschrieben ist. Zwei Tage lang kühlt die Form in der
Erde, und in dieser Zeit darf niemand laut sprechen, sagt er, obwohl er weiß, dass es der Bronze gleichgültig ist.
Erst wenn die Glocke frei hängt und zum ersten Mal angeschlagen wird, entscheidet sich, ob die Arbeit eines halben
Jahres gelungen ist.""",
    ),
    (
        """Translate into English.

La bibliothécaire du quartier a eu une idée simple : chaque lecteur qui rend un livre peut y glisser un mot pour
le suivant. Au début, on trouvait surtout des remarques prudentes, « très beau » ou « un peu long ». Puis les
messages sont devenus de vraies lettres. Un retraité a raconté son premier voyage, une élève a dessiné la fin
qu'elle aurait préférée. Aujourd'hui, certains empruntent des livres qu'ils ont déjà lus, seulement pour savoir ce
que les autres en ont pensé.""",
        "Translate the same text into Italian.",
    ),
    (
        """Translate into Portuguese and into Dutch, one after the other.

Our guide asked us not to touch the walls of the cave. The warmth of a single hand, she said, changes the
moisture of the stone for hours. So we stood close together on the wooden bridge, held our lamps low, and looked
at the horses that somebody had drawn there with charcoal, in the dark, long before there were words for it that
we would understand.""",
    ),
)
