"""How synthetic conversations begin: kinds of request, openers of the user's turn, topics, system messages.

Used by `training.synthesis`. An opener is the beginning of what a user says; the target writes the rest. Words in
braces are filled in from `training.subjects`. Invariant: everything here was written for this project; nothing
comes from a data set or a benchmark.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of request. `weight`: how often, beside the others.

    `openers`: beginnings that the target writes on; `requests`: whole ones, sent as they are. `passages`: requests
    whose answer the user's turn then speaks of as {text}, pasted into it or given just before. `systems`: system
    messages that belong to the kind; the general ones are used where it has none.
    """

    name: str
    weight: float
    openers: tuple[str, ...] = ()
    requests: tuple[str, ...] = ()
    passages: tuple[str, ...] = ()
    systems: tuple[str, ...] = ()


_PASSAGES = (
    "Write a short newspaper article about {topic}.",
    "Write a report of three paragraphs about {topic}, with names, dates and numbers.",
    "Write an encyclopedia entry about {topic}.",
    "Write a business email about {topic}, with names and dates.",
    "Write a blog post about {topic}.",
    "Write a review of a product or place that has to do with {topic}.",
    "Write a dialogue between two people about {topic}.",
    "Describe the history of {topic} in about two hundred words.",
    "Tell a short story in which {topic} is important.",
    "Write the minutes of a meeting about {topic}.",
    "Explain the advantages and disadvantages of {topic} in detail.",
)

