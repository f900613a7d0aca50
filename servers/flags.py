"""Words of a vLLM command line as its parser reads them (vLLM 0.32 ``FlexibleArgumentParser``).

It takes ``_`` for ``-`` in an option's name, any unique beginning of a name for the whole, and
``--option.key`` for a value inside a JSON option, of which it then replaces the whole.
"""

from collections.abc import Iterator, Sequence
from itertools import pairwise


def option_name(word: str) -> str:
    """The name ``word`` gives, in vLLM's spelling, without value and keys; "" for a value."""
    if not word.startswith("-"):
        return ""
    name = word.split("=", 1)[0]
    return name.split(".", 1)[0].replace("_", "-") if name.startswith("--") else name


def may_mean(word: str, option: str) -> bool:
    """Whether vLLM may read ``word`` as ``option``: its name, or the beginning of it."""
    name = option_name(word)
    return name == option or (len(name) > 2 and name.startswith("--") and option.startswith(name))


def values_of(flags: Sequence[str], option: str, *short: str) -> Iterator[str]:
    """Every value given to ``option``, or to ``short`` names of it, as text, in order."""
    split = (flag.split("=", 1) if flag.startswith("-") else [flag] for flag in flags)
    words = [part for parts in split for part in parts]
    for word, value in pairwise(words):
        if word in short or may_mean(word, option):
            yield value
