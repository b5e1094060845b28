"""Stretches of a token store as text, with what is trained, what is not and where documents begin.

The text of a run of tokens is what it adds to the text of all tokens before it in the sample, so
that decoders that treat a beginning in their own way (a space left out) show what is really there.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from llmq_nb.core.errors import UserError
from llmq_nb.data.store import TokenStore, check_tokenizer
from llmq_nb.data.tokenizer import Tokenizer, load_tokenizer, tokenizer_info

TRAINED, UNTRAINED, BORDER = "green", "bright_black", "magenta"
"""Colours on a terminal; special tokens are bold."""
OPEN, CLOSE = "⟦", "⟧"
"""Around trained text where there are no colours."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Tokens in a row of one document, all trained or none, all special or none.

    document: its number. offset: of the first token in its document.
    """

    document: int
    offset: int
    ids: tuple[int, ...]
    text: str
    trained: bool
    special: bool


def find_tokenizer(store: TokenStore, given: str | None) -> Tokenizer | None:
    """The tokenizer that made the store: `given`, or as the store names it; None: not to be found.

    Raises UserError if `given` is none, or another one.
    """
    if given is not None:
        tokenizer = load_tokenizer(given)
        check_tokenizer(store, tokenizer_info(tokenizer))
        return tokenizer
    recorded = store.attributes["sources"].get("tokenizer")
    name = store.tokenizer.name
    places = ["bytes", recorded, name, store.path.parent / name, store.path.parent]
    for place in places:
        if not isinstance(place, str | Path):
            continue
        try:
            tokenizer = load_tokenizer(place)
        except (UserError, OSError):
            continue
        if tokenizer.sha256 == store.tokenizer.sha256:
            return tokenizer
    return None


def draw_samples(
    store: TokenStore, tokenizer: Tokenizer | None, *, count: int, tokens: int, seed: int
) -> list[list[Piece]]:
    """`count` stretches of at most `tokens` tokens, in the store's order.

    Each begins in a document of its own: at its first token, or at a random one where the document
    is longer than the stretch; and goes on into the documents after it.
    """
    starts = store.document_starts
    rng = np.random.default_rng(seed)
    chosen = rng.choice(len(starts), min(count, len(starts)), replace=False)
    ends = np.append(starts[1:], len(store))
    out = []
    for document in sorted(chosen.tolist()):
        spare = int(ends[document] - starts[document]) - tokens
        begin = int(starts[document]) + (int(rng.integers(0, spare + 1)) if spare > 0 else 0)
        out.append(_sample(store, tokenizer, starts, begin, min(begin + tokens, len(store))))
    return out


def _sample(
    store: TokenStore,
    tokenizer: Tokenizer | None,
    starts: NDArray[np.int64],
    begin: int,
    end: int,
) -> list[Piece]:
    """The pieces of tokens begin .. end - 1."""
    ids = store.read_any(begin, end).astype(np.int64)
    document = np.searchsorted(starts, np.arange(begin, end), side="right") - 1
    offset = np.arange(begin, end) - starts[document]
    mask = store.read_mask(begin, end)
    trained = (offset > 0) if mask is None else mask & (offset > 0)
    special = np.isin(ids, list(store.tokenizer.special_ids.values()))
    changes = [np.diff(x.astype(np.int64)) != 0 for x in (document, trained, special)]
    edges = [0, *(np.flatnonzero(np.logical_or.reduce(changes)) + 1).tolist(), len(ids)]
    names = {i: name for name, i in store.tokenizer.special_ids.items()}
    pieces = []
    for a, b in zip(edges[:-1], edges[1:], strict=True):
        first = int(np.searchsorted(document, document[a]))  # the document's first token in sight
        known = ids[first:b][ids[first:b] < store.tokenizer.vocab_size]
        if special[a]:
            text = "".join(names[int(i)] for i in ids[a:b])
        else:
            text = _text(tokenizer, known, b - a, ids[a:b])
        where = int(document[a]), int(offset[a])
        marks = bool(trained[a]), bool(special[a])
        pieces.append(Piece(*where, tuple(ids[a:b].tolist()), text, *marks))
    return pieces


def _text(tokenizer: Tokenizer | None, known: NDArray[Any], count: int, ids: NDArray[Any]) -> str:
    """What the last `count` of the known ids add to the text; the ids themselves without a
    tokenizer, or where one of them has no text."""
    if tokenizer is None or (len(known) and (ids >= tokenizer.vocab_size).any()):
        return " ".join(map(str, ids.tolist())) + " "
    before = tokenizer.decode(known[:-count]).rstrip("\ufffd")  # half a character may be completed
    whole = tokenizer.decode(known)
    return whole[len(before) :] if whole.startswith(before) else tokenizer.decode(ids)


def render(sample: list[Piece], *, colour: bool) -> Iterator[Text]:
    """The lines of a sample: a border before each document, then its text, to be printed as is."""
    line = Text()
    for i, piece in enumerate(sample):
        before = sample[i - 1] if i else None
        if before is None or before.document != piece.document:
            if before is not None:
                yield _closed(line, before, colour)
            line = Text()
            at = f", from token {piece.offset:,}" if piece.offset else ""
            yield Text(f"── document {piece.document:,}{at} ──", BORDER if colour else "")
            before = None
        if not colour and piece.trained and not (before and before.trained):
            line.append(OPEN)
        if not colour and before and before.trained and not piece.trained:
            line.append(CLOSE)
        style = f"{'bold ' if piece.special else ''}{TRAINED if piece.trained else UNTRAINED}"
        line.append(printable(piece.text), style if colour else "")
    if sample:
        yield _closed(line, sample[-1], colour)


def _closed(line: Text, last: Piece, colour: bool) -> Text:
    return line.append(CLOSE) if last.trained and not colour else line


def printable(text: str) -> str:
    """The text with control characters as \\x1b: data must not steer the terminal."""
    return "".join(
        c if c in "\n\t" or c.isprintable() or c == "\ufffd" else _escape(c) for c in text
    )


def _escape(character: str) -> str:
    code = ord(character)
    if character == "\r":
        return "\\r"
    if character.isspace():  # other spaces than the ASCII one are not "printable" but harmless
        return character
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"
