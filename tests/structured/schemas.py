"""JSON schemas of the kinds in public test sets (JSONSchemaBench's GitHub, Glaive, and Kubernetes), from a seed."""

from __future__ import annotations

import random
from typing import Any

WORDS = ["name", "age", "tags", "kind", "count", "place", "is_open", "unit", "items", "note"]
PATTERNS = ["^[a-z]{2,6}$", "^[A-Z][0-9]{3}$", "^(red|green|blue)$", r"^\d{2}-\d{2}$"]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "email"]


class Maker:
    """Makes schemas. The deeper one is, the more often it is a leaf."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.refs: list[str] = []

    def string(self) -> dict[str, Any]:
        kind = self.random.randrange(4)
        if kind == 0:
            return {"type": "string", "pattern": self.random.choice(PATTERNS)}
        if kind == 1:
            return {"type": "string", "format": self.random.choice(FORMATS)}
        least = self.random.randrange(3)
        return {"type": "string", "minLength": least, "maxLength": least + self.random.randrange(1, 6)}

    def number(self) -> dict[str, Any]:
        low = self.random.randrange(-50, 50)
        bound = {"minimum": low, "maximum": low + self.random.randrange(1, 2000)}
        if self.random.random() < 0.3:
            bound = {"exclusiveMinimum": low, "exclusiveMaximum": low + self.random.randrange(2, 200)}
        return {"type": self.random.choice(["integer", "number"]), **bound}

    def leaf(self) -> dict[str, Any]:
        makes = [
            self.string, self.number, self.string, self.number, lambda: {"type": "boolean"}, lambda: {"type": "null"},
            lambda: {"enum": self.random.sample(["a", "bc", 3, 4.5, None, True, "d e"], 3)},
            lambda: {"const": self.random.choice(["fixed", 7, None, [1, 2], {"a": 1}])},
            lambda: {"type": ["integer", "null"]},
        ]  # fmt: skip
        if self.refs:
            makes.append(lambda: {"$ref": f"#/$defs/{self.random.choice(self.refs)}"})
        return self.random.choice(makes)()

    def array(self, depth: int) -> dict[str, Any]:
        least = self.random.randrange(3)
        if self.random.random() < 0.2:
            return {"type": "array", "prefixItems": [self.leaf(), self.leaf()], "items": False, "minItems": 2}
        return {"type": "array", "items": self.schema(depth), "minItems": least, "maxItems": least + 2}

    def object(self, depth: int) -> dict[str, Any]:
        names = self.random.sample(WORDS, self.random.randrange(1, 4))
        required = [name for name in names if self.random.random() < 0.7]
        properties = {name: self.schema(depth) for name in names}
        return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}

    def schema(self, depth: int) -> dict[str, Any]:
        if depth == 0 or self.random.random() < 0.4:
            return self.leaf()
        kind = self.random.randrange(5)
        if kind == 0:
            return {"anyOf": [self.leaf(), self.object(depth - 1)]}
        return self.array(depth - 1) if kind == 1 else self.object(depth - 1)

    def whole(self) -> dict[str, Any]:
        """An object, or sometimes something else, with definitions."""
        defs = {"small": self.object(0), "word": self.string()}
        self.refs = [*defs]
        top = self.object(2) if self.random.random() < 0.8 else self.schema(2)
        return {"title": "An answer", "description": "made from a seed", **top, "$defs": defs}


def schemas(count: int) -> list[dict[str, Any]]:
    return [Maker(seed).whole() for seed in range(count)]
