"""The keywords of a JSON schema: one that is misspelled would be ignored, and the answer wrong (chapter 21)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from decimal import Decimal
from math import lcm
from urllib.parse import unquote

from ..checkpoint import JsonObject
from ..errors import require

HOLDS_SCHEMAS = {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}  # name -> schema
IS_SCHEMA = {
    "items", "additionalItems", "additionalProperties", "contains", "propertyNames", "not", "if", "then", "else",
    "unevaluatedItems", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "prefixItems",
}  # fmt: skip
LIMITS = {
    "type", "enum", "const", "$ref", "required", "format", "pattern", "minLength", "maxLength", "minimum", "maximum",
    "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "minItems", "maxItems", "uniqueItems", "minProperties",
    "maxProperties", "minContains", "maxContains", "dependentRequired", "dependencies",
}  # fmt: skip
SAYS_NOTHING = {  # about the answer
    "$schema", "$id", "id", "$anchor", "$comment", "title", "description", "default", "example", "examples",
    "deprecated", "readOnly", "writeOnly", "contentEncoding", "contentMediaType", "discriminator", "externalDocs",
}  # fmt: skip
KNOWN = HOLDS_SCHEMAS | IS_SCHEMA | LIMITS | SAYS_NOTHING


BOUNDS = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")
MOST_EXACT = 2**53  # the library reads bounds as float64
MOST_PROPERTIES = 1000  # of a whole schema
MOST_MERGED = 1_000_000  # characters of all allOf entries, each with the schema that it names
MOST_MULTIPLE = 10_000  # a multipleOf needs as many states
MIXED = {"anyOf", "oneOf", "$ref", "if", "dependentSchemas"}  # beside other keywords, they say more of the same value


def inner_schemas(schema: JsonObject) -> list[object]:
    """The schemas directly inside of a schema."""
    found: list[object] = []
    for name, value in schema.items():
        if name in HOLDS_SCHEMAS and isinstance(value, dict):
            found += value.values()
        elif name in IS_SCHEMA:
            found += value if isinstance(value, list) else [value]
    return found


def all_schemas(schema: JsonObject) -> Iterator[JsonObject]:
    """The schema, all schemas inside of it, and those that a reference names, each once."""
    left: list[object] = [schema]
    seen: set[int] = set()
    refs: set[str] = set()
    while left:
        one = left.pop()
        if isinstance(one, dict) and id(one) not in seen:
            seen.add(id(one))
            yield one
            left += inner_schemas(one)
            ref = one.get("$ref")
            if isinstance(ref, str) and ref not in refs:
                refs.add(ref)
                left.append(find(schema, ref))


def check_keywords(schema: JsonObject) -> None:
    """ValueError for a keyword that JSON Schema does not have, a bound or a reference that the library would not keep,
    a schema that is too large, and one that holds itself in any text."""
    found: list[JsonObject] = []
    for one in all_schemas(schema):
        check_keyword_names(one)
        check_bounds(one)
        found.append(one)
    check_size(found)
    check_merged(schema, found)
    check_multiples(found)
    check_recursion(schema, found)


def check_keyword_names(schema: JsonObject) -> None:
    """ValueError for a keyword that JSON Schema does not have, and for a reference that leads away."""
    odd = [name for name in schema if name not in KNOWN and (name == "x-guidance" or not name.startswith("x-"))][:1]
    require(not odd, f"the schema has the keyword {odd}, which JSON Schema does not have: leave it out")
    ref = schema.get("$ref", "#")
    inside = isinstance(ref, str) and ref.startswith("#")
    require(inside, f"$ref={ref!r:.100} is in another document: put that schema under $defs")


def check_bounds(schema: JsonObject) -> None:
    """ValueError for a bound or an integer that float64 does not hold: the library would take another."""
    for name in BOUNDS:
        value = schema.get(name, 0)
        good = not isinstance(value, int | float) or abs(value) <= MOST_EXACT
        require(good, f"{name}={value!r:.50} is beyond 2**53, where the library rounds bounds: take one nearer to 0")
    left = [schema.get("const"), schema.get("enum")]
    while left:
        one = left.pop()
        left += one if isinstance(one, list) else one.values() if isinstance(one, dict) else ()
        good = not isinstance(one, int) or abs(one) <= MOST_EXACT
        require(good, f"{one!r:.50} is beyond 2**53, where the library rounds integers: take one nearer to 0")


def check_size(found: list[JsonObject]) -> None:
    """ValueError for more properties than the library reads in a fraction of a second."""
    held = (one.get("properties") for one in found)
    count = sum(len(one) for one in held if isinstance(one, dict))
    if count > MOST_PROPERTIES:
        raise ValueError(f"the schema has {count} properties, and {MOST_PROPERTIES} are the most: take fewer")


def check_merged(schema: JsonObject, found: list[JsonObject]) -> None:
    """ValueError for allOf entries that the library would not merge in a fraction of a second: one that names a large
    schema counts as large, each time. Nothing is measured twice, and nothing beyond the limit."""
    sizes: dict[int, int] = {}
    total = 0
    for entry in (entry for one in found for entry in listed(one.get("allOf"))):
        for _ in range(8):  # a reference may name another one
            ref = entry.get("$ref") if isinstance(entry, dict) else None
            entry = find(schema, ref) if isinstance(ref, str) else entry
        if id(entry) not in sizes:
            sizes[id(entry)] = len(json.dumps(entry))
        total += sizes[id(entry)]
        if total > MOST_MERGED:
            raise ValueError(
                f"the entries of allOf, each with the schema that it names, have over {MOST_MERGED} characters: "
                "name a large schema fewer times"
            )


def may_mix(schema: JsonObject) -> bool:
    """Whether two schemas may say something of one value: the library then looks for what both of them allow."""
    names = {*schema} - SAYS_NOTHING - {"$defs", "definitions"}
    return bool(names & {"allOf", "patternProperties"} or (names & MIXED and len(names) > 1))


def is_fast(multiple: int) -> bool:
    """Whether the multiples of a number are recognized in a few steps: it is small, or a digit with zeros after it."""
    return multiple <= MOST_MULTIPLE or (multiple.bit_length() < 1100 and len(str(multiple).strip("0")) == 1)


def check_multiples(found: list[JsonObject]) -> None:
    """ValueError for a multipleOf that needs too many states: alone, with all others, or in one value with another.
    Those of 0.25 are as many as those of 25."""
    given = (one.get("multipleOf") for one in found)
    numbers = {Decimal(str(one)) for one in given if isinstance(one, int | float) and type(one) is not bool and one > 0}
    places = {one: max(-int(one.normalize().as_tuple().exponent), 0) for one in numbers}
    sizes = {one: int(one * 10**place) for one, place in places.items()}
    slow = [f"{one:.8g}" for one, size in sizes.items() if not is_fast(size)]
    advice = f"the library needs a state for each remainder, and {MOST_MULTIPLE} are the most"
    require(not slow, f"multipleOf={slow[:1]} is too large: {advice}: take a smaller one")
    total = sum(size for size in sizes.values() if size <= MOST_MULTIPLE)
    if total > 4 * MOST_MULTIPLE:
        raise ValueError(
            f"the schema has {len(numbers)} different multipleOf, of {total} together: "
            f"{4 * MOST_MULTIPLE} are the most: take fewer"
        )
    both = 1
    most = max(places.values(), default=0)
    for one in numbers if any(map(may_mix, found)) else ():
        both = lcm(both, int(one * 10**most)) if both.bit_length() < 1100 else both
    if not is_fast(both):
        shown = ", ".join(sorted(f"{one:.8g}" for one in numbers))
        raise ValueError(
            f"multipleOf={shown:.80} may meet in one value, which allOf, $ref, or patternProperties describe in parts: "
            f"{advice}: take numbers with a smaller common multiple"
        )


def find(schema: object, ref: str) -> object:
    """The schema that `ref` names, such as "#/$defs/a"; True, which allows anything, if there is none."""
    for part in filter(None, ref.lstrip("#").split("/")):
        name = unquote(part).replace("~1", "/").replace("~0", "~")
        if isinstance(schema, list):
            schema = schema[int(name)] if name.isdecimal() and int(name[:9]) < len(schema) else True
        else:
            schema = schema.get(name, True) if isinstance(schema, dict) else True
    return schema


def listed(value: object) -> list[object]:
    """A list, or nothing."""
    return value if isinstance(value, list) else []


def named(value: object) -> JsonObject:
    """A dict, or nothing."""
    return value if isinstance(value, dict) else {}


def must_be(schema: JsonObject, kind: str) -> bool:
    """Whether each value of a schema has this type."""
    return schema.get("type") in (kind, [kind])


def needed_properties(schema: JsonObject) -> Iterator[list[object]]:
    """For each property that an object must have, the schemas of which it needs one."""
    own, patterns, rest = (named(schema.get("properties")), named(schema.get("patternProperties")),
                           schema.get("additionalProperties", True))  # fmt: skip
    for name in filter(lambda one: isinstance(one, str), listed(schema.get("required"))):
        yield [own[name]] if name in own else [*patterns.values(), rest]
    if isinstance(least := schema.get("minProperties"), int) and least > 0:
        yield [*own.values(), *patterns.values(), rest]


def needed_items(schema: JsonObject) -> Iterator[list[object]]:
    """For each item that an array must have, its schema."""
    least = schema.get("minItems", 0)
    if not isinstance(least, int | float):
        return
    is_old, items = isinstance(schema.get("items"), list), schema.get("items", True)
    first = listed(items if is_old else schema.get("prefixItems"))
    yield from ([one] for one in first[: int(least)])
    if least > len(first):
        yield [schema.get("additionalItems", True) if is_old else items]


def needs(schema: JsonObject, root: JsonObject) -> Iterator[list[object]]:
    """What a text of a schema needs: of each list, that a text can have one schema of it."""
    yield from ([one] for one in listed(schema.get("allOf")))
    yield from (listed(schema[name]) for name in ("anyOf", "oneOf") if listed(schema.get(name)))
    if isinstance(ref := schema.get("$ref"), str):
        yield [find(root, ref)]
    if must_be(schema, "object"):
        yield from needed_properties(schema)
    if must_be(schema, "array"):
        yield from needed_items(schema)


def ending(root: JsonObject, found: list[JsonObject]) -> set[int]:
    """The ids of the schemas that a text can have: first those that need nothing, then those that need only these."""
    waiting: dict[int, list[tuple[int, int]]] = {id(one): [] for one in found}  # schema -> the lists that have it
    missing: dict[int, set[int]] = {}  # schema -> its lists of which no schema is known to end
    for one in found:
        lists = [*needs(one, root)]
        open_ones = {i for i, some in enumerate(lists) if all(each is False or id(each) in waiting for each in some)}
        missing[id(one)] = open_ones
        for i in open_ones:
            for each in filter(lambda each: each is not False, lists[i]):
                waiting[id(each)].append((id(one), i))
    left = [number for number, open_ones in missing.items() if not open_ones]
    done = {*left}
    while left:
        for holder, i in waiting[left.pop()]:
            missing[holder].discard(i)
            if not missing[holder] and holder not in done:
                done.add(holder)
                left.append(holder)
    return done


def check_recursion(schema: JsonObject, found: list[JsonObject]) -> None:
    """ValueError for a schema that holds itself in any text, which would never end."""
    done = ending(schema, found)
    circles = {id(one) for one in found} - done
    refs = {one["$ref"] for one in found if "$ref" in one and id(find(schema, one["$ref"])) in circles}
    wrong = f"the schema holds itself, by {sorted(refs)!s:.200}, in any text: make that property or item optional"
    require(id(schema) in done or not refs, wrong)  # without a reference, the library says what is wrong
