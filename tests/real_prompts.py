"""The 24 prompts of the tests with real weights: chats and completions, short and long, in several scripts, some that
share their beginning. And three texts, to ask a model how likely it finds them."""

from __future__ import annotations

from typing import Any

QUESTIONS = [
    "What is the capital of France?",
    "Explain gravity to a child.",
    "What is 12 + 7?",
    "Write a haiku about the sea.",
    "List three fruits that are red.",
    "Who wrote Romeo and Juliet?",
    "Translate 'good morning' into Spanish.",
    "Why is the sky blue?",
    "Write a Python function that adds two numbers.",
    "What do bees make?",
    "Name the planets of the solar system.",
    "Tell me a joke.",
]
UNICODE = ["¿Cuál es la capital de España?", "日本の首都はどこですか?", "Explain this: 🙂🎉 → ∑ x² ≠ ½, naïve Ångström"]
COMPLETIONS = ["Once upon a time, in a small village by the sea,", "def fibonacci(n):\n", "The three laws of motion are: 1."]
HANDBOOK = " ".join(
    f"Rule {n}: a {animal} in the {place} is fed {food} at {hour} o'clock, and its keeper writes down how much was left."
    for n, (animal, place, food, hour) in enumerate(
        (animal, place, food, hour)
        for hour, (animal, food) in enumerate(
            [("bear", "honey"), ("seal", "fish"), ("horse", "hay"), ("parrot", "seeds"), ("wolf", "meat")], 6
        )
        for place in ("north house", "south house")
    )
)  # the beginning that four prompts share
ASKED = ["What is the bear fed?", "When is the seal fed?", "What does a keeper write down?", "What is the parrot fed?"]
STREETS = [f"Stop {n} of the bus is {name} Street, {3 * n + 2} minutes from the station." for n, name in enumerate(
    f"{first} {second}" for first in ("Old", "New", "Long", "High", "Mill", "Church", "Park")
    for second in ("Elm", "Oak", "Ash", "Lime", "Rose", "Fern", "Moss", "Pine")
)]  # fmt: skip

TEXTS = {
    "a speech": (  # Lincoln at Gettysburg, 1863
        "Four score and seven years ago our fathers brought forth on this continent, a new nation, conceived in Liberty, and "
        "dedicated to the proposition that all men are created equal. Now we are engaged in a great civil war, testing "
        "whether that nation, or any nation so conceived and so dedicated, can long endure. We are met on a great "
        "battle-field of that war. We have come to dedicate a portion of that field, as a final resting place for those who "
        "here gave their lives that that nation might live. It is altogether fitting and proper that we should do this. But, "
        "in a larger sense, we can not dedicate, we can not consecrate, we can not hallow this ground. The brave men, living "
        "and dead, who struggled here, have consecrated it, far above our poor power to add or detract. The world will "
        "little note, nor long remember what we say here, but it can never forget what they did here."
    ),
    "a novel": (  # Jane Austen, Pride and Prejudice, 1813
        "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of a "
        "wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood, this "
        "truth is so well fixed in the minds of the surrounding families, that he is considered as the rightful property of "
        "some one or other of their daughters. \"My dear Mr. Bennet,\" said his lady to him one day, \"have you heard that "
        "Netherfield Park is let at last?\" Mr. Bennet replied that he had not. \"But it is,\" returned she; \"for Mrs. Long "
        "has just been here, and she told me all about it.\" Mr. Bennet made no answer. \"Do not you want to know who has "
        "taken it?\" cried his wife impatiently. \"You want to tell me, and I have no objection to hearing it.\""
    ),
    "an explanation": (  # written for this purpose, so that no model has learned it by heart
        "The tide table on the harbor wall gives two numbers for every day, and both of them move. Each high tide comes about "
        "fifty minutes later than the one of the day before, because the Moon has gone a little further around the Earth in "
        "the meantime, and the Earth needs those extra minutes to turn until the same harbor faces it again. The height "
        "changes more slowly. Twice a month, at new moon and at full moon, the Sun and the Moon pull along the same line, "
        "and the water rises and falls further than usual. In between, when the Moon is half lit, they pull at a right angle, "
        "and the difference between high and low water is small. A fisherman who has lived here for forty years does not "
        "look at the table. He looks at the stones below the lighthouse. If the third row is dry at noon, he says, there is "
        "time for coffee before the boat floats. His daughter once measured how far he was off, every morning for a whole "
        "summer, and wrote the minutes into a school notebook. The largest error was eleven minutes. The table, which "
        "knows nothing about wind, was wrong by more than twenty on the day after the storm in August."
    ),
}


def prompts(tokenizer: Any) -> dict[str, list[int]]:
    """Name -> token ids: 19 chats in the tokenizer's template, 3 completions, and 2 of about 1,500 tokens."""
    streets = " ".join(STREETS)
    chats = {f"chat {i}": text for i, text in enumerate(QUESTIONS)}
    chats |= {f"unicode {i}": text for i, text in enumerate(UNICODE)}
    chats |= {f"shared {i}": f"{HANDBOOK} {text}" for i, text in enumerate(ASKED)}
    chats["long chat"] = f"{streets} Which stop is {STREETS[3][10:40]}?"
    plain = {f"completion {i}": text for i, text in enumerate(COMPLETIONS)}
    plain["long completion"] = f"{streets} Stop 56 of the bus is"
    options = {"tokenize": False, "add_generation_prompt": True}
    texts = {
        name: tokenizer.apply_chat_template([{"role": "user", "content": text}], **options) for name, text in chats.items()
    }
    return {name: tokenizer.encode(text, add_special_tokens=False) for name, text in (texts | plain).items()}
