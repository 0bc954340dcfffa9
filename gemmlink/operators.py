"""Prepared operations: allocate and agree once, then call many times.

| class | function form | what a rank gets |
| --- | --- | --- |
| ``GemmAllGather`` | ``gemm_all_gather`` | the products of all ranks, stacked |
| ``GemmAllToAll`` | ``gemm_all_to_all`` | its columns of all ranks' products, stacked |
| ``GemmReduceScatter`` | ``gemm_reduce_scatter`` | its band of rows of the sum of all products |
| ``GemmAllReduce`` | ``gemm_all_reduce`` | the sum of all products |

In all of them a is each rank's own ``(M, k)`` and b is ``(n, k)``. Where products are added, ranks
usually hold parts of one larger K: then b is each rank's own, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gemmlink.core.launch import Outcome
from gemmlink.prepared import Common, Prepared
from gemmlink.spec.operations import checked_extent
from gemmlink.untraced import untraced

if TYPE_CHECKING:
    from typing_extensions import Unpack


class GemmAllGather(Prepared):
    """``out[rows of rank r] = a_r @ b.T`` on every rank: a product followed by an all-gather.

    ``wire_dtype=torch.float8_e4m3fn``: rows travel, and arrive everywhere and at home, rounded to
    fp8 with a float32 scale for each row: a quarter to half of the bytes, and a relative L2 error
    of some 2.6e-2, which ``explain`` names and a warning at set-up. All other arguments are those
    of ``Prepared``. The window takes ``world * max_m * n`` elements of ``out_dtype`` on every rank.
    """

    operation = "all_gather"

    def __init__(
        self,
        n: int,
        k: int,
        max_m: int,
        dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        group: Any = None,
        *,
        wire_dtype: torch.dtype | None = None,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            n,
            k,
            max_m,
            dtype,
            out_dtype,
            device,
            group,
            options={"wire": wire_dtype},
            flags={},
            **common,
        )

    @untraced
    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        rows: Sequence[int] | None = None,
    ) -> torch.Tensor:
        """Collective: multiply and gather. Returns a ``(sum of all M, n)`` tensor.

        a: ``(M, k)``, M from 0 to max_m; b: ``(n, k)``; any strides. ``out``: where to put the
        result, any strides, not overlapping an input; the same tensor is returned. ``rows``: every
        rank's M, if the caller knows them; otherwise ranks tell each other.

        The result is the caller's own memory. Synchronous on CPU tensors. Raises, on every rank,
        ``InvalidArgument`` when some rank's arguments are wrong or do not agree (the operation
        stays usable) and ``PeerTimeout`` or ``PeerLost`` when a rank does not come (it does not).
        """
        return self._call(a, b, out, rows).result


class AllToAllResult(NamedTuple):
    """What an all-to-all gives a rank. All three are the caller's own memory.

    ``received``: ``(sum of all M, extent / world)``, this rank's columns of every product, blocks
    in group-rank order. ``local``: ``(M, n - extent)``, the columns of the own product that stay.
    ``product``: the whole own product ``(M, n)``, of which ``local`` is then a view, or None.
    """

    received: torch.Tensor
    local: torch.Tensor
    product: torch.Tensor | None


class GemmAllToAll(Prepared):
    """Rank j gets columns ``[j * s, (j + 1) * s)`` of every ``a_r @ b.T``, ``s = extent / world``.

    ``extent``: leading columns that travel, 0 to n (the default), a multiple of the world; the rest
    stays with its rank. ``keep_product``: the whole own product is returned, too. All other
    arguments are those of ``Prepared``. The window takes at most ``2 * max_m * extent`` elements;
    besides, a split form keeps ``max_m * n`` for the product that it deals out.
    """

    operation = "all_to_all"

    def __init__(
        self,
        n: int,
        k: int,
        max_m: int,
        dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        group: Any = None,
        *,
        extent: int | None = None,
        keep_product: bool = False,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            n,
            k,
            max_m,
            dtype,
            out_dtype,
            device,
            group,
            options={"extent": extent},
            flags={"keep_product": keep_product},
            **common,
        )
        self._extent = checked_extent(self.group.world, n, extent)

    @untraced
    def __call__(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        rows: Sequence[int] | None = None,
    ) -> AllToAllResult:
        """Collective: multiply and exchange columns. a, b, ``rows`` and errors as in an all-gather.

        ``out``: where to put ``received``, any strides, not overlapping an input. ``local`` and
        ``product`` are fresh, and the caller's to write to as soon as the call returns: peers and
        copy engines read from the window only.
        """
        return self.named(self._call(a, b, out, rows))

    def named(self, outcome: Outcome) -> AllToAllResult:
        """The parts of an outcome."""
        first = self.launch.program.memory.local_cols[0]
        local = outcome.local[:, max(0, self._extent - first) :]
        keeps = self._choice.keep_product
        return AllToAllResult(outcome.result, local, outcome.local if keeps else None)


class GemmReduceScatter(Prepared):
    """Rank i gets band i of ``a_0 @ b_0.T + a_1 @ b_1.T + ...``; M must be equal on all ranks.

    With ``q, r = divmod(M, world)`` band i has ``q + (i < r)`` rows, in the order of the ranks.
    Products travel in ``out_dtype`` and are added in float32, rank 0's first; the sum is rounded
    once. ``deterministic=False`` leaves the order to the mode: ``collective`` then uses the
    library's own reduction, which may also round in between; other modes keep the order. All other
    arguments are those of ``Prepared``.
    """

    operation = "reduce_scatter"

    def __init__(
        self,
        n: int,
        k: int,
        max_m: int,
        dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        group: Any = None,
        *,
        deterministic: bool = True,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            n,
            k,
            max_m,
            dtype,
            out_dtype,
            device,
            group,
            options={},
            flags={"deterministic": deterministic},
            **common,
        )

    @untraced
    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Collective: multiply, add, and return this rank's band of rows, ``(rows, n)``.

        a: ``(M, k)`` with the same M on every rank, 0 to max_m; b: ``(n, k)``; any strides.
        ``out``: where to put the band, any strides, not overlapping an input. Errors as in an
        all-gather.
        """
        return self._call(a, b, out, None).result


class GemmAllReduce(Prepared):
    """``a_0 @ b_0.T + a_1 @ b_1.T + ...`` on every rank; M must be equal on all ranks.

    Bands of rows are summed as in ``GemmReduceScatter`` and gathered as in ``GemmAllGather``, so
    all ranks hold the same bits. ``deterministic`` and ``wire_dtype`` (for the gathered bands) are
    as there, all other arguments those of ``Prepared``.
    """

    operation = "all_reduce"

    def __init__(
        self,
        n: int,
        k: int,
        max_m: int,
        dtype: torch.dtype = torch.float32,
        out_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        group: Any = None,
        *,
        wire_dtype: torch.dtype | None = None,
        deterministic: bool = True,
        **common: Unpack[Common],
    ) -> None:
        super().__init__(
            n,
            k,
            max_m,
            dtype,
            out_dtype,
            device,
            group,
            options={"wire": wire_dtype},
            flags={"deterministic": deterministic},
            **common,
        )

    @untraced
    def __call__(
        self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Collective: multiply, add, and return the sum, ``(M, n)``. Otherwise as the band form."""
        return self._call(a, b, out, None).result
