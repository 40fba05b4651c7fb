"""Tools in the words of TypeScript, as the small tokenizer declares them."""

from typing import Any


def declared(tools: list[dict[str, Any]]) -> str:
    """One `type` a function, with its description and its parameters."""
    lines = []
    for tool in tools:
        function = tool["function"]
        fields = function.get("parameters", {}).get("properties", {})
        taken = ", ".join(f"{name}: {field.get('type', 'any')}" for name, field in fields.items())
        lines += [f"// {function.get('description', '')}", f"type {function['name']} = (_: {{{taken}}}) => any;"]
    return "\n".join(["# Tools", "namespace functions {", *lines, "}"])