KINDS: tuple[Kind, ...] = (
    Kind(name="open", weight=2.0, openers=("",)),
    Kind(
        name="question",
        weight=1.6,
        openers=(
            "What is",
            "What are the main",
            "Who was the first",
            "When did",
            "Where can I find",
            "Which country",
            "How many",
            "How long does it take to",
            "Is it true that",
            "What is the difference between",
            "In {topic}, what",
            "I have a question about {topic}:",
            "Why is {topic}",
            "What happens when",
            "Can you tell me who",
            "What year did",
            "What causes",
        ),
    ),
    Kind(
        name="explain",
        weight=1.2,
        requests=(
            "Explain {topic} to {person}.",
            "How does {topic} work?",
            "Compare {topic} with {topic2}.",
            "What are the ethical questions around {topic}?",
        ),
        openers=(
            "Explain how",
            "Explain the concept of",
            "Can you explain why",
            "What role does {topic} play in",
            "Describe the relationship between {topic} and",
            "Give me an overview of {topic}, with",
            "I am studying {topic}. Please explain",
            "Discuss the causes and the effects of",
        ),
    ),
    Kind(
        name="writing",
        weight=1.4,
        requests=("Write a short story about {topic}.",),
        openers=(
            'Write a story that begins with the sentence "',
            "Write a poem about",
            "Write an essay about {topic} in which",
            "Write an email to {person} about",
            "Compose a letter to {person}, asking",
            "Draft a blog post about {topic} for",
            "Write a product description for",
            "Write a speech for {person} on",
            "Write a persuasive paragraph that argues",
            "Write the opening scene of a play set in",
            "Write a tweet about",
            "Write a cover letter for a job as",
            "Describe a character who",
            "Write instructions for",
            "Come up with an advertisement for",
            "Write a diary entry of {person} after",
        ),
    ),
    Kind(
        name="coding",
        weight=1.7,
        requests=(
            "How do I {code_task} in {language}?",
            "Show me how to {code_task} in {language}, with comments.",
            "Implement {algorithm} in {language}.",
            "What is the time complexity of {algorithm}?",
        ),
        openers=(
            "Write a {language} function that",
            "Write a {language} program that",
            "Write a {language} class for",
            "Write a SQL query that",
            "Explain what this {language} code does:\n\n```",
            "Fix the bug in this {language} code:\n\n```",
            "Write unit tests for a function that",
            "Given a list of numbers, write a {language} function to",
            "Write a regular expression that matches",
            "Write an HTML page with",
            "Write a bash script that",
            "Translate this {language} code to {language2}:\n\n```",
            "Add type hints and docstrings to this Python code:\n\n```python\n",
        ),
        systems=(
            "You are an experienced programmer. Answer with code first and a short explanation after it.",
            "You review code. Be precise and show corrected code.",
            "You are a helpful programming assistant.",
        ),
    ),
    Kind(
        name="maths",
        weight=1.6,
        requests=(
            "What is {number} percent of {number2}?",
            "What is {number} times {number2}?",
        ),
        openers=(
            "{name} has {number} {things}.",
            "{name} buys {number} {things} for {number2} dollars each.",
            "A train travels",
            "A shop sells {things} for {number} dollars. If",
            "Solve for x:",
            "Calculate the",
            "If a rectangle has a length of {number} and a width of",
            "{name} earns {number} dollars per hour and works",
            "Find the derivative of",
            "A recipe for {number} people needs",
            "The sum of two numbers is {number}.",
            "There are {number} students in a class.",
            "What is the probability that",
            "{name} and {name2} share {number} {things} so that",
            "A water tank holds {number2} liters. Every hour",
            "Prove that",
            "Simplify the expression",
        ),
        systems=("Solve the problem step by step and give the result in the last line.", "You are a maths teacher."),
    ),
    Kind(
        name="reasoning",
        weight=0.9,
        openers=(
            "{name} is taller than {name2}, and {name2} is taller than",
            "There are {number} boxes.",
            "If all {things} are",
            "Which word does not belong with the others:",
            "Think step by step:",
            "Here is a riddle:",
            "A farmer has",
            "What comes next in the sequence",
            'Decide whether the following sentence is positive or negative: "',
            "Classify each of these as",
            "Is the following argument valid?",
            "{name} says that {topic} is",
            "Rank these by size:",
            "Imagine that",
        ),
    ),
    Kind(
        name="translation",
        weight=1.3,
        openers=(
            'Translate the following sentence into {tongue}: "',
            "Translate to {tongue}:",
            "Translate this text from {tongue} to English:",
            'How do you say "',
            "Translate German to English: Die",
            "Translate German to English: Ich",
            "Übersetze ins Englische: Der",
            "Translate French to English: Le",
            "Translate Spanish to English: El",
            'What does the {tongue} word "',
            "Give me the {tongue} translation of this paragraph about {topic}, and explain",
        ),
        systems=("You are a translator. Answer with the translation only.", "You are a careful translator."),
    ),
    Kind(
        name="summary",
        weight=1.5,
        passages=_PASSAGES,
        requests=(
            "Summarize {text} in {few} sentences.",
            "Summarize {text}.",
            "Give me the key points of {text} as a list.",
            "What is the main idea of {text}?",
            "Write a headline and a one-sentence summary for {text}.",
            "Shorten {text} to half its length.",
            "Explain {text} to {person}.",
            "Give a TL;DR of {text}.",
        ),
    ),
    Kind(
        name="extraction",
        weight=1.2,
        passages=_PASSAGES,
        requests=(
            "Extract all names, dates and places from {text} and give them as JSON.",
            "List all numbers in {text} and say what each stands for.",
            "Make a table of the people in {text} and what they do.",
            "Which organizations are mentioned in {text}? Answer with a list.",
            "Find all adjectives in {text}.",
            "Extract the most important facts from {text} as bullet points.",
            "Give {text} three tags and a category, as JSON.",
            "Quote the most important sentence of {text} and say why.",
        ),
    ),
    Kind(
        name="rewriting",
        weight=1.2,
        passages=_PASSAGES,
        requests=(
            "Rewrite {text} in a {tone} tone.",
            "Correct the grammar and the spelling of {text}.",
            "Rewrite {text} in the past tense.",
            "Make {text} easier to read.",
            "Turn {text} into an email to {person}.",
            "Rewrite {text} as a list with headings.",
            "Rewrite {text} from another point of view.",
            "Translate {text} into {tongue}.",
            "Continue {text}.",
        ),
    ),
    Kind(
        name="reading",
        weight=1.5,
        passages=_PASSAGES,
        requests=("Write three questions about {text} and answer them.", "What is {text} about, and who wrote it?"),
        openers=(
            "Read {text} and answer the question. Question:",
            "Answer the question with the help of {text}. Question: What",
            "Answer with the help of {text} only: Who",
            "According to {text}, why",
            "According to {text}, how",
            "Question about {text}: When",
            "Is it said in {text} that",
            "Which of these statements fits {text}:",
        ),
        systems=("Answer from the given text only. If it does not say, say so.",),
    ),
    Kind(
        name="roleplay",
        weight=1.0,
        requests=("As {role}, give your opinion on {topic}.",),
        openers=(
            "You are {role}.",
            "Act as {role}.",
            "Pretend to be {role} and",
            "I want you to be {role}. Tell me",
            "Imagine you are {role}. How would you",
            "Let's play a game: you are {role}, and I am",
        ),
    ),
    Kind(
        name="ideas",
        weight=1.0,
        requests=(
            "What are some good books about {topic}?",
            "Create a quiz with {few} questions about {topic}.",
        ),
        openers=(
            "Give me {few} ideas for",
            "List {few} ways to",
            "Suggest {few} names for",
            "Suggest a plan for",
            "Create a weekly schedule for {person} who",
            "Plan a trip to",
            "Make a list of",
            "Give me a recipe for",
            "Write {few} slogans for",
            "Name {few} famous",
        ),
    ),
    Kind(
        name="advice",
        weight=0.9,
        openers=(
            "How can I",
            "I feel",
            "What should I do if",
            "My boss",
            "My neighbour",
            "I want to learn {topic}. Where",
            "I am {person}, and I would like to",
            "Please help me decide",
            "What is the best way to",
            "I have been trying to",
            "Should I",
            "Do you have tips for",
        ),
    ),
    Kind(
        name="talk",
        weight=0.6,
        requests=(
            "Tell me something interesting about {topic}.",
            "What do you think about {topic}?",
            "Let us talk about {topic}.",
        ),
        openers=(
            "Hi! I am {name}.",
            "Hello, can you",
            "Good morning! Today",
            "Tell me a joke about",
            "Do you know",
            "I just",
            "Thank you for",
        ),
    ),
)

FOLLOW_UPS = (
    *[""] * 6,
    "Can you",
    "Now",
    "Why",
    "What about",
    "Thanks! Could you",
    "Please rewrite your answer",
    "Give me an example of",
    "How",
    "Are you sure that",
    "Make it",
    "Explain the",
)

FOLLOW_UP_REQUESTS = (
    "Translate your answer into {tongue}.",
    "Summarize what you said in one sentence.",
    "Continue.",
    "Explain that to {person}.",
    "Rewrite your answer in a {tone} tone.",
    "Can you give me an example?",
)

SYSTEMS = (
    "You are a helpful assistant.",
    "Answer briefly.",
    "Answer in detail and give examples.",
    "You are an expert on {topic}.",
    "You are {role}.",
    "Answer as if you were talking to {person}.",
    "You are a friendly tutor who explains things step by step.",
    "Use a {tone} tone.",
    "Answer with a list whenever that is possible.",
    "You are a careful assistant: say so when you are not sure.",
    "Format answers in Markdown, with headings.",
    "You write clear and simple English.",
)
