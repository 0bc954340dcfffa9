"""The contract of a backend, clause by clause; see ``spec.contracts.Backend``. Needs no ranks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import cast

import torch

from gemmlink import plugins
from gemmlink.conformance.clauses import require, span
from gemmlink.conformance.contract import Contract
from gemmlink.conformance.problems import Case, limit_l2, relative_l2
from gemmlink.spec.contracts import INTERFACE, Backend
from gemmlink.spec.problem import INPUT_DTYPES, Problem, dtype_name

_Pair = tuple[torch.dtype, torch.dtype]
_SMALL = ((1, 1, 1), (1, 5, 33), (7, 5, 33), (33, 17, 64), (64, 130, 100))
_LONG = (24, 40, 7168)


def _plain(values: torch.Tensor) -> torch.Tensor:
    return values.clone()


def _transposed(values: torch.Tensor) -> torch.Tensor:
    return values.T.contiguous().T


def _spread(values: torch.Tensor) -> torch.Tensor:
    """Every second row and third column of a block of NaN."""
    rows, cols = values.shape
    block = values.new_full((2 * rows + 1, 3 * cols + 2), torch.nan)
    inside = block[1 : 1 + 2 * rows : 2, 2 : 2 + 3 * cols : 3]
    inside.copy_(values)
    return inside


def _odd(values: torch.Tensor) -> torch.Tensor:
    """One element behind an aligned address, rows further apart than they are long."""
    rows, cols = values.shape
    flat = values.new_full((rows * (cols + 3) + 1,), torch.nan)
    inside = flat[1:].view(rows, cols + 3)[:, :cols]
    inside.copy_(values)
    return inside


def _repeated(values: torch.Tensor) -> torch.Tensor:
    """The first row in place of every row, without memory of its own (a stride of 0)."""
    return values[:1].expand_as(values)


_LAYOUTS: tuple[Callable[[torch.Tensor], torch.Tensor], ...] = (
    _plain,
    _transposed,
    _spread,
    _odd,
    _repeated,
)


class BackendContract(Contract):
    """``Backend.multiply``: right for every dtype, stride and size, and writes nowhere else.

    ``backend``: a name, ``"module:attribute"``; ``device``: of the tensors.
    """

    section = "backend"
    backend: str = "eager"
    device: str = "cpu"

    def test_it_says_what_it_is(self) -> None:
        """A backend has a name, and states the version of the contracts it was written for."""
        made = self._made()
        require(bool(made.name), f"name is {made.name!r}")
        require(made.interface == INTERFACE, f"interface is {made.interface}")

    def test_it_supports_every_pair_of_dtypes(self) -> None:
        """``supports`` is None for what can be served, else a sentence; all dtypes are served."""
        for dtype, out_dtype in _pairs():
            problem = Problem(5, 33, 7, dtype, out_dtype, torch.device(self.device))
            found = self._made().supports(problem)
            require(found is None, f"{_name((dtype, out_dtype))} is refused: {found!r}")

    def test_small_products_are_exact(self) -> None:
        """``out`` is ``a @ b.T``, for every pair of dtypes: exact where every sum is."""
        for pair in _pairs():
            for m, n, k in _SMALL:
                case = Case((m,), n, k, *pair)
                self._exact(case.a(0), case.b(), pair[1], f"{_name(pair)} {(m, n, k)}")

    def test_strides_are_arbitrary(self) -> None:
        """Strides of ``a`` and ``b`` are arbitrary: transposed, spread, odd, repeated."""
        for pair in _pairs():
            case = Case((7,), 6, 33, *pair)
            for left in _LAYOUTS:
                for right in _LAYOUTS:
                    a, b = left(self._here(case.a(0))), right(self._here(case.b()))
                    what = f"{_name(pair)}, a {left.__name__[1:]}, b {right.__name__[1:]}"
                    self._exact(a, b, pair[1], what)

    def test_inputs_are_left_alone(self) -> None:
        """``multiply`` changes neither input."""
        for pair in _pairs():
            case = Case((7,), 6, 33, *pair)
            a, b = self._here(case.a(0)), self._here(case.b())
            self._exact(a, b, pair[1], _name(pair))
            same = torch.equal(a.cpu(), case.a(0)) and torch.equal(b.cpu(), case.b())
            require(same, f"{_name(pair)}: an input has changed")

    def test_nothing_is_written_beside_out(self) -> None:
        """``out`` may lie inside a larger matrix: what surrounds it is left alone."""
        for pair in _pairs():
            for m, n, k in (*_SMALL, (3, 0, 5), (0, 3, 5), (4, 5, 0)):
                case = Case((m,), n, k, *pair)
                around = torch.full((m + 3, n + 5), torch.nan, dtype=pair[1], device=self.device)
                inside = around[1 : 1 + m, 2 : 2 + n]
                inside.zero_()
                self._made().multiply(self._here(case.a(0)), self._here(case.b()), inside)
                lost = around.numel() - m * n - int(around.isnan().sum())
                require(not lost, f"{_name(pair)} {(m, n, k)}: {lost} elements beside out changed")

    def test_empty_sizes_are_no_error(self) -> None:
        """``m``, ``n`` and ``k`` may be 0."""
        for pair in _pairs():
            for m, n, k in ((0, 5, 8), (4, 0, 8), (0, 0, 8), (0, 5, 0), (4, 0, 0), (0, 0, 0)):
                case = Case((m,), n, k, *pair)
                self._exact(case.a(0), case.b(), pair[1], f"{_name(pair)} {(m, n, k)}")

    def test_a_product_over_nothing_is_positive_zero(self) -> None:
        """With ``k == 0`` the result is +0.0, whatever ``out`` held."""
        for pair in _pairs():
            for before in (torch.nan, 7.0, -0.0):
                case = Case((3,), 4, 0, *pair)
                out = torch.full((3, 4), before, dtype=pair[1], device=self.device)
                self._made().multiply(self._here(case.a(0)), self._here(case.b()), out)
                bad = int((out != 0).sum()) + int(out.signbit().sum())
                require(not bad, f"{_name(pair)}: {before} became {out.flatten()[0].item()}")

    def test_sums_are_kept_in_float32(self) -> None:
        """Accumulates in float32 at least: long sums err by what that costs, and no more."""
        for pair in _pairs():
            m, n, k = _LONG
            case = Case((m,), n, k, *pair, kind="normal")
            error = relative_l2(self._product(case.a(0), case.b(), pair[1]).cpu(), case.reference())
            limit = limit_l2(k, pair[1], m * n)
            require(
                error <= limit, f"{_name(pair)}: relative L2 error {error:.2e} over {limit:.2e}"
            )

    def test_small_terms_survive_beside_large_ones(self) -> None:
        """Accumulates in float32 at least: a small term is not lost in a sum that cancels."""
        for pair in _pairs():
            # A bfloat16 or float16 sum would drop or round the ones.
            a = torch.ones(2, 257, dtype=pair[0])
            b = torch.ones(3, 257, dtype=pair[0])
            b[:, 0], b[:, -1] = 4096.0, -4096.0
            got = span(self._product(a, b, pair[1]))
            require(got == (255, 255), f"{_name(pair)}: 4096 + 255 ones - 4096 gave {got}")

    def test_results_are_rounded_once(self) -> None:
        """Rounds once, to ``out``'s dtype: within half a unit in the last place of the sum."""
        for pair in _pairs():
            case = Case((16,), 40, 1000, *pair, kind="normal")
            a, b = case.a(0).double(), case.b().double()
            error = (self._product(case.a(0), case.b(), pair[1]).cpu().double() - a @ b.T).abs()
            half = torch.finfo(pair[1]).eps / 2
            allowed = half * (a @ b.T).abs() + 1000 * 2.0**-24 * (a.abs() @ b.abs().T)
            over = int((error > allowed).sum())
            require(not over, f"{_name(pair)}: {over} elements are off by more than one rounding")

    def test_infinities_and_nan_are_kept(self) -> None:
        """An infinity or NaN in ``a`` shows in its own row and in no other."""
        for pair in _pairs():
            a, b = torch.ones(3, 4, dtype=pair[0]), torch.ones(5, 4, dtype=pair[0])
            a[1, 2], a[2, 0] = torch.inf, torch.nan
            out = self._product(a, b, pair[1])
            kept = out[0].eq(4).all() and out[1].eq(torch.inf).all() and out[2].isnan().all()
            require(
                bool(kept), f"{_name(pair)}: rows of 4, inf and nan became {out[:, 0].tolist()}"
            )

    # What the clauses use.

    def _made(self) -> Backend:
        return cast(Backend, plugins.find("backend", self.backend))

    def _here(self, values: torch.Tensor) -> torch.Tensor:
        return values.to(self.device)

    def _product(self, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
        shape = (a.shape[0], b.shape[0])
        out = torch.full(shape, torch.nan, dtype=out_dtype, device=self.device)
        self._made().multiply(self._here(a), self._here(b), out)
        return out

    def _exact(self, a: torch.Tensor, b: torch.Tensor, out_dtype: torch.dtype, what: str) -> None:
        want = a.cpu().double() @ b.cpu().double().T
        got = self._product(a, b, out_dtype).cpu().double()
        wrong = (got != want).nonzero()
        if len(wrong):
            at = tuple(wrong[0].tolist())
            raise AssertionError(
                f"{what}: {len(wrong)} of {got.numel()} elements differ, first at {at}: "
                f"{got[at].item()} instead of {want[at].item()}"
            )


def _pairs() -> Iterator[_Pair]:
    for dtype in INPUT_DTYPES:
        for out_dtype in dict.fromkeys((dtype, torch.float32)):
            yield dtype, out_dtype


def _name(pair: _Pair) -> str:
    return f"{dtype_name(pair[0])} -> {dtype_name(pair[1])}"
