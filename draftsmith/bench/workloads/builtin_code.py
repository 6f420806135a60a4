"""Built-in prompts of three kinds with structured answers: writing code, editing code, extraction to JSON.

Assembled by `builtin`. Written for this project. Invariant: each kind has six prompts, some of several turns;
the answers to the last two kinds repeat much of their questions, so drafters that copy do well on them.
"""

from __future__ import annotations

WRITING: tuple[tuple[str, ...], ...] = (
    (
        "Write a Python function `merge_intervals(intervals)` that takes a list of (start, end) pairs in any order and "
        "returns the smallest list of pairs that cover the same points, sorted. Add a docstring and three asserts.",
        "Now write it as a class that intervals can be added to one at a time, and that can always list the "
        "merged ones.",
    ),
    (
        "Write a command-line program in Python that counts the words of the text files named as arguments, prints the "
        "twenty most frequent ones with their counts, and has an option to leave out words of fewer than N letters.",
    ),
    (
        "Write a C function that reverses a singly linked list in place, with the struct it needs and a `main` "
        "that builds a list of five numbers, reverses it and prints it.",
    ),
    (
        "Write a SQL schema for a library that lends books: members, books, copies of books, and loans with due dates. "
        "Then write the query that lists all overdue loans with the member's name, the title and the days overdue.",
    ),
    (
        "Write a JavaScript function `debounce(callback, wait)` and explain in comments what happens when it is called "
        "several times in a row. Add a small example that logs the size of a window while it is being resized.",
    ),
    (
        "Write a Python class `Matrix` for small dense matrices of floats, with addition, multiplication, "
        "transposition and a readable `__repr__`. Errors of shape should say both shapes.",
        "Write unit tests for it with pytest. Cover the errors too.",
    ),
)

EDITING: tuple[tuple[str, ...], ...] = (
    (
        """Add type hints to this module and change nothing else. Answer with the whole module.

```python
import csv


def read_rows(path, delimiter=","):
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream, delimiter=delimiter))


def column(rows, name):
    return [row[name] for row in rows]


def total(rows, name):
    return sum(float(value) for value in column(rows, name))


def mean(rows, name):
    values = column(rows, name)
    if not values:
        return None
    return total(rows, name) / len(values)


def by_key(rows, key):
    groups = {}
    for row in rows:
        groups.setdefault(row[key], []).append(row)
    return groups
```""",
        "Now rename `by_key` to `group_by` and let it take several keys. Answer with the whole module again.",
    ),
    (
        '''This function has two mistakes. Find them, say what they are, and write the whole function again, corrected.

```python
def binary_search(items, wanted):
    """The index of `wanted` in the sorted list `items`, or -1."""
    low = 0
    high = len(items)
    while low <= high:
        middle = (low + high) // 2
        if items[middle] == wanted:
            return middle
        if items[middle] < wanted:
            low = middle
        else:
            high = middle - 1
    return -1
```''',
    ),
    (
        """Change this configuration: the service moves to port 9090, gets three replicas instead of one, and a
memory limit of 512Mi. Write the whole file.

```yaml
service:
  name: parcel-tracker
  image: registry.example/parcel-tracker:2.4.1
  port: 8080
  replicas: 1
  resources:
    cpu: 250m
    memory: 256Mi
  environment:
    LOG_LEVEL: info
    DATABASE_HOST: db.internal
    DATABASE_NAME: parcels
    CACHE_HOST: cache.internal
    CACHE_SECONDS: "300"
  health:
    path: /health
    port: 8080
    interval_seconds: 10
    timeout_seconds: 2
```""",
    ),
    (
        """Rewrite this class as a frozen dataclass with the same behaviour. Keep the methods as they are.

```python
class Booking:
    def __init__(self, guest, room, first_night, nights, price_per_night):
        if nights < 1:
            raise ValueError("a booking has at least one night")
        if price_per_night < 0:
            raise ValueError("a price is not negative")
        self.guest = guest
        self.room = room
        self.first_night = first_night
        self.nights = nights
        self.price_per_night = price_per_night

    def price(self):
        return self.nights * self.price_per_night

    def overlaps(self, other):
        if self.room != other.room:
            return False
        ends = self.first_night + self.nights
        other_ends = other.first_night + other.nights
        return self.first_night < other_ends and other.first_night < ends

    def describe(self):
        return f"{self.guest} in room {self.room} for {self.nights} nights, {self.price():.2f} in all"
```""",
    ),
    (
        """Translate this function to JavaScript. Keep the names and the comments.

```python
def format_table(rows, headers):
    # Each column is as wide as its widest cell.
    widths = [len(header) for header in headers]
    for row in rows:
        for index, cell in enumerate(row):
            widths[index] = max(widths[index], len(str(cell)))
    lines = []
    # The header, then a line of dashes, then the rows.
    lines.append("  ".join(header.ljust(width) for header, width in zip(headers, widths)))
    lines.append("  ".join("-" * width for width in widths))
    for row in rows:
        lines.append("  ".join(str(cell).ljust(width) for cell, width in zip(row, widths)))
    return "\\n".join(lines)
```""",
        "Let it align numbers to the right. Write the whole function again.",
    ),
    (
        """Add an endpoint `DELETE /notes/<id>` in the style of the others. Answer with the whole file.

```python
from flask import Flask, abort, jsonify, request

app = Flask(__name__)
notes = {}
next_id = 1


@app.get("/notes")
def list_notes():
    return jsonify(list(notes.values()))


@app.get("/notes/<int:note_id>")
def get_note(note_id):
    note = notes.get(note_id)
    if note is None:
        abort(404)
    return jsonify(note)


@app.post("/notes")
def add_note():
    global next_id
    body = request.get_json()
    if not body or "text" not in body:
        abort(400)
    note = {"id": next_id, "text": body["text"], "done": False}
    notes[next_id] = note
    next_id += 1
    return jsonify(note), 201
```""",
    ),
)

