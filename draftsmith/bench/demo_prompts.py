"""The prompts of the demo: twelve short tasks of five kinds that a small model does sensibly.

Read by the demo and by measurements of it. Written for this project. A small model follows an example
better than an instruction, so most tasks come with one solved before. Invariants: the first prompts are
one of each kind; `max_new_tokens` lets the answer end by itself.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class DemoPrompt:
    """One prompt of the demo. `example`: a task and its answer, put into the conversation before."""

    kind: str
    title: str
    task: str
    max_new_tokens: int
    example: tuple[str, str] | None = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """The conversation up to the task."""
        texts = [*(self.example or ()), self.task]
        return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]


_CODE, _JSON, _SUMMARY, _EXTRACT, _CHAT = "rewriting code", "filling JSON", "summarising", "extracting", "chatting"

_CAT_TO_DOG = (
    '''Write the same class for a dog.

```python
class Cat:
    """A cat with a name."""

    def __init__(self, name):
        self.name = name

    def speak(self):
        return f"The cat {self.name} says meow"
```''',
    '''```python
class Dog:
    """A dog with a name."""

    def __init__(self, name):
        self.name = name

    def speak(self):
        return f"The dog {self.name} says woof"
```''',
)

_BY_KIND: tuple[DemoPrompt, ...] = (
    DemoPrompt(
        kind=_CODE,
        title="a class for circles from one for squares",
        example=_CAT_TO_DOG,
        task='''Write the same class for a circle.

```python
class Square:
    """A square with a position and a size."""

    def __init__(self, x, y, size):
        self.x = x
        self.y = y
        self.size = size

    def move(self, dx, dy):
        """Move the shape."""
        self.x += dx
        self.y += dy

    def describe(self):
        return f"The square lies at {self.x}, {self.y} and has the size {self.size}"
```''',
        max_new_tokens=140,
    ),
    DemoPrompt(
        kind=_CODE,
        title="a class for trains from one for cars",
        example=_CAT_TO_DOG,
        task='''Write the same class for a train.

```python
class Car:
    """A car with a top speed in km/h."""

    def __init__(self, name, top_speed):
        self.name = name
        self.top_speed = top_speed

    def travel_time(self, distance):
        """Hours that the car needs for a distance in km."""
        return distance / self.top_speed

    def describe(self):
        return f"The car {self.name} drives at {self.top_speed} km/h"
```''',
        max_new_tokens=140,
    ),
    DemoPrompt(
        kind=_CODE,
        title="an SQL query for another table",
        example=(
            """Write the same query for suppliers.

```sql
SELECT customers.name, customers.city
FROM customers
WHERE customers.active = 1
ORDER BY customers.name;
```""",
            """```sql
SELECT suppliers.name, suppliers.city
FROM suppliers
WHERE suppliers.active = 1
ORDER BY suppliers.name;
```""",
        ),
        task="""Write the same query for teachers.

```sql
SELECT students.name, students.email, students.city, students.phone
FROM students
WHERE students.active = 1 AND students.country = 'Norway'
GROUP BY students.name, students.email, students.city
ORDER BY students.name
LIMIT 10;
```""",
        max_new_tokens=110,
    ),
    DemoPrompt(
        kind=_JSON,
        title="three people as records",
        example=(
            """Write these people as JSON.

Anna Keller lives in Berlin and works as an engineer.
Tom Baker lives in London and works as a teacher.
Jan Novak lives in Prague and works as a nurse.""",
            """[
  {"full_name": "Anna Keller", "place_of_residence": "Berlin", "occupation": "engineer", "is_customer": true},
  {"full_name": "Tom Baker", "place_of_residence": "London", "occupation": "teacher", "is_customer": true},
  {"full_name": "Jan Novak", "place_of_residence": "Prague", "occupation": "nurse", "is_customer": true}
]""",
        ),
        task="""Write these people as JSON.

