"""The part of JSON Schema that ours use; an unknown keyword is an error, not a pass."""

from typing import Any

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None),
    "boolean": bool,
}  # fmt: skip


def valid(schema: dict[str, Any], x: Any, root: dict[str, Any] | None = None, closed: bool = False) -> bool:
    """Whether `x` is as the schema says, in which references are to `root`; `closed` allows no key that it lacks."""
    root = root or schema

    def of(part: dict[str, Any], value: Any) -> bool:
        return valid(part, value, root, closed)

    def check(keyword: str, value: Any) -> bool:
        is_object, is_number = isinstance(x, dict), isinstance(x, int | float)
        match keyword:
            case "$schema" | "$defs" | "title" | "description" | "then":
                return True
            case "type":
                names = [value] if isinstance(value, str) else value
                return any(isinstance(x, TYPES[name]) for name in names)
            case "const":
                return bool(x == value)
            case "enum":
                return x in value
            case "required":
                return not is_object or set(value) <= set(x)
            case "properties":
                unknown = {*x} - {*value} if is_object and closed else set()
                return not is_object or (not unknown and all(of(value[key], x[key]) for key in value.keys() & x.keys()))
            case "additionalProperties":
                return not is_object or all(of(value, x[key]) for key in x.keys() - schema.get("properties", {}).keys())
            case "dependentRequired":
                return not is_object or all(set(value[key]) <= set(x) for key in value.keys() & x.keys())
            case "items":
                return not isinstance(x, list) or all(of(value, item) for item in x)
            case "minimum":
                return not is_number or x >= value
            case "minItems":
                return not isinstance(x, list) or len(x) >= value
            case "minLength":
                return not isinstance(x, str) or len(x) >= value
            case "allOf":
                return all(of(part, x) for part in value)
            case "anyOf":
                return any(of(part, x) for part in value)
            case "if":
                return not of(value, x) or of(schema["then"], x)
            case "$ref":
                return of(root["$defs"][value.removeprefix("#/$defs/")], x)
        raise NotImplementedError(keyword)

    return all(check(keyword, value) for keyword, value in schema.items())
