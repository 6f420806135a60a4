"""What synthetic conversations are about: the words that stand for the braces of `training.openers`.

Used by `training.synthesis`. Invariant: as there, all of it was written for this project.
"""

from __future__ import annotations

SLOTS: dict[str, tuple[str, ...]] = {
    "topic": (
        "volcanoes", "the water cycle", "photosynthesis", "black holes", "the human heart", "vaccines", "antibiotics",
        "earthquakes", "the periodic table", "electric cars", "solar panels", "nuclear fusion", "gravity",
        "sound waves",
        "DNA", "evolution", "bees", "whales", "migratory birds", "coral reefs", "rain forests", "deserts", "glaciers",
        "the Roman Empire", "ancient Egypt", "the Silk Road", "the Industrial Revolution", "the French Revolution",
        "the Cold War", "the printing press", "the space race", "women's suffrage", "the Great Wall of China",
        "jazz", "classical music", "painting", "film", "theatre", "photography", "architecture", "poetry", "folk tales",
        "football", "chess", "marathon running", "swimming", "yoga", "mountain climbing", "cycling", "gardening",
        "cooking", "baking bread", "coffee", "tea", "cheese", "vegetarian food", "street food", "wine", "chocolate",
        "machine learning", "databases", "computer networks", "encryption", "operating systems", "video games",
        "smartphones", "robots", "social media", "the internet", "open source software", "cloud computing", "drones",
        "inflation", "the stock market", "taxes", "insurance", "starting a company", "marketing", "supply chains",
        "remote work", "job interviews", "time management", "teamwork", "leadership", "negotiation", "saving money",
        "marriage", "raising children", "friendship", "loneliness", "sleep", "stress", "meditation", "healthy eating",
        "first aid", "allergies", "diabetes", "back pain", "public transport", "city planning", "housing", "recycling",
        "climate change", "water pollution", "forest fires", "organic farming", "fishing", "elections", "democracy",
        "human rights", "immigration", "law courts", "contracts", "philosophy", "ethics", "religion", "mythology",
        "psychology", "memory", "language learning", "grammar", "statistics", "geometry", "algebra", "probability",
        "museums", "libraries", "schools", "universities", "travel in Japan", "life on a farm", "a lighthouse",
        "a lost dog", "an old clock", "a small village", "a spaceship", "a storm at sea", "a birthday party",
    ),
    "person": (
        "a child", "a beginner", "an old friend", "a customer", "a colleague", "my boss", "a teacher", "a student",
        "a doctor", "an engineer", "my landlord", "my parents", "a tourist", "a new employee", "a scientist",
    ),
    "role": (
        "a detective", "a pirate captain", "a medieval knight", "a famous chef", "a wise old wizard", "a travel guide",
        "a job interviewer", "a doctor", "a sports coach", "a poet", "a robot from the future", "a stand-up comedian",
        "a history professor", "a fitness trainer", "a ship's cook", "a news reporter", "a talking cat", "a judge",
        "an astronaut", "a gardener", "a career counsellor", "a bank clerk", "a museum guide", "a science teacher",
    ),
    "name": (
        "Anna", "Ben", "Chen", "Dora", "Emil", "Fatima", "George", "Hana", "Ivan", "Julia", "Karim", "Lena", "Marco",
        "Nina", "Omar", "Paula", "Quinn", "Rosa", "Sam", "Tara", "Umut", "Vera", "Wei", "Yusuf", "Zoe",
    ),
    "things": (
        "apples", "books", "marbles", "tickets", "coins", "pencils", "cookies", "chairs", "eggs", "flowers", "shirts",
        "stamps", "toy cars", "bottles", "stickers", "oranges", "balloons", "candles",
    ),
    "language": (
        "Python", "Python", "Python", "Python", "JavaScript", "JavaScript", "Java", "C", "C++", "Go", "Rust", "Ruby",
        "TypeScript", "C#", "PHP", "Swift", "Kotlin",
    ),
    "code_task": (
        "read a CSV file", "sort a dictionary by value", "reverse a string", "parse JSON", "connect to a database",
        "merge two sorted lists", "count words in a text", "remove duplicates from a list", "send an HTTP request",
        "handle exceptions", "write a unit test", "find the largest number in a list", "format a date", "copy a file",
        "check whether a string is a palindrome", "compute the average of a list", "build a linked list",
        "use a hash map", "run two tasks at the same time", "validate an email address", "draw a plot",
        "implement a stack", "walk through a directory", "convert a string to a number", "generate random numbers",
    ),
    "algorithm": (
        "binary search", "quicksort", "merge sort", "breadth-first search", "depth-first search",
        "Dijkstra's algorithm",
        "the sieve of Eratosthenes", "the Fibonacci sequence", "a binary search tree", "a queue with two stacks",
        "matrix multiplication", "the greatest common divisor", "bubble sort", "a prime number test", "a hash table",
    ),
    "tongue": (
        "French", "German", "Spanish", "Italian", "Portuguese", "Dutch", "Chinese", "Japanese", "Russian", "Latin",
        "Swedish", "Polish", "Arabic", "Korean",
    ),
    "tone": ("formal", "friendly", "humorous", "polite", "dramatic", "neutral", "enthusiastic", "poetic"),
    "few": ("two", "three", "four", "five", "six", "seven", "ten"),
}  # fmt: skip