EXTRACTION: tuple[tuple[str, ...], ...] = (
    (
        """Extract every order from these messages as a JSON array of objects with the keys "customer", "item",
"quantity" and "delivery". Use null where something is not said.

Hello, this is Mrs Okafor from the school kitchen, we need 40 loaves of rye bread for Tuesday morning, please at
the back door. // Hi! Two birthday cakes (chocolate) for Saturday, I will fetch them myself. Pavel Novak // Good
morning, Café Linde here, the same as every week: 25 croissants, 10 baguettes, Monday 6 o'clock. // Do you also
bake without gluten? If so, one small loaf for Thursday. Regards, J. Marsh""",
    ),
    (
        """Turn this log into JSON, one object per line of the log, with the keys "time", "level", "component",
"message" and, where there is one, "duration_ms" as a number.

2031-03-04 08:15:02 INFO scheduler: job 118 started
2031-03-04 08:15:02 INFO loader: reading 3 files
2031-03-04 08:15:05 WARN loader: file b.csv has 2 empty lines
2031-03-04 08:15:09 INFO loader: done in 7120 ms
2031-03-04 08:15:09 INFO scheduler: job 118 waits for the database
2031-03-04 08:15:31 ERROR database: connection refused after 20000 ms
2031-03-04 08:15:31 INFO scheduler: job 118 will be tried again in 60 s
2031-03-04 08:16:31 INFO scheduler: job 118 started""",
        "Now give the same as CSV with a header line.",
    ),
    (
        """Read the announcement and fill in this JSON: {"title": "", "speaker": "", "affiliation": "", "date":
"", "start": "", "end": "", "place": "", "registration": "", "topics": []}

Next month's evening lecture is given by Dr Ines Carvalho of the Institute for Coastal Research: "What sandbanks
remember". On Thursday, the 12th of June, from half past six to eight, in the old reading room of the town
library, she will speak about how currents move sand, what drill cores tell about storms of past centuries, and
why some islands wander. Admission is free; please register by the 10th at the desk or at
lectures@library.example.""",
    ),
    (
        """List all persons and organisations of the text as JSON: {"persons": [{"name": "", "role": ""}],
"organisations": [{"name": "", "kind": ""}]}. Leave out nothing and add nothing.

The harbour of Vestby gets a new crane. Mayor Solveig Dahl signed the contract with the maker Hallberg Lifting on
Monday; the harbour master, Tor Eide, had asked for it since the old one failed in the winter of 2028. The
shipping company Nordline, which brings timber twice a week, pays a third of the price. Its manager Amina Yusuf
called the day "a relief for everyone who loads in the rain". The union of dock workers, represented by Piotr
Zielinski, wants training for its members before the crane starts. The Vestby Savings Bank gives the loan.""",
        "Which of these persons speak for which of these organisations? Answer as JSON pairs.",
    ),
    (
        """Convert the recipe to JSON with the keys "name", "serves", "ingredients" (each with "amount", "unit",
"name") and "steps" (each with "minutes", where given, and "text").

Lentil soup for four. Chop an onion, two carrots and a stick of celery and let them soften in 2 tablespoons of
olive oil for about 8 minutes. Add a clove of garlic, a teaspoon of cumin and half a teaspoon of paprika and stir
for one minute. Add 250 g of red lentils, a 400 g tin of tomatoes and 1 litre of stock. Simmer for 20 minutes,
until the lentils fall apart. Blend half of it, season with salt and the juice of half a lemon, and serve.""",
    ),
    (
        """Extract the measurements as a JSON array of objects with the keys "station", "quantity", "value",
"unit" and "time".

At seven in the morning the station on the ridge reported minus 4.5 degrees and wind of 62 km/h from the
north-west, while the valley station had plus 1.2 degrees and no wind. By noon the ridge was at minus 1 degree
with gusts of 80 km/h; the valley station measured 6.8 degrees and a humidity of 54 percent. At six in the evening
only the lake station answered: 3.1 degrees, 71 percent humidity, air pressure 1009 hectopascals.""",
    ),
)
