"""The 24 prompts of the tests with real weights: chats and completions, short and long, in several scripts, some that
share their beginning."""

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
