"""What the adversary finds, as exceptions whose text says who did what when."""

from __future__ import annotations


class Fault(Exception):
    """A run went wrong. ``kind`` is one of the words below, the text tells the rest.

    - ``wrong``: somebody got an element that is not the one he must get.
    - ``race``: a load or store that nothing orders against another one in the same place.
    - ``deadlock``: nobody can go on.
    - ``word``: a word that falls, or that is set by another rank than its source.
    - ``record``: an entry record that is not of this call.
    """

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind
        self.text = text