Lucia Rossi lives in Rome and works as a doctor.
John Miller lives in Boston and works as a cook.
Maria Lopez lives in Madrid and works as a pilot.""",
        max_new_tokens=140,
    ),
    DemoPrompt(
        kind=_JSON,
        title="an order as a record",
        example=(
            "Order 17: Anna Keller buys 3 lamps for 40 USD each. Deliver to Berlin.",
            """{
  "order_number": 17,
  "customer_name": "Anna Keller",
  "delivery_city": "Berlin",
  "items": [
    {"product": "lamp", "quantity": 3, "unit_price": 40, "currency": "USD"}
  ],
  "status": "open",
  "payment_received": false
}""",
        ),
        task="Order 18: Tom Baker buys 6 chairs for 75 USD each. Deliver to London.",
        max_new_tokens=110,
    ),
    DemoPrompt(
        kind=_JSON,
        title="the sensors of another room",
        example=(
            "Make the list for the sensors K-01, K-02 and K-03 in the kitchen.",
            """[
  {"sensor_id": "K-01", "room": "kitchen", "type": "temperature", "unit": "celsius", "active": true},
  {"sensor_id": "K-02", "room": "kitchen", "type": "temperature", "unit": "celsius", "active": true},
  {"sensor_id": "K-03", "room": "kitchen", "type": "temperature", "unit": "celsius", "active": true}
]""",
        ),
        task="Make the list for the sensors B-01, B-02 and B-03 in the bedroom.",
        max_new_tokens=150,
    ),
    DemoPrompt(
        kind=_SUMMARY,
        title="a canal ring in one sentence",
        task=(
            "Summarise this text in one sentence: The Amsterdam canal ring was dug in the seventeenth century, when "
            "the city was growing quickly through trade. Engineers planned three main canals in half circles around "
            "the old town, and the land between them was sold in plots to rich merchants. The canals carried goods to "
            "the doors of warehouses, drained the wet ground and protected the city."
        ),
        max_new_tokens=80,
    ),
    DemoPrompt(
        kind=_SUMMARY,
        title="a text about bees",
        task=(
            "Write a summary of this text.\n\n"
            "Bees live in large families. In spring and summer they fly from flower to flower and collect nectar, "
            "which they turn into honey. While they do this, they carry pollen from one plant to another, and without "
            "it many fruits and vegetables would not grow. In winter the bees stay in the hive, keep each other warm "
            "and eat the honey that they have stored."
        ),
        max_new_tokens=100,
    ),
    DemoPrompt(
        kind=_EXTRACT,
        title="the contact in an email",
        example=(
            "From: Maria Lopez\nSubject: New address\n"
            "Hello, we moved to 27 Mill Lane, Bristol. Our phone number is now 0117 496 0123. Maria",
            "Name: Maria Lopez\nAddress: 27 Mill Lane, Bristol\nPhone: 0117 496 0123",
        ),
        task=(
            "From: Peter Schmidt\nSubject: Our new office\n"
            "Dear all, from Monday on you find us at 8 Garden Street, Leeds. The phone number of the new office is "
            "0113 496 0456. Regards, Peter"
        ),
        max_new_tokens=50,
    ),
    DemoPrompt(
        kind=_EXTRACT,
        title="the email addresses in a text",
        example=(
            "Text: Send the invoice to accounting@example.com and a copy to anna.keller@example.com.\n\n"
            "List the email addresses.",
            "- accounting@example.com\n- anna.keller@example.com",
        ),
        task=(
            "Text: Questions about delivery go to logistics@example.com. Complaints go to tom.baker@example.com.\n\n"
            "List the email addresses."
        ),
        max_new_tokens=50,
    ),
    DemoPrompt(
        kind=_CHAT,
        title="viruses and bacteria",
        task="What is the difference between a virus and a bacterium? Answer in a few sentences.",
        max_new_tokens=80,
    ),
    DemoPrompt(
        kind=_CHAT,
        title="what a library is",
        task="Explain in a few sentences what a library is.",
        max_new_tokens=80,
    ),
)


def _in_turn(prompts: tuple[DemoPrompt, ...]) -> tuple[DemoPrompt, ...]:
    """One of each kind, then the second of each kind, and so on."""
    places = [sum(other.kind == item.kind for other in prompts[:index]) for index, item in enumerate(prompts)]
    return tuple(item for _, item in sorted(zip(places, prompts, strict=True), key=lambda pair: pair[0]))


DEMO_PROMPTS = _in_turn(_BY_KIND)
FREE_KIND = _CHAT
"""Of answers in which nothing repeats."""
