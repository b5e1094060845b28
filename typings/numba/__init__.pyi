"""Numba device code is not Python to a type checker: everything in it is Any."""

from typing import Any

def __getattr__(name: str) -> Any: ...
