"""Units of memory, in bytes."""

from typing import Final

MIB: Final = 2**20
GIB: Final = 2**30
