"""The contract of words, clause by clause; see ``spec.contracts.Words``."""

from __future__ import annotations

import time

import torch

from gemmlink.conformance.clauses import LIMIT_S, Desk, RankContract, clause, require, span
from gemmlink.core.words import reader, setter, waiter
from gemmlink.spec.contracts import Words

#: Each writer has lines of its own, as in every window of the core.
_LINE = 64
_DATA = 4096
_VALUES = (-(1 << 63), -(1 << 32), -5, 0, 1, (1 << 31) - 1, 1 << 31, (1 << 32) + 7, (1 << 63) - 1)


class WordsContract(RankContract):
    """``Words``: cells of 64 bits with one writer each, set with release and read with acquire.

    ``rounds``: how often data is announced by a word; ``payload``: bytes announced each time.
    """

    section = "transport/words"
    rounds: int = 400
    payload: int = 1 << 17

    @clause
    def test_a_word_that_is_set_is_read(self, desk: Desk) -> None:
        """``read`` returns what the writer has ``set``, at every peer and at home."""
        words = desk.window(_DATA).words
        for peer in range(desk.world):
            words.set(peer, _LINE * desk.rank, 10 + desk.rank)
        desk.meet()
        found = [words.read(_LINE * source) for source in range(desk.world)]
        want = [10 + source for source in range(desk.world)]
        require(found == want, f"the words are {found}, not {want}")
        desk.meet()

    @clause
    def test_a_word_is_a_signed_64_bit_number(self, desk: Desk) -> None:
        """Words are signed 64-bit cells: every value arrives whole, negative and large ones too."""
        words = desk.window(_DATA).words
        source = desk.peers[-1]
        for value in _VALUES:
            words.set(desk.peers[0], _LINE * desk.rank, value)
            desk.meet()
            found = words.read(_LINE * source)
            require(found == value, f"read gave {found}, not {value}")
            found = words.wait(_LINE * source, value, LIMIT_S)
            require(found == value, f"wait gave {found}, not {value}")
            desk.meet()

    @clause
    def test_words_of_different_writers_are_independent(self, desk: Desk) -> None:
        """Setting a word changes no other: neither a neighbour's nor one beside it."""
        window = desk.window(_DATA)
        words = window.words
        turns, cells = 300, _LINE // 8
        desk.meet()
        for turn in range(1, turns + 1):
            for cell in range(cells):
                for peer in range(desk.world):
                    words.set(peer, _LINE * desk.rank + 8 * cell, turn * cells + cell)
        desk.meet()
        want = [turns * cells + cell for cell in range(cells)]
        for source in range(desk.world):
            found = [words.read(_LINE * source + 8 * cell) for cell in range(cells)]
            require(found == want, f"the words of rank {source} are {found}, not {want}")
        rest = int(window.tensor(desk.rank)[_LINE * desk.world :].count_nonzero())
        require(not rest, f"{rest} bytes that are nobody's words have been written")
        desk.meet()

    @clause
    def test_a_word_announces_all_stores_before_it(self, desk: Desk) -> None:
        """Whoever sees a word also sees all stores made before it was set (release, acquire)."""
        window = desk.window(_DATA + self.payload)
        to, source = desk.peers[0], desk.peers[-1]
        theirs = window.tensor(to)[_DATA:].view(torch.int64)
        mine = window.tensor(desk.rank)[_DATA:].view(torch.int64)
        data, done = _LINE * desk.rank, _LINE * (desk.world + desk.rank)
        for turn in range(1, self.rounds + 1):
            theirs.fill_(turn)
            window.words.set(to, data, turn)
            _awaited(window.words, _LINE * source, turn)
            low, high = span(mine)
            require((low, high) == (turn, turn), f"data {turn} announced, {low}..{high} found")
            window.words.set(source, done, turn)
            _awaited(window.words, _LINE * (desk.world + to), turn)

    @clause
    def test_a_wait_ends_when_the_word_comes(self, desk: Desk) -> None:
        """``wait`` returns soon after the word has been set, with what it read."""
        words = desk.window(_DATA).words
        desk.meet()
        for turn in range(1, 4):
            if desk.rank == 0:
                time.sleep(0.2)
                for peer in desk.peers:
                    words.set(peer, 0, turn)
            else:
                started = time.monotonic()
                found = words.wait(0, turn, LIMIT_S)
                took = time.monotonic() - started
                require(found == turn, f"wait for {turn} returned {found} after {took:.2f} s")
                require(took < LIMIT_S / 2, f"wait took {took:.1f} s for a word set after 0.2 s")
            desk.meet()

    @clause
    def test_a_later_value_satisfies_a_wait(self, desk: Desk) -> None:
        """``wait`` is satisfied by ``at_least`` or anything later, and returns what it read."""
        words = desk.window(_DATA).words
        words.set(desk.peers[0], _LINE * desk.rank, 9)
        desk.meet()
        found = words.wait(_LINE * desk.peers[-1], 4, LIMIT_S)
        require(found == 9, f"wait for at least 4 returned {found} where 9 was set")
        desk.meet()

    @clause
    def test_a_wait_in_vain_returns_the_smaller_value(self, desk: Desk) -> None:
        """``wait`` returns a smaller value once the time has passed; it never raises for that."""
        words = desk.window(_DATA).words
        words.set(desk.peers[0], _LINE * desk.rank, 3)
        desk.meet()
        for limit in (0.0, 0.01, 0.3):
            found = words.wait(_LINE * desk.peers[-1], 4, limit)
            require(found == 3, f"wait for 4 within {limit} s returned {found}, the word is 3")
        desk.meet()

    @clause
    def test_a_wait_is_bounded(self, desk: Desk) -> None:
        """``wait`` takes as long as it was told to, and not much longer or shorter."""
        words = desk.window(_DATA).words
        for limit in (0.0, 0.05, 0.5):
            started = time.monotonic()
            words.wait(0, 1, limit)
            took = time.monotonic() - started
            require(0.9 * limit <= took < limit + 2.0, f"wait within {limit} s took {took:.2f} s")
        desk.meet()

    @clause
    def test_a_long_wait_costs_little(self, desk: Desk) -> None:
        """A long wait uses less than a tenth of a core."""
        words = desk.window(_DATA).words
        desk.meet()
        used, started = time.process_time(), time.monotonic()
        words.wait(0, 1, 1.5)
        used, took = time.process_time() - used, time.monotonic() - started
        require(used < took / 10, f"a wait of {took:.2f} s used {used:.2f} s of a core")
        desk.meet()

    @clause
    def test_bound_words_do_what_the_methods_do(self, desk: Desk) -> None:
        """Words offered bound to their places (``BoundWords``) do what the three methods do."""
        words = desk.window(_DATA).words
        everyone, own = range(desk.world), _LINE * desk.rank
        write = setter(words, *(tuple((peer, at) for peer in everyone) for at in (own, own + 8)))
        read = reader(words, *(_LINE * source + at for source in everyone for at in (8, 0)))
        for turn in (-7, 1 << 40):
            write(turn + desk.rank, turn - desk.rank)
            desk.meet()
            found = read()
            want = tuple(turn + sign * source for source in everyone for sign in (-1, 1))
            require(found == want, f"the words are {found}, not {want}")
            desk.meet()
        if getattr(words, "waiter", None) is not None:
            wait = waiter(words, own, 0.05)
            found = wait(0), wait(1 << 41)
            want = (1 << 40) + desk.rank, (1 << 40) + desk.rank
            require(found == want, f"two waits, one of them in vain, returned {found}, not {want}")
        desk.meet()


def _awaited(words: Words, offset: int, value: int) -> None:
    found = words.wait(offset, value, LIMIT_S)
    require(found >= value, f"the word never came: {found} after {LIMIT_S:g} s, not {value}")
