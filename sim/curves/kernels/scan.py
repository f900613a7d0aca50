"""Arrays of whole numbers taken out of JSON bytes. Only ever run compiled."""

import numpy as np

from sim.curves.kernels import Numbers

_NINE = np.uint8(9)
_CLOSE, _COMMA, _BLANK = np.uint8(93), np.uint8(44), np.uint8(32)
_COMMA_AS_DIGIT = np.uint8(44 + 256 - 48)
_MOST_DIGITS = np.uint64(18)


def skip_blanks(text: Numbers, i: int) -> int:
    """Index of the first byte from ``i`` on that is no JSON white space."""
    while text[i] == 32 or text[i] == 10 or text[i] == 13 or text[i] == 9:
        i += 1
    return i


def parse_ints(text: Numbers, i: int, ids: Numbers, n: int) -> tuple[int, int]:
    """Read the JSON array of plain whole numbers that opens right before ``text[i]``.

    Writes its numbers to ``ids`` from ``n`` on; returns the index behind its bracket and the new
    ``n``, or −1 and ``n`` for anything but up to 18 decimal digits each. ``text`` ends in zeros.
    """
    # Unsigned throughout: signed indices may count from the end, which costs a third of the speed.
    one, ten, zero = np.uint64(1), np.uint64(10), np.uint8(48)
    at = np.uint64(skip_blanks(text, i))
    if text[at] == _CLOSE:
        return int(np.int64(at)) + 1, n
    while True:
        first = at
        value = np.uint64(0)
        digit = np.uint8(text[at] - zero)
        while digit <= _NINE:
            value = value * ten + np.uint64(digit)
            at += one
            digit = np.uint8(text[at] - zero)
        length = at - first
        if length < one or length > _MOST_DIGITS or (length > one and text[first] == zero):
            return -1, n
        ids[n] = value
        n += 1
        if digit != _COMMA_AS_DIGIT:
            at = np.uint64(skip_blanks(text, int(np.int64(at))))
            if text[at] == _CLOSE:
                return int(np.int64(at)) + 1, n
            if text[at] != _COMMA:
                return -1, n
        at += one
        if text[at] <= _BLANK:
            at = np.uint64(skip_blanks(text, int(np.int64(at))))


def opens_array(text: Numbers, i: int, key: Numbers) -> int:
    """Index behind the bracket if ``"key": [`` starts at ``i``; 0 if the key does not; −1 if the
    key does and something else than an array follows."""
    for k in range(len(key)):
        if text[i + k] != key[k]:
            return 0
    i = skip_blanks(text, i + len(key))
    if text[i] != 58:  # a colon
        return 0
    i = skip_blanks(text, i + 1)
    return i + 1 if text[i] == 91 else -1


def write_number(text: Numbers, at: int, number: int) -> int:
    """Write ``number`` in decimal digits at ``at``; returns the index behind it."""
    size = 1
    while number >= 10**size:
        size += 1
    for k in range(size):
        text[at + size - 1 - k] = 48 + number % 10
        number //= 10
    return at + size


def extract_arrays(
    text: Numbers, length: int, key: Numbers, rest: Numbers, ids: Numbers, counts: Numbers,
    sizes: Numbers,
) -> bool:  # fmt: skip
    """Take the arrays under ``key`` out of JSON ``text``; False where one is no array of ints.

    ``rest`` gets the text with each array replaced by its number, ``ids`` all their values one
    after the other, ``counts`` their lengths, ``sizes`` how much of each of the three was used.
    ``key`` includes its quotes: in valid JSON an unescaped "key" with a colon behind it is a key.
    """
    i = 0
    r = 0
    n = 0
    a = 0
    while i < length:
        if text[i] == 34:  # a quote
            inside = opens_array(text, i, key)
            if inside < 0:
                return False
            if inside > 0:
                while text[i] != 58:
                    rest[r] = text[i]
                    r += 1
                    i += 1
                rest[r] = 58
                before = n
                i, n = parse_ints(text, inside, ids, n)
                if i < 0:
                    return False
                counts[a] = n - before
                r = write_number(rest, r + 1, a)
                a += 1
                continue
        rest[r] = text[i]
        r += 1
        i += 1
    sizes[0] = r
    sizes[1] = n
    sizes[2] = a
    return True
