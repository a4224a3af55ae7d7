"""The keywords of a JSON schema: one that is misspelled would be ignored, and the answer wrong (chapter 26)."""

from __future__ import annotations

from contextlib import suppress

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


def inner_schemas(schema: JsonObject) -> list[object]:
    """The schemas directly inside of a schema."""
    found: list[object] = []
    for name, value in schema.items():
        if name in HOLDS_SCHEMAS and isinstance(value, dict):
            found += value.values()
        elif name in IS_SCHEMA:
            found += value if isinstance(value, list) else [value]
    return found


def check_keywords(schema: JsonObject) -> None:
    """ValueError for a keyword that JSON Schema does not have, and for a reference that leads away or in a circle."""
    left: list[object] = [schema]
    refs: set[str] = set()
    while left:
        one = left.pop()
        if isinstance(one, dict):
            odd = [name for name in one if name not in KNOWN and not name.startswith("x-")][:1]
            require(not odd, f"the schema has the keyword {odd}, which JSON Schema does not have: leave it out")
            ref = one.get("$ref", "#")
            inside = isinstance(ref, str) and ref.startswith("#")
            require(inside, f"$ref={ref!r} is in another document: put that schema under $defs")
            refs |= {ref} if "$ref" in one else set()
            left += inner_schemas(one)
    with suppress(AttributeError, TypeError):  # not a schema: the library says why
        check_end(schema, refs)


def find(schema: object, ref: str) -> object:
    """The schema that `ref` names, such as "#/$defs/a"; True, which allows anything, if there is none."""
    for name in filter(None, ref.lstrip("#").split("/")):
        schema = schema.get(name.replace("~1", "/").replace("~0", "~"), True) if isinstance(schema, dict) else True
    return schema


def may_end(schema: object, known: set[str]) -> bool:
    """Whether a text can have the schema, if one can have each of the references in `known`."""
    if not isinstance(schema, dict):
        return True
    if "$ref" in schema:
        return schema["$ref"] in known
    needed = [*schema.get("allOf", ())]
    if schema.get("type") == "object":
        needed += [schema.get("properties", {}).get(name) for name in schema.get("required", ())]
    if schema.get("type") == "array" and schema.get("minItems", 0):
        needed += [schema.get("items"), *schema.get("prefixItems", ())[: schema["minItems"]]]
    choices = schema.get("anyOf") or schema.get("oneOf") or [True]
    return all(may_end(one, known) for one in needed) and any(may_end(one, known) for one in choices)


def check_end(schema: JsonObject, refs: set[str]) -> None:
    """ValueError for a schema that holds itself in any text, which would never end."""
    known: set[str] = set()
    while more := {ref for ref in refs - known if may_end(find(schema, ref), known)}:
        known |= more
    wrong = f"the schema holds itself, by {sorted(refs - known)}, in any text: make that property optional"
    require(may_end(schema, known), wrong)
