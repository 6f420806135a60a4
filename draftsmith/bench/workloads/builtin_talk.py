"""Built-in prompts of three kinds with short questions: chat, reasoning, math.

Assembled by `builtin`. Written for this project. Invariant: each kind has six prompts, some of several turns;
little of a question is to be copied into its answer, so these are the hard kinds for drafters that copy.
"""

from __future__ import annotations

CHAT: tuple[tuple[str, ...], ...] = (
    (
        "I moved into a flat with a narrow balcony that faces east. What could I grow there without much work?",
        "I am away for two weeks in July. Which of those would survive, and what should I do before I leave?",
        "Write that as a short note to the neighbour who will look after them.",
    ),
    (
        "My sister turns forty and says she wants nothing. Suggest five presents that are not objects.",
        "She lives three hours away by train. Which of the five still work, and how would you arrange the best one?",
    ),
    ("Explain to a ten-year-old why the sky is dark at night although there are so many stars.",),
    (
        "I have to give a toast at a colleague's farewell on Friday. She ran the workshop for eleven years and hates "
        "speeches. Write one that takes less than a minute.",
        "Good. Now make it a little funnier, and mention that she always lost her pencil.",
    ),
    (
        "Which is the better first instrument for an adult who has twenty minutes a day, the ukulele or the piano? "
        "Give reasons for both and then decide.",
    ),
    (
        "You are the keeper of a lighthouse on a small island, and I am a sailor who has just come ashore in a storm. "
        "Welcome me in.",
        "Thank you. Is there anything to eat? And what is that humming behind the wall?",
        "I would like to see it. Lead the way.",
    ),
)

REASONING: tuple[tuple[str, ...], ...] = (
    (
        "Four boxes stand in a row: red, blue, green, yellow, in an order you do not know. The blue box is "
        "directly left of the green one. The red box is not at either end. The yellow box is left of the red box."
        " In which order do they stand? Explain each step.",
    ),
    (
        "A ferry leaves only when it is full or when the captain has waited half an hour. Today it left after ten "
        "minutes. What can you conclude, and what not?",
        "A passenger says there were empty seats. Who must be wrong, or which assumption must be dropped?",
    ),
    (
        "Anna tells the truth on weekdays and lies at weekends. Ben lies on Mondays, Tuesdays and Wednesdays and "
        "tells the truth otherwise. Both say: yesterday I lied. Which day is it? Go through the days one by one.",
    ),
    (
        "Two water tanks have the same height. One is a cylinder, the other a cone standing on its tip, with the same "
        "opening at the top. Both are filled at the same rate. Describe how the water level rises in each, and which "
        "one is half as high as the tank first.",
    ),
    (
        "A bakery sold more bread on rainy days last year. The owner wants to advertise with the slogan 'Rain "
        "makes you hungry'. Name at least four other explanations of the figures, and say for each how one could "
        "test it.",
        "Only the daily sales and the weather are on record. Which of your tests can be done with that?",
    ),
    (
        "You have a balance with two pans and nine coins that look alike. One is lighter than the others. How do "
        "you find it in two weighings? Why are two enough, and why is one not?",
    ),
)

MATH: tuple[tuple[str, ...], ...] = (
    (
        "A rectangular garden is 18 m long and 12 m wide. A path of the same width runs around it on the outside, and "
        "garden and path together cover 400 square metres. How wide is the path? Show the equation and solve it.",
    ),
    (
        "A shop lowers a price by 20 percent and later raises the new price by 20 percent. By how many percent "
        "does the final price differ from the first one? Show the steps.",
        "By how many percent would it have to be raised to come back to the first price? Give the general formula for "
        "a reduction of p percent.",
    ),
    ("Find all integers n for which n^2 - 7n + 10 is negative. Explain how you found them.",),
    (
        "A bag holds 5 white and 3 black marbles. Two are drawn without looking, one after the other, and not put"
        " back. What is the probability that they have different colours? Do it once with a tree and once by "
        "counting pairs.",
    ),
    (
        "Two trains start at the same time from towns 270 km apart and run towards each other, one at 80 km/h, "
        "the other at 100 km/h. When and where do they meet?",
        "Now the slower one starts half an hour earlier. When and where do they meet then?",
    ),
    ("Prove that the sum of the first n odd numbers is n^2. Give a proof by induction and a picture in words.",),
)
