"""Texts to profile with, where nobody brings their own: short and long, in several scripts."""

from __future__ import annotations

_SENTENCES = (
    "Two cats sleep on the sofa.",
    "How do I reset my password?",
    "The invoice was paid twice, and the customer wants the second payment back.",
    "Rain fell all night on the tin roof of the station.",
    "Install the driver, restart the machine, and look at the log for errors.",
    "Le train de nuit pour Marseille part de la voie quatre.",
    "Die Brücke über den Fluss ist seit Montag gesperrt.",
    "el mercado abre a las ocho y cierra cuando se acaba el pan",
    "猫が二匹、ソファーで眠っている。",
    "поезд опоздал на двадцать минут",
    "A context switch costs more than the arithmetic it interrupts.",
    "She kept the letters in a biscuit tin under the stairs, sorted by the year they had come.",
)
_LENGTHS = (1, 1, 1, 2, 2, 3, 4, 5, 8)  # sentences of a text, in turn
_COUNT = 36


def _text(number: int) -> str:
    first, length = 5 * number, _LENGTHS[number % len(_LENGTHS)]
    return " ".join(_SENTENCES[(first + i) % len(_SENTENCES)] for i in range(length))


TEXTS: tuple[str, ...] = tuple(_text(number) for number in range(_COUNT))
