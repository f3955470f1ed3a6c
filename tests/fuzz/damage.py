"""Random damage to bytes and to JSON values, the same for the same random numbers."""

import string

_SPARE_BYTES = (
    b"\x00",
    b"\xff",
    b"\x7f",
    b"\x80",
    b"\xff\xff\xff\xff",
    b"\x7f\xff\xff\xff",
    b"\x00" * 16,
    b"../",
    b"%s",
)
_SPARE_TEXT = [
    "[", "]", "{", "}", "=", '"', "'", '"""', "#", "\n", ",", ".", "[[data]]", "[model.x]", "target",
    "{data}", "{seed}", "-1", "0", "1e999", "nan", "9" * 30, "1979-05-27", "''", "[]", "{}", "\\u0000",
    "é", "[run]\ndevices = 1\n", "x = [1, {y = 2}]\n", "../..", "a:b", "micro_batches = 7\n", "epochs = 0\n",
]  # fmt: skip
_SPARE_VALUES = [
    None, True, -1, 0, 2**63, 1e308, "", "../../outside", "/etc/hostname", "a" * 300, [], {}, [[]], {"tuple": 3},
    {"tensor": "x"}, {"float": "inf"}, {"dict": [[1]]}, {"dict": [[[], 1]]},
]  # fmt: skip


def damaged_bytes(data, rng):
    """The bytes after one to four random changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        at = rng.randrange(len(data) + 1)
        to = min(len(data), at + rng.choice((1, 1, 2, 4, 16, 256)))
        other = rng.randrange(len(data) + 1)
        changed = (
            bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 : to] if at < to else b"",
            b"",
            bytes(to - at),
            rng.choice(_SPARE_BYTES),
            rng.choice(_SPARE_BYTES) + data[at:to],
            data[other : other + to - at],
            data[at:to] * 3,
        )
        kind = rng.randrange(len(changed) + 1)
        data = data[:at] if kind == len(changed) else data[:at] + changed[kind] + data[to:]
    return data


def damaged_text(text, rng):
    """The lines of a settings file after one to four random changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3, 4))):
        at = rng.randrange(len(text) + 1)
        to = min(len(text), at + rng.randrange(12))
        kind = rng.randrange(5)
        if kind == 0:
            text = text[:at] + text[to:]
        elif kind == 1:
            text = text[:at] + rng.choice(_SPARE_TEXT) + text[at:]
        elif kind == 2:
            text = text[:at] + rng.choice(_SPARE_TEXT) + text[to:]
        elif kind == 3:
            text = text[:at] + rng.choice(string.printable) + text[to:]
        else:
            text = _lines_mixed(text, rng)
    return text


def _lines_mixed(text, rng):
    lines = text.splitlines(keepends=True) or [""]
    one, other = rng.randrange(len(lines)), rng.randrange(len(lines))
    lines[one] = rng.choice([lines[other], "", lines[one].replace(" = ", rng.choice(["=", " ", " = ["]))])
    return "".join(lines)


def damaged_value(value, rng):
    """A JSON value with one part of it replaced, left out, or put elsewhere."""
    if isinstance(value, dict) and value and rng.random() < 0.85:
        key = rng.choice(sorted(value))
        kind = rng.randrange(6)
        if kind == 0:
            return {name: part for name, part in value.items() if name != key}
        if kind == 1:
            return {**value, rng.choice((key + "x", "../" + key, "")): value[key]}
        return {**value, key: damaged_value(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.85:
        at = rng.randrange(len(value))
        kind = rng.randrange(4)
        if kind == 0:
            return value[:at] + value[at + 1 :]
        if kind == 1:
            return [*value, value[at]]
        return [*value[:at], damaged_value(value[at], rng), *value[at + 1 :]]
    if isinstance(value, int) and not isinstance(value, bool) and rng.random() < 0.5:
        return value + rng.choice((-1, 1, 1 << 20, 1 << 40))
    return rng.choice(_SPARE_VALUES)
