"""``quantize.scales`` and ``quantize.ue8m0``: where each scale lies, and what is refused."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gemmlink import InvalidArgument
from gemmlink.quantize import (
    Block1x128,
    Block128x128,
    Mx1x32,
    Mx1x32Packed,
    Mx32x32,
    Mx32x32Packed,
    PerChannel,
    PerToken,
    Scale,
)

E8M0 = torch.float8_e8m0fnu
sizes = st.integers(0, 9)


def _numbers(*shape: int) -> torch.Tensor:
    """float32, each element another."""
    count = torch.Size(shape).numel()
    return torch.arange(1.0, count + 1).view(shape)


def _codes(seed: int, *shape: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, shape, generator=generator).to(torch.uint8)


def _says(make: Callable[[], object], rule: str, came: str, fix: str = "") -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert (caught.value.rule, caught.value.came, caught.value.fix) == (rule, came, fix)


# What a row's scales are, by the index formula of each layout.


@given(rows=sizes)
def test_one_scale_a_row(rows: int) -> None:
    for kind in (PerToken, PerChannel):
        scale = kind(_numbers(rows))
        scale.check(rows, 77)
        got = scale.of_rows(0, rows)
        assert got.tolist() == [[scale.tensor.tolist()[row]] for row in range(rows)]


def test_one_scale_a_row_in_its_other_shapes() -> None:
    line = _numbers(4)
    shapes = [PerToken(line[:, None]), PerChannel(line[:, None]), PerChannel(line[None])]
    for scale in shapes:
        assert scale.tensor.tolist() == line.tolist()
        assert scale.tensor.data_ptr() == line.data_ptr(), "a copy"
    _says(lambda: PerToken(line[None]), "PerToken must have 1 dimension", "shape (1, 4)")


@given(m=sizes, blocks=sizes)
def test_block_1x128_is_k_block_major(m: int, blocks: int) -> None:
    scale = Block1x128(_numbers(blocks, m))
    scale.check(m, 128 * blocks)
    memory = scale.tensor.flatten().tolist()
    want = [[memory[kb * m + row] for kb in range(blocks)] for row in range(m)]
    assert scale.of_rows(0, m).tolist() == want


@given(high=st.integers(0, 3), blocks=sizes)
def test_block_128x128_is_row_major(high: int, blocks: int) -> None:
    scale = Block128x128(_numbers(high, blocks))
    scale.check(128 * high, 128 * blocks)
    memory = scale.tensor.flatten().tolist()
    want = [[memory[(n // 128) * blocks + kb] for kb in range(blocks)] for n in range(128 * high)]
    assert scale.of_rows(0, 128 * high).tolist() == want


@given(rows=sizes, blocks=sizes, seed=st.integers(0, 99))
def test_plain_ue8m0_is_row_major(rows: int, blocks: int, seed: int) -> None:
    codes = _codes(seed, rows, blocks)
    bytes_ = codes.flatten().tolist()
    for kind, high in ((Mx1x32, 1), (Mx32x32, 32)):
        scale = kind(codes)
        scale.check(high * rows, 32 * blocks)
        got = scale.of_rows(0, high * rows).nan_to_num(-1.0).tolist()
        powers = [-1.0 if c == 255 else 2.0 ** (c - 127) for c in bytes_]
        want = [powers[(r // high) * blocks : (r // high + 1) * blocks] for r in range(high * rows)]
        assert got == want


@pytest.mark.parametrize(
    ("scale", "rows"),
    [
        (PerToken(_numbers(300)), 300),
        (Block1x128(_numbers(3, 300)), 300),
        (Block128x128(_numbers(3, 2)), 384),
        (Mx1x32(_codes(1, 300, 3)), 300),
        (Mx32x32(_codes(2, 9, 3)), 288),
    ],
    ids=lambda value: type(value).__name__,
)
def test_some_rows_are_a_part_of_all_rows(scale: Scale, rows: int) -> None:
    whole = scale.of_rows(0, rows).nan_to_num(-1.0)
    for first, last in ((0, 1), (31, 33), (127, 257), (rows - 1, rows)):
        part = scale.of_rows(first, last).nan_to_num(-1.0)
        assert part.tolist() == whole[first:last].tolist(), f"rows {first} to {last}"


def test_ue8m0_takes_either_dtype_and_shares_memory() -> None:
    codes = _codes(3, 4, 5)
    for kind in (Mx1x32, Mx32x32):
        for given_ in (codes, codes.view(E8M0)):
            scale = kind(given_)
            assert scale.tensor.dtype == torch.uint8
            assert scale.tensor.data_ptr() == codes.data_ptr(), "a copy"


def test_ue8m0_ends() -> None:
    """The smallest and largest powers, one, and NaN."""
    got = Mx1x32(torch.tensor([[0, 1, 127, 254, 255]], dtype=torch.uint8)).of_rows(0, 1)
    assert got[0, :4].tolist() == [2.0**-127, 2.0**-126, 1.0, 2.0**127]
    assert bool(got[0, 4].isnan())


# Packed layouts.


@given(groups=st.integers(0, 4), blocks=sizes, seed=st.integers(0, 99))
def test_packed_a_follows_the_index_formula(groups: int, blocks: int, seed: int) -> None:
    m = 64 * groups
    codes = _codes(seed, m, blocks)
    packed = Mx1x32(codes).pack()
    packed.check(m, 32 * blocks)
    assert packed.tensor.shape == (blocks, m // 4)
    words, plain = packed.tensor.flatten().tolist(), codes.tolist()
    for row in range(m):
        for kb in range(blocks):
            group, tile, lane = row // 64, row % 64 // 16, row % 16
            word = words[kb * (m // 4) + group * 16 + lane]
            assert word >> 8 * tile & 0xFF == plain[row][kb], f"row {row}, block {kb}"


@given(groups=st.integers(0, 4), blocks=sizes, seed=st.integers(0, 99))
def test_packed_a_as_bytes_is_the_order_of_the_fact_sheet(
    groups: int, blocks: int, seed: int
) -> None:
    """K-block-major [K/32, M], and inside 64 rows place ``r * 4 + ti`` for row ``ti * 16 + r``."""
    m = 64 * groups
    codes = _codes(seed, m, blocks)
    places = Mx1x32(codes).pack().tensor.view(torch.uint8).tolist()
    for row in range(m):
        start, (ti, r) = row // 64 * 64, divmod(row % 64, 16)
        assert [line[start + r * 4 + ti] for line in places] == codes[row].tolist()


@given(high=sizes, blocks=sizes, seed=st.integers(0, 99))
def test_packed_b_is_transposed_and_widened(high: int, blocks: int, seed: int) -> None:
    codes = _codes(seed, high, blocks)
    packed = Mx32x32(codes).pack()
    packed.check(32 * high, 32 * blocks)
    words = packed.tensor.flatten().tolist()
    want = [codes.tolist()[group][kb] for kb in range(blocks) for group in range(high)]
    assert words == want


@given(groups=st.integers(0, 4), blocks=sizes, seed=st.integers(0, 99))
def test_unpack_undoes_pack_and_pack_undoes_unpack(groups: int, blocks: int, seed: int) -> None:
    codes = _codes(seed, 64 * groups, blocks)
    for plain in (Mx1x32(codes), Mx32x32(codes)):
        packed = plain.pack()
        assert torch.equal(packed.unpack().tensor, codes)
        assert torch.equal(packed.plain().tensor, codes)
        assert torch.equal(packed.unpack().pack().tensor, packed.tensor)
    words = _codes(seed + 1, 64 * groups * blocks).view(torch.int32).view(blocks, 16 * groups)
    assert torch.equal(Mx1x32Packed(words).unpack().pack().tensor, words)


def test_plain_scales_are_their_own_plain_form() -> None:
    for scale in (PerToken(_numbers(2)), Block1x128(_numbers(1, 2)), Mx32x32(_codes(1, 2, 2))):
        assert scale.plain() is scale


@pytest.mark.parametrize(("m", "nearest"), [(65, "64 or 128"), (3, "64")])
def test_packing_needs_whole_groups_of_rows(m: int, nearest: str) -> None:
    above = nearest.split()[-1]
    fix = f"The nearest is {nearest}; pad with zeros to {above} before quantising."
    rule = "M must be a multiple of 64"
    _says(lambda: Mx1x32(_codes(1, m, 2)).pack(), rule, f"M={m}", fix)
    packed = Mx1x32Packed(torch.zeros(2, 32, dtype=torch.int32))
    _says(lambda: packed.check(m, 64), rule, f"M={m}", fix)


def test_unpacking_needs_whole_groups_of_rows() -> None:
    fix = "The nearest is 64 or 128; pad with zeros to 128 before quantising."
    scale = Mx1x32Packed(torch.zeros(2, 17, dtype=torch.int32))
    _says(scale.unpack, "M must be a multiple of 64", "M=68", fix)


@pytest.mark.parametrize("word", [256, -1, 0x7F7F7F7F])
def test_a_word_with_more_than_a_code_is_refused(word: int) -> None:
    words = torch.tensor([[0, 255], [127, word]], dtype=torch.int32)
    _says(
        Mx32x32Packed(words).unpack,
        "Mx32x32Packed must hold one ue8m0 code, 0 to 255, in each word",
        str(word),
        "Bytes packed four to a word are another layout.",
    )


# Spellings of A's block scales.

M, BLOCKS, K = 6, 3, 384


def _by_row() -> torch.Tensor:
    """``[row, kb]``, row-major: what a quantiser that thinks of rows has."""
    return _numbers(M, BLOCKS)


def _padded_column_major() -> torch.Tensor:
    around = torch.full((BLOCKS, 8), float("nan"))
    around[:, :M] = _by_row().T
    return around.T[:M]


ACCEPTED = {
    "flat": lambda: _by_row().T.flatten(),
    "flat and strided": lambda: torch.stack([_by_row().T.flatten()] * 2, 1)[:, 0],
    "[K/128, M]": lambda: _by_row().T.contiguous(),
    "[K/128, M] with padded rows": lambda: _padded_column_major().T,
    "[M, K/128] column-major": lambda: _by_row().T.contiguous().T,
    "[M, K/128] column-major with padding": _padded_column_major,
}


@pytest.mark.parametrize("spelling", ACCEPTED)
def test_accepted_spellings_mean_the_same(spelling: str) -> None:
    scale = Block1x128.from_tensor(ACCEPTED[spelling](), M, K)
    scale.check(M, K)
    assert scale.tensor.is_contiguous()
    assert scale.of_rows(0, M).tolist() == _by_row().tolist()


def test_one_scale_for_every_k_block_may_have_a_pitch_of_0() -> None:
    one = _numbers(M)
    for scale in (one.expand(BLOCKS, M), one.expand(BLOCKS, M).T):
        made = Block1x128.from_tensor(scale, M, K)
        assert made.of_rows(0, M).tolist() == [[value] * BLOCKS for value in one.tolist()]


@pytest.mark.parametrize("spelling", ["flat", "[K/128, M]", "[M, K/128] column-major"])
def test_the_kernels_own_order_is_not_copied(spelling: str) -> None:
    given_ = ACCEPTED[spelling]()
    assert Block1x128.from_tensor(given_, M, K).tensor.data_ptr() == given_.data_ptr()


def _slice_of_padded_rows() -> torch.Tensor:
    return torch.cat([_by_row(), _by_row()])[:M]


def _slice_of_padded_columns() -> torch.Tensor:
    return torch.cat([_by_row(), _by_row()], 1)[:, :BLOCKS]


def _one_row_repeated() -> torch.Tensor:
    return _by_row()[:1].expand(M, BLOCKS)


def _one_column_repeated() -> torch.Tensor:
    return _by_row()[:, :1].expand(M, BLOCKS)


@pytest.mark.parametrize(
    "make",
    [
        _by_row,
        _slice_of_padded_rows,
        _slice_of_padded_columns,
        _one_row_repeated,
        _one_column_repeated,
    ],
)
def test_row_major_is_refused_with_both_readings(make: Callable[[], torch.Tensor]) -> None:
    scale = make()
    _says(
        lambda: Block1x128.from_tensor(scale, M, K),
        "A's block scales in shape [M, K/128] must be column-major (stride (1, M)); row-major "
        "memory of that shape has two readings",
        f"shape (6, 3), stride {scale.stride()} for M=6, K=384",
        "If scale[row, kb] is the scale of that row and K block, say "
        "Block1x128.from_row_major(scale). If the memory is in the order kb * M + row already and "
        "the shape is only a label, say Block1x128(scale.reshape(3, 6)).",
    )


def test_what_the_error_says_works() -> None:
    """Both ways out, each with the values of its reading; they differ."""
    by_value = Block1x128.from_row_major(_by_row())
    assert by_value.of_rows(0, M).tolist() == _by_row().tolist()
    labelled = ACCEPTED["[K/128, M]"]().reshape(M, BLOCKS)
    by_memory = Block1x128(labelled.reshape(BLOCKS, M))
    assert by_memory.of_rows(0, M).tolist() == _by_row().tolist()
    assert by_memory.of_rows(0, M).tolist() != labelled.tolist()


def test_from_row_major_goes_by_index_whatever_the_strides() -> None:
    for make in (_by_row, _padded_column_major, _slice_of_padded_columns, ACCEPTED["flat"]):
        given_ = make()
        if given_.dim() == 2:
            assert Block1x128.from_row_major(given_).of_rows(0, M).tolist() == given_.tolist()
        else:
            _says(
                lambda: Block1x128.from_row_major(ACCEPTED["flat"]()),
                "scale must be (M, K/128)",
                "shape (18,)",
            )


def test_k_block_major_without_unit_stride_along_m_is_refused() -> None:
    _says(
        lambda: Block1x128.from_tensor(_by_row().T, M, K),
        "A's block scales in shape [K/128, M] must have unit stride along M",
        "shape (3, 6), stride (1, 3)",
        "If scale[kb, row] is the scale of that row and K block, say "
        "Block1x128(scale.contiguous()).",
    )


@pytest.mark.parametrize("stride", [(3, 1), (1, 3)])
def test_a_square_is_refused_in_either_order(stride: tuple[int, int]) -> None:
    """M = K/128: [K/128, M] and [M, K/128] are the same shape, so neither order can be told."""
    scale = _numbers(9).as_strided((3, 3), stride)
    _says(
        lambda: Block1x128.from_tensor(scale, 3, 384),
        "A's block scales must show which dimension is M; here M equals K/128, so the shape has "
        "two readings",
        f"shape (3, 3), stride {stride} for M=3, K=384",
        "If scale[row, kb] is the scale of that row and K block, say "
        "Block1x128.from_row_major(scale). If scale[kb, row] is, say "
        "Block1x128(scale.contiguous()).",
    )
    by_row = Block1x128.from_row_major(scale).of_rows(0, 3)
    assert by_row.tolist() == scale.tolist()
    assert Block1x128(scale.contiguous()).of_rows(0, 3).tolist() == scale.T.tolist()


@pytest.mark.parametrize(("m", "blocks"), [(1, 5), (5, 1), (1, 1), (0, 5), (5, 0), (0, 0), (1, 0)])
def test_with_one_row_or_one_block_both_orders_are_one(m: int, blocks: int) -> None:
    """Row-major and column-major are the same memory, so nothing is ambiguous."""
    by_row = _numbers(m, blocks)
    spellings = [by_row, by_row.T, by_row.T.contiguous().T, by_row.flatten()]
    spellings.append(torch.stack([by_row, by_row], 2)[:, :, 0])
    for given_ in spellings:
        scale = Block1x128.from_tensor(given_, m, 128 * blocks)
        scale.check(m, 128 * blocks)
        assert scale.of_rows(0, m).tolist() == by_row.tolist()


@pytest.mark.parametrize(
    "shape", [(1, 6, 3), (6, 3, 1), (17,), (36,), (6, 4), (3, 5), (9, 2), (6, 6), (3, 3), ()]
)
def test_other_shapes_are_refused(shape: tuple[int, ...]) -> None:
    _says(
        lambda: Block1x128.from_tensor(torch.ones(shape), M, K),
        "A's block scales must be flat (18,), (3, 6), or column-major (6, 3), which is [K/128, M] "
        "and [M, K/128]",
        f"shape {shape}",
    )


def test_from_tensor_needs_whole_blocks() -> None:
    _says(
        lambda: Block1x128.from_tensor(torch.ones(6), 6, 100),
        "K must be a multiple of 128",
        "K=100",
        "The nearest is 128; pad with zeros to 128 before quantising.",
    )


@given(m=st.integers(2, 9), blocks=st.integers(2, 9))
def test_no_accepted_tensor_has_another_meaning(m: int, blocks: int) -> None:
    """Whatever strides: what is accepted keeps the value at each index of its shape."""
    for shape in {(m, blocks), (blocks, m)}:
        for scale in (_numbers(*shape), _numbers(*shape).T.contiguous().T):
            try:
                made = Block1x128.from_tensor(scale, m, 128 * blocks)
            except InvalidArgument:
                continue
            assert m != blocks, "a square cannot be told"
            want = scale if shape == (m, blocks) else scale.T
            assert made.of_rows(0, m).tolist() == want.tolist()


# What no scale object holds.

FLOATS = [PerToken, PerChannel, Block1x128, Block128x128]
KINDS = [*FLOATS, Mx1x32, Mx32x32, Mx1x32Packed, Mx32x32Packed]


def _a_tensor(kind: type[Scale]) -> torch.Tensor:
    return torch.zeros([4] * kind.dims, dtype=kind.dtypes[0])


@pytest.mark.parametrize("kind", KINDS)
def test_dtype_of_each_type(kind: type[Scale]) -> None:
    dtype = torch.float64 if kind in FLOATS else torch.float32
    name = kind.__name__
    rule = "float32" if kind in FLOATS else "int32"
    rule = rule if kind in FLOATS or name.endswith("Packed") else "uint8 or float8_e8m0fnu"
    wrong = _a_tensor(kind).to(dtype)
    _says(lambda: kind(wrong), f"{name} must be {rule}", str(dtype).removeprefix("torch."))
    _says(lambda: kind([1.0]), f"{name} must hold a tensor", "list")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_dimensions_of_each_type(kind: type[Scale]) -> None:
    want = f"{kind.dims} dimension{'s' if kind.dims == 2 else ''}"
    _says(
        lambda: kind(_a_tensor(kind)[None, None]),
        f"{kind.__name__} must have {want}",
        f"shape {(1, 1, *[4] * kind.dims)}",
    )


@pytest.mark.parametrize("kind", KINDS)
def test_every_type_is_contiguous(kind: type[Scale]) -> None:
    scale = _a_tensor(kind)[::2]
    wide = scale if kind.dims == 1 else _a_tensor(kind)[:, ::2]
    _says(
        lambda: kind(wide),
        f"{kind.__name__} must be contiguous, since kernels read it by index and not by stride",
        f"shape {tuple(wide.shape)}, stride {wide.stride()}",
        "Pass tensor.contiguous() if the element at each index is right.",
    )


OWN_ROWS = "Every rank passes the scales of its own rows, and only those."


@pytest.mark.parametrize(
    ("scale", "rows", "want", "advice"),
    [
        (PerToken(torch.ones(8)), 4, (4,), OWN_ROWS),
        (PerChannel(torch.ones(1)), 4, (4,), OWN_ROWS),
        (
            Block1x128(torch.ones(6, 2)),
            6,
            (2, 6),
            "The first dimension is K/128; Block1x128.from_tensor takes the other spellings.",
        ),
        (Block128x128(torch.ones(2, 3)), 384, (3, 2), "The first dimension is N/128."),
        (Mx1x32(_codes(1, 8, 6)), 6, (6, 8), "The first dimension is M."),
        (Mx32x32(_codes(1, 8, 6)), 192, (6, 8), "The first dimension is N/32."),
        (
            Mx1x32Packed(torch.zeros(16, 8, dtype=torch.int32)),
            64,
            (8, 16),
            "The first dimension is K/32; Mx1x32(codes).pack() makes it.",
        ),
        (
            Mx32x32Packed(torch.zeros(6, 8, dtype=torch.int32)),
            192,
            (8, 6),
            "The first dimension is K/32; Mx32x32(codes).pack() makes it.",
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_scales_of_another_shape_are_refused(
    scale: Scale, rows: int, want: tuple[int, ...], advice: str
) -> None:
    _says(
        lambda: scale.check(rows, 256),
        f"{type(scale).__name__} of a ({rows}, 256) operand must have shape {want}",
        f"{tuple(scale.tensor.shape)}",
        advice,
    )
