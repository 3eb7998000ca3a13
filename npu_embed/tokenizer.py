"""Texts to token ids, as the checkpoint's own tokenizer file says; and the check of the texts.

The ids are those of Hugging Face's fast tokenizers. A text past the limit is cut as they cut it:
the special tokens that close a sequence stay.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import tokenizers

from .errors import BundleError, InputError, InputTypeError
from .tokenizercheck import check_file, check_tokenizer

# The largest published tokenizer.json files are about 35 MB.
MAX_FILE_BYTES = 64 << 20

# Tokenized at a time. The library holds some 600 bytes a token meanwhile, and a character may be
# one. A text is never split, since ids may depend on what follows: a longer one is a batch of its
# own, whose memory grows with it.
BATCH_TEXTS = 4096
BATCH_CHARACTERS = 1 << 20

Texts = Iterable[str]


@dataclass(frozen=True, slots=True)
class Encoded:
    """The token ids of one text, int32 [at most max_tokens], special tokens included.

    tokens is the count before anything was cut.
    """

    ids: npt.NDArray[np.int32]
    tokens: int

    @property
    def truncated(self) -> bool:
        """Whether the text was cut."""
        return self.tokens > len(self.ids)


class Tokenizer:
    """A tokenizer file with a limit of tokens; may be shared by threads."""

    __slots__ = ("_name", "_side", "_tokenizer", "max_tokens", "special_tokens", "vocab_size")

    def __init__(
        self, name: str, tokenizer: tokenizers.Tokenizer, max_tokens: int, side: str
    ) -> None:
        self._name = name
        self._tokenizer = tokenizer
        self._side = side
        self.max_tokens = max_tokens
        self.special_tokens = tokenizer.num_special_tokens_to_add(False)
        self.vocab_size = tokenizer.get_vocab_size(with_added_tokens=True)

    @classmethod
    def from_file(cls, path: Path, *, max_tokens: int, plain_specials: bool = False) -> "Tokenizer":
        """The tokenizer of a tokenizer.json, its own truncation and padding switched off.

        plain_specials: `[SEP]` and the like, typed in a text, are plain text. By default they
        are the special tokens they spell, as in the reference.

        Raises:
            BundleError: the file is missing or no tokenizer, or max_tokens leaves no room for
                one token beside the special ones.
        """
        content = _read(path)
        with _library_errors(path.name):
            check_file(path.name, content)
        tokenizer, side = _load(path.name, content)
        return cls.limited(path.name, tokenizer, max_tokens, side, plain_specials)

    @classmethod
    def limited(
        cls,
        name: str,
        tokenizer: tokenizers.Tokenizer,
        max_tokens: int,
        side: str = "right",
        plain_specials: bool = False,
    ) -> "Tokenizer":
        """A tokenizer that neither cuts nor pads, given the limit.

        name begins errors; side is where texts are cut; plain_specials as for from_file.

        Raises:
            BundleError: max_tokens leaves no room for one token beside the special ones, or no
                text can be encoded.
        """
        specials = tokenizer.num_special_tokens_to_add(False)
        if max_tokens <= specials:
            raise BundleError(
                f"{name}: a limit of {max_tokens} tokens, wanted more than the {specials} "
                "special tokens of every text; re-export the bundle."
            )
        tokenizer.encode_special_tokens = plain_specials
        loaded = cls(name, tokenizer, max_tokens, side)
        # Some files load and then fail at every text.
        loaded.encode_batch(["", "a"])
        return loaded

    def encode_batch(
        self, texts: Sequence[str], *, prompt: str = "", truncate: bool = True, first: int = 0
    ) -> list[Encoded]:
        """The token ids of `prompt + text`, for each of the texts, in their order.

        The texts must have passed `as_texts`. `first` is the index that errors give the first.

        Raises:
            InputError: truncate is False and a text has more than max_tokens tokens.
            BundleError: the tokenizer adds other special tokens than it says.
        """
        full = [prompt + text for text in texts] if prompt else list(texts)
        encoded = self._encode(full)
        for index, one in enumerate(encoded):
            if one.truncated and not truncate:
                raise InputError(
                    f"texts[{first + index}]: {one.tokens} tokens, this bundle runs at most "
                    f"{self.max_tokens}; shorten it or pass truncate=True."
                )
        return encoded

    def _encode(self, texts: list[str]) -> list[Encoded]:
        """Texts as the library cuts them."""
        with _library_errors(self._name):
            encodings = self._tokenizer.encode_batch_fast(texts)
            encodings.reverse()
            encoded = []
            while encodings:  # each is freed at once: they are far larger than their ids
                one = encodings.pop()
                # A large id in a damaged file overflows here rather than wrapping.
                ids = np.array(one.ids, dtype=np.int32)
                cut = self._cut(ids, one) if len(ids) > self.max_tokens else ids
                encoded.append(Encoded(cut, len(ids)))
            return encoded

    def _cut(self, ids: npt.NDArray[np.int32], whole: tokenizers.Encoding) -> npt.NDArray[np.int32]:
        """The ids of a text that is too long: its special tokens, and what they leave room for.

        The library would cut before it adds them, and make an encoding of each piece that it cuts
        off, of 2 KB and more.
        """
        of_text = np.flatnonzero(np.array(whole.special_tokens_mask, dtype=np.uint8) == 0)
        first, end = (of_text[0], of_text[-1] + 1) if len(of_text) else (0, 0)
        before, text, after = np.split(ids, [first, end])
        added = len(before) + len(after)
        if added != self.special_tokens:
            raise BundleError(
                f"{self._name}: {added} special tokens around a text, wanted the "
                f"{self.special_tokens} that its post_processor names; re-export the bundle."
            )
        room = self.max_tokens - added
        kept = text[-room:] if self._side == "left" else text[:room]
        return np.concatenate([before, kept, after])


def in_batches(texts: Sequence[str], prompt_characters: int = 0) -> Iterator[Sequence[str]]:
    """The texts in order, as many at a time as are tokenized together without taking much memory.

    prompt_characters: what is put before each text.
    """
    first, characters = 0, 0
    for index, text in enumerate(texts):
        added = prompt_characters + len(text)
        full = index - first == BATCH_TEXTS or characters + added > BATCH_CHARACTERS
        if full and index > first:
            yield texts[first:index]
            first, characters = index, 0
        characters += added
    if first < len(texts):
        yield texts[first:]


def check_some_tokens(encoded: Sequence[Encoded], first: int = 0) -> None:
    """Check that each text has a token, as one without special tokens may not.

    `first` is the index that errors give the first.

    Raises:
        InputError: naming the first that has none.
    """
    for index, one in enumerate(encoded):
        if not len(one.ids):
            raise InputError(
                f"texts[{first + index}]: 0 tokens, wanted at least one: this bundle's tokenizer "
                "adds no special tokens to a text; leave it out."
            )


def iter_texts(texts: Texts) -> Iterator[str]:
    """The texts, one by one as they are asked for, each checked to be a text.

    Any iterable of str, by position: list, tuple, generator, numpy array, pandas Series, open
    text file (its lines, line ends kept, as `list(file)` has them). A NUL is a character.

    Raises:
        InputTypeError: at once if texts is no such iterable; later if an item is not a str.
        InputError: an item has a lone surrogate, which no tokenizer can read.
    """
    wanted = "wanted a list of str"
    if isinstance(texts, str | bytes | bytearray | memoryview):
        raise InputTypeError(f"texts: {type(texts).__name__}, {wanted}; put it in a list, as str.")
    if isinstance(texts, Mapping):
        raise InputTypeError(f"texts: {type(texts).__name__}, {wanted}; pass list(d.values()).")
    if isinstance(texts, AbstractSet):
        raise InputTypeError(
            f"texts: {type(texts).__name__}, which has no order, {wanted}; pass sorted(texts)."
        )
    ndim = getattr(texts, "ndim", 1)
    if ndim != 1:
        raise InputTypeError(
            f"texts: {type(texts).__name__} of {ndim} dimensions, wanted 1; pass one column."
        )
    if not isinstance(texts, Iterable):
        raise InputTypeError(f"texts: {type(texts).__name__}, {wanted}; pass [text].")
    return (check_text(item, f"texts[{index}]") for index, item in enumerate(texts))


def as_texts(texts: Texts) -> list[str]:
    """The texts as a list of plain str; see `iter_texts` for what is accepted and raised."""
    return list(iter_texts(texts))


def check_text(text: object, where: str) -> str:
    """The text as a plain str; `where` (`texts[3]`, `prompt`) begins the error message.

    Raises:
        InputTypeError: it is not a str.
        InputError: it has a lone surrogate.
    """
    if not isinstance(text, str):
        raise InputTypeError(
            f"{where}: {type(text).__name__}, wanted str; convert or leave it out."
        )
    # A subclass such as numpy.str_ or an enum member counts by its characters, not its __str__.
    plain = str.__str__(text)
    try:
        plain.encode("utf-8")
    except UnicodeEncodeError as exc:
        raise InputError(
            f"{where}: lone surrogate U+{ord(plain[exc.start]):04X} at character {exc.start}, "
            "wanted text that UTF-8 can hold; decode the source with errors='replace'."
        ) from exc
    return plain


def _read(path: Path) -> bytes:
    """What the file holds."""
    try:
        size_bytes = path.stat().st_size
        if path.is_file() and size_bytes <= MAX_FILE_BYTES:  # a FIFO would be waited for
            with path.open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
            size_bytes = len(content)
            if size_bytes <= MAX_FILE_BYTES:
                return content
    except OSError as exc:
        raise BundleError(
            f"{path.name}: {exc.strerror}, wanted a tokenizer; re-export the bundle."
        ) from exc
    raise BundleError(
        f"{path.name}: {size_bytes} bytes or no regular file, wanted a file of at most "
        f"{MAX_FILE_BYTES} bytes; re-export the bundle."
    )


def _load(name: str, content: bytes) -> tuple[tokenizers.Tokenizer, str]:
    """The tokenizer of a file, and the side its file cuts at (`right` unless it says so)."""
    with _library_errors(name):
        tokenizer = tokenizers.Tokenizer.from_buffer(content)
    check_tokenizer(name, tokenizer)
    with _library_errors(name):
        truncation = tokenizer.truncation or {}
        tokenizer.no_truncation()
        tokenizer.no_padding()
    return tokenizer, str(truncation.get("direction", "right")).lower()


@contextmanager
def _library_errors(name: str) -> Iterator[None]:
    """Turns what the library raises over a wrong file into a BundleError."""
    try:
        yield
    except BundleError:
        raise
    except BaseException as exc:
        # The library raises bare Exception, and a panic of its Rust code is not even that.
        if not isinstance(exc, Exception) and type(exc).__name__ != "PanicException":
            raise
        raise BundleError(f"{name}: {exc}, wanted a tokenizer; re-export the bundle.") from exc
