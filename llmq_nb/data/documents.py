"""What an input reader yields: documents or parts of them, so that none need fit in memory."""

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

PIECE = 2**20  # bytes or tokens read at a time


@dataclass(frozen=True, slots=True)
class Text:
    """A document's text, or a part of it."""

    text: str
    ends_document: bool = True


@dataclass(frozen=True, slots=True)
class Chat:
    """One conversation: messages are objects with `role` and `content`."""

    messages: list[dict[str, Any]]
    where: str
    """File and line, for errors."""


@dataclass(frozen=True, slots=True)
class Ids:
    """A tokenized document, or a part of it: integer [n], and bool [n] if supervised in part."""

    ids: NDArray[Any]
    loss_mask: NDArray[np.bool_] | None = None
    ends_document: bool = True


Document = Text | Chat | Ids
