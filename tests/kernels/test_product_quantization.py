"""Scores by codes: Triton and PyTorch against loops over rows in float64, over odd sizes, groups, views and dtypes."""

import math

import pytest
import torch

from kvbench.kernels.product_quantization import choose_by_codes, code_scores, count_pairs, encode, find_centroids
from kvbench.kernels.row_selection import top_k_indices
from kvbench.kernels.softmax_extras import SoftmaxExtras
from tests.support.compile_kernels import list_kernel
from tests.support.kernel_checks import BOTH
from tests.support.selection import only_in_full

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CASES = {  # batch, KV heads, group, parts, dim, centroids, rows with codes, first row, row after the last candidate
    "pairs": (2, 3, 4, 2, 128, 64, 130, 32, 140),
    "quarters": (1, 2, 3, 4, 96, 256, 70, 5, 75),
    "few centroids": (1, 1, 7, 2, 64, 16, 40, 0, 33),
    "fewer than 2^b": (2, 1, 1, 4, 64, 11, 11, 3, 14),
    "one candidate": (1, 2, 4, 2, 64, 64, 9, 4, 5),
    "no candidate": (1, 2, 3, 2, 64, 64, 9, 4, 4),
    "one row": (1, 1, 1, 1, 16, 1, 1, 0, 1),
    "more rows than a program has": (1, 2, 3, 2, 64, 64, 4100, 7, 4103),
    "a large group": (1, 1, 20, 3, 24, 30, 530, 1, 520),
}


def case(name, dtype):
    """Queries, codes and codebook as methods have them: the codes a part of a longer table, garbage behind `stop`."""
    batch, heads, group, parts, dim, count, rows, first, stop = CASES[name]
    draw = torch.Generator().manual_seed(rows + dim)
    queries = 2 * torch.randn(batch, heads * group, 1, dim, generator=draw)
    codebook = torch.randn(batch, heads, parts, count, dim // parts, generator=draw)
    codes = torch.randint(count, (batch, heads, parts, rows + 6), generator=draw, dtype=torch.uint8)[..., :rows]
    codes[..., stop - first :] = 255
    return queries.to(DEVICE, dtype)[:, :, 0], codes.to(DEVICE), codebook.to(DEVICE, dtype), first, stop


def score_by_loops(queries, codes, codebook, scaling, first, stop, cap=None):
    """Scores in float64, row by row; nan where there is no candidate."""
    batch, heads, parts, _, size = codebook.shape
    queries, codebook, codes = queries.double().cpu(), codebook.double().cpu(), codes.cpu().long()
    scores = torch.full((batch, heads, first + codes.shape[3]), math.nan, dtype=torch.float64)
    group = queries.shape[1] // heads
    for b in range(batch):
        for h in range(heads):
            total, keys = torch.zeros(stop - first, dtype=torch.float64), codebook.new_empty(stop - first, parts * size)
            for row, key in enumerate(keys):
                key[:] = torch.cat([codebook[b, h, part, codes[b, h, part, row]] for part in range(parts)])
            for query in queries[b, h * group : (h + 1) * group]:
                weights = keys @ query * scaling
                weights = weights if cap is None else cap * (weights / cap).tanh()
                weights = (weights - weights.max()).exp() if len(weights) else weights
                total += weights / weights.sum()
            scores[b, h, first:stop] = total
    return scores


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@BOTH
@pytest.mark.parametrize("name", CASES)
def test_scores_are_sums_of_probabilities(name, implementation, dtype):
    queries, codes, codebook, first, stop = case(name, dtype)
    scaling = queries.shape[2] ** -0.5
    given = queries, codes, codebook, scaling, first, torch.tensor(stop, device=DEVICE)
    found = code_scores(*given, implementation=implementation)
    exact = score_by_loops(queries, codes, codebook, scaling, first, stop)
    there = exact.isfinite()
    assert found.dtype == torch.float32 and found.shape == exact.shape
    assert (found.cpu()[~there] == -math.inf).all() and there.sum() == found[..., first:stop].numel()
    # a logit is off by 2^-24·d times its largest summands, and a probability by as much of itself
    sizes = queries.double().abs().sum(-1).amax() * codebook.double().abs().amax() * scaling
    close = 2.0**-24 * float(sizes) * 4 + 1e-6
    torch.testing.assert_close(found.cpu().double()[there], exact[there], rtol=close, atol=1e-30)
    assert torch.equal(found, code_scores(*given, implementation=implementation))


@BOTH
def test_capped_scores(implementation):
    queries, codes, codebook, first, stop = case("pairs", torch.float32)
    given = queries, codes, codebook, 0.3, first, torch.tensor(stop, device=DEVICE)
    found = code_scores(*given, extras=SoftmaxExtras(cap=0.8), implementation=implementation)[..., first:stop].cpu()
    expected = score_by_loops(queries, codes, codebook, 0.3, first, stop, cap=0.8)[..., first:stop]
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=0)


def test_float64_is_computed_in_float64():
    queries, codes, codebook, first, stop = case("pairs", torch.float64)
    found = code_scores(queries, codes, codebook, 0.1, first, torch.tensor(stop, device=DEVICE))
    exact = score_by_loops(queries, codes, codebook, 0.1, first, stop)
    assert found.dtype == torch.float64
    torch.testing.assert_close(found[..., first:stop].cpu(), exact[..., first:stop], rtol=1e-12, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_rank_as_in_the_reference(dtype):
    """Of rows with equal codes the scores are equal, bit by bit, wherever they lie. Logits here differ clearly."""
    draw = torch.Generator().manual_seed(0)
    queries, codebook = torch.zeros(1, 6, 64), torch.zeros(1, 2, 2, 64, 32)
    codebook[..., 0] = torch.randn(1, 2, 2, 64, generator=draw)
    queries[..., [0, 32]] = 1 + torch.rand(1, 6, 2, generator=draw)
    codes = torch.randint(64, (1, 2, 2, 3000), generator=draw, dtype=torch.uint8)
    codes[..., 1500:] = codes[..., :1500]
    found, expected = (
        code_scores(
            queries.to(device, dtype), codes.to(device), codebook.to(device, dtype), 1.0, 0,
            torch.tensor(3000, device=device), implementation=name,
        ).cpu()
        for name, device in (("triton", DEVICE), ("reference", "cpu"))
    )  # fmt: skip
    for scores in (found, expected):
        assert torch.equal(scores[..., :1500], scores[..., 1500:])
    for head in range(2):
        different = expected[0, head, :1500].unique()
        order = expected[0, head].argsort(descending=True, stable=True)
        ranked = found[0, head][order]
        gaps = expected[0, head][order].diff().abs() > 1e-5 * expected[0, head][order][1:]
        assert len(different) > 1000 and (ranked.diff() <= 0)[gaps].all()


@pytest.mark.parametrize("rows", [3000, only_in_full(18000)])
def test_the_rows_that_the_reference_chooses_are_chosen(rows):
    """Of few different combinations, so that most rows have equals and the older ones must come first."""
    draw = torch.Generator().manual_seed(rows)
    queries, codebook = torch.randn(1, 8, 64, generator=draw), torch.randn(1, 2, 2, 16, 32, generator=draw)
    codes, last = torch.randint(16, (1, 2, 2, rows), generator=draw, dtype=torch.uint8), torch.tensor(rows - 100)
    expected = code_scores(queries, codes, codebook, 0.125, 32, last, implementation="reference")
    given = queries.to(DEVICE), codes.to(DEVICE), codebook.to(DEVICE), 0.125, 32, last.to(DEVICE)
    found = code_scores(*given, implementation="triton")
    for k in (1, rows // 20):
        own = top_k_indices(found, k, implementation="triton").cpu()
        assert torch.equal(own, top_k_indices(expected, k, implementation="reference"))


@pytest.mark.parametrize("name", [only_in_full("pairs"), "a large group", "more rows than a program has"])
def test_neither_the_batch_nor_the_room_behind_the_rows_changes_a_bit(name):
    queries, codes, codebook, first, stop = case(name, torch.bfloat16)
    last = torch.tensor(stop, device=DEVICE)
    alone = code_scores(queries, codes, codebook, 0.2, first, last, implementation="triton")
    more = [torch.cat([own.flip(0), own]) for own in (queries, codes, codebook)]
    together = code_scores(*more, 0.2, first, last, implementation="triton")
    assert torch.equal(together[-len(alone) :], alone)
    wide = torch.cat([codes, codes.new_full((*codes.shape[:3], 2100), 255)], 3)
    found = code_scores(queries, wide, codebook, 0.2, first, last, implementation="triton")
    assert torch.equal(found[..., : alone.shape[2]], alone) and (found[..., alone.shape[2] :] == -math.inf).all()
    swapped = codes.transpose(0, 1).contiguous().transpose(0, 1)
    turned = queries.transpose(1, 2).contiguous().transpose(1, 2)
    assert torch.equal(code_scores(turned, swapped, codebook, 0.2, first, last, implementation="triton"), alone)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@BOTH
@pytest.mark.parametrize(
    "parts, dim, count, last", [(2, 128, 64, 8), (4, 96, 256, 5), (2, 64, 16, 20), (1, 24, 1, 7), (4, 64, 70, 12)]
)
def test_the_newest_row_alone_gets_codes(parts, dim, count, last, implementation, dtype):
    draw = torch.Generator().manual_seed(dim)
    keys = torch.randn(2, 3, 21, dim, generator=draw)
    codebook = torch.randn(2, 3, parts, count, dim // parts, generator=draw)
    codebook[:, :, :, count // 2 :] = codebook[:, :, :, : count - count // 2]  # of equal centroids the first is taken
    keys, codebook = keys.to(DEVICE, dtype), codebook.to(DEVICE, dtype)
    codes = torch.full((2, 3, parts, 17), 255, dtype=torch.uint8, device=DEVICE)
    codes[..., : last - 5] = 0  # of the rows before, whose logits are computed too
    expected = codes.clone()
    points = keys[:, :, last].double().unflatten(2, (parts, -1))
    for b in range(2):
        for h in range(3):
            for part in range(parts):
                away = (codebook[b, h, part].double() - points[b, h, part]).square().sum(-1)
                expected[b, h, part, last - 5] = away.argmin()
    encode_newest(keys, codes, codebook, 5, last, implementation)
    assert torch.equal(codes, expected)


def encode_newest(keys, codes, codebook, first, last, implementation=None):
    """Choose no rows, so that only the codes are written."""
    row, none = (
        torch.tensor(last, device=keys.device),
        torch.empty(*keys.shape[:2], 0, dtype=torch.int64, device=keys.device),
    )
    choose_by_codes(keys[:, :, 0], keys, codes, codebook, 1.0, first, row, row, none, implementation=implementation)


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, k", [(600, 1), (600, 150), (5000, 700), only_in_full(18000, 900), only_in_full(70000, 3500)]
)
def test_chosen_rows_are_those_with_the_largest_scores(rows, k, dtype, monkeypatch):
    """Short and long lists of candidates behind others, counted by one program or by several."""
    if rows == 5000:
        monkeypatch.setattr("kvbench.kernels.row_selection.triton.SINGLE", 10)
        monkeypatch.setattr("kvbench.kernels.product_quantization.triton.SINGLE", 10)
    draw, batch = torch.Generator().manual_seed(rows), 1 if rows > 1000 else 2
    keys = torch.randn(batch, 2, rows + 9, 64, generator=draw).to(DEVICE, dtype)
    queries = torch.randn(batch, 6, 64, generator=draw).to(DEVICE, dtype)
    codebook = torch.randn(batch, 2, 2, 16, 32, generator=draw).to(DEVICE, dtype)
    codes = torch.randint(16, (batch, 2, 2, rows), generator=draw, dtype=torch.uint8).to(DEVICE)
    stop, last = torch.tensor(rows - 40, device=DEVICE), torch.tensor(rows + 3, device=DEVICE)
    lists = torch.full((batch, 2, 5 + k), -7, device=DEVICE)
    choose_by_codes(queries, keys, codes, codebook, 0.2, 7, stop, last, lists[..., 5:], implementation="triton")
    scores = code_scores(queries, codes, codebook, 0.2, 7, stop, implementation="triton")
    assert torch.equal(lists[..., 5:], top_k_indices(scores, k, implementation="triton"))
    assert (lists[..., :5] == -7).all() and torch.equal(
        codes[..., rows - 4], encode(keys[:, :, rows + 3 :][:, :, :1], codebook)[..., 0]
    )


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count, group", [(16, 3), (64, 4), (11, 1)])
@pytest.mark.parametrize(
    "rows, later, k, scaling, cap",
    [(600, 0, 1, 0.2, None), (600, 300, 150, 0.2, 2.0)]
    + [(9000, 20, 700, 0.2, None), (9000, 20, 8980, 0.2, None), (9000, 20, 3500, 3e-3, None)],
)
def test_rows_listed_by_pairs_are_those_with_the_largest_scores(rows, later, k, scaling, cap, count, group, dtype):
    """The pairs of all candidates but the `later` ones are counted. Codes behind the candidates are garbage.

    With a small factor of the logits the scores of all pairs are near each other.
    """
    draw = torch.Generator().manual_seed(rows + count)
    keys = torch.randn(2, 2, rows + 9, 64, generator=draw).to(DEVICE, dtype)
    queries = torch.randn(2, 2 * group, 64, generator=draw).to(DEVICE, dtype)
    codebook = torch.randn(2, 2, 2, count, 32, generator=draw).to(DEVICE, dtype)
    codes = torch.randint(count, (2, 2, 2, rows + 2), generator=draw, dtype=torch.uint8).to(DEVICE)
    codes[..., rows:] = 255
    stop, last = torch.tensor(rows + 7, device=DEVICE), torch.tensor(rows + 8, device=DEVICE)
    pairs = count_pairs(codes[..., : rows - later], count, group)
    assert pairs.sum() == 4 * (rows - later)
    lists = torch.full((2, 2, 5 + k), -7, device=DEVICE)
    more = dict(extras=SoftmaxExtras(cap=cap), implementation="triton")
    given = queries, keys, codes, codebook, scaling, 7, stop, last, lists[..., 5:]
    choose_by_codes(*given, counted=(pairs, rows + 7 - later), **more)
    scores = code_scores(queries, codes, codebook, scaling, 7, stop, **more)
    assert torch.equal(lists[..., 5:], top_k_indices(scores, k, implementation="triton"))
    assert (lists[..., :5] == -7).all()
    assert torch.equal(codes[..., rows + 1], encode(keys[:, :, rows + 8 :][:, :, :1], codebook)[..., 0])


def test_counts_that_do_not_fit_are_refused():
    queries, codes, book = torch.zeros(1, 4, 8), torch.zeros(1, 2, 2, 5, dtype=torch.uint8), torch.zeros(1, 2, 2, 3, 4)
    keys, last, found = torch.zeros(1, 2, 6, 8), torch.tensor(4), torch.zeros(1, 2, 3, dtype=torch.int64)
    fits = count_pairs(codes, 3, 2)
    for counts, rows in ((fits, 2), (fits[..., :9], 4), (fits.long(), 4), (fits[:, :1], 4)):
        with pytest.raises(ValueError, match="^choose_by_codes: queries"):
            choose_by_codes(queries, keys, codes, book, 1.0, 0, last, last, found, counted=(counts, rows))


def test_pairs_of_many_centroids_or_rows_or_other_numbers_of_codes_are_not_counted():
    two, four = (torch.zeros(1, 1, parts, 5, dtype=torch.uint8) for parts in (2, 4))
    assert count_pairs(two, 64, 8) is not None and count_pairs(two, 64, 9) is None
    assert count_pairs(two, 65, 1) is None and count_pairs(four, 16, 1) is None
    assert count_pairs(two[..., :1].expand(1, 1, 2, (1 << 20) + 1), 16, 1) is None


def test_codes_of_all_rows_are_those_of_each():
    keys, codebook = torch.randn(1, 2, 30, 32), torch.randn(1, 2, 4, 16, 8)
    codes = torch.zeros(1, 2, 4, 30, dtype=torch.uint8)
    for row in range(30):
        encode_newest(keys, codes, codebook, 0, row)
    assert torch.equal(codes, encode(keys, codebook)) and encode(keys[:, :, :0], codebook).shape == (1, 2, 4, 0)


CLUSTERED = {  # batch, KV heads, parts, dim, centroids, rows
    "as in the paper": (1, 2, 2, 128, 64, 300),
    "quarters": (1, 1, 4, 48, 256, 258),
    "several spans": (1, 1, 2, 32, 20, 2100),
    "a centroid for each row": (2, 1, 1, 24, 11, 11),
    "one row": (1, 1, 2, 16, 1, 1),
}


def draw_keys(name, dtype, values=None):
    """Keys that are views of longer rows, and their first rows as centroids."""
    batch, heads, parts, dim, count, rows = CLUSTERED[name]
    draw = torch.Generator().manual_seed(rows)
    keys = torch.randn(batch, rows + 3, heads, dim, generator=draw)
    keys = (keys if values is None else torch.randint(*values, keys.shape, generator=draw)).to(DEVICE, dtype)
    keys = keys.transpose(1, 2)[:, :, 3:]
    return keys, keys[:, :, :count].unflatten(3, (parts, -1)).transpose(2, 3).contiguous()


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@BOTH
@pytest.mark.parametrize("name", CLUSTERED)
def test_centroids_and_codes_are_those_of_float64(name, implementation, dtype):
    keys, first = draw_keys(name, dtype)
    expected = find_centroids(keys.double().cpu(), first.double().cpu(), 2)
    found = find_centroids(keys, first, 2, implementation=implementation)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.cpu().double(), expected, rtol=0, atol=2e-5)
    codes = encode(keys, found.to(dtype), implementation=implementation)
    parts = keys.cpu().double().unflatten(3, (first.shape[2], -1)).transpose(2, 3)
    away = torch.cdist(parts, found.to(dtype).cpu().double())
    least = away.min(-1).values
    assert (away.gather(-1, codes.cpu().long()[..., None])[..., 0] - least).abs().max() < 1e-4
    assert (codes.cpu() == away.argmin(-1)).float().mean() > 0.99


@pytest.mark.cover
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", [only_in_full(own) if own == "quarters" else own for own in CLUSTERED])
def test_of_equal_centroids_the_first_counts_and_those_without_rows_move(name, dtype):
    """Few whole numbers: many rows are equal, so many first centroids are, and all but the first have no rows."""
    keys, first = draw_keys(name, dtype, (0, 2))
    first[..., :3, :] += 90  # nobody's nearest
    for iterations in (0, 1):
        found, expected = (
            find_centroids(keys.to(device), first.to(device), iterations, implementation=own).cpu()
            for own, device in (("triton", DEVICE), ("reference", "cpu"))
        )
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
    found, expected = (encode(keys, first, implementation=own) for own in ("triton", "reference"))
    assert torch.equal(found, expected)


@BOTH
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")  # NumPy's, below Triton's interpreter
def test_keys_that_are_no_numbers_get_codes_that_there_are(implementation):
    keys, first = draw_keys("a centroid for each row", torch.bfloat16)
    keys[:, :, 4] = torch.nan
    first = torch.zeros_like(first)
    assert (encode(keys, first, implementation=implementation) < 11).all()
    assert find_centroids(keys, first, 2, implementation=implementation).shape == first.shape


@BOTH
def test_the_other_samples_change_no_centroid(implementation, monkeypatch):
    """Of ten spans, which are added up in two steps, and of several pieces."""
    monkeypatch.setattr("kvbench.kernels.product_quantization.clusters.SPAN", 64)
    monkeypatch.setattr("kvbench.kernels.product_quantization.centroids.DISTANCES", 1 << 11)
    keys, first = (own[:, :, :600] for own in draw_keys("several spans", torch.bfloat16))
    alone = find_centroids(keys, first, 1, implementation=implementation)
    torch.testing.assert_close(alone, find_centroids(keys.double(), first.double(), 1).float(), rtol=0, atol=2e-5)
    both = [torch.cat([own.flip(2), own]) for own in (keys, first)]
    assert torch.equal(find_centroids(*both, 1, implementation=implementation)[1:], alone)
    assert torch.equal(find_centroids(keys, first, 1, implementation=implementation), alone)


def test_many_centroids_of_long_parts_are_found_too():
    """They are more than a kernel takes."""
    keys = torch.randn(1, 1, 300, 128, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    found = find_centroids(keys, keys[:, :, None, :256], 1)
    expected = find_centroids(keys.double(), keys[:, :, None, :256].double(), 1)
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=2e-5)
    assert encode(keys, keys[:, :, None, :256])[0, 0, 0, :256].tolist() == [*range(256)]


def test_inputs_that_do_not_fit():
    queries, codes = torch.zeros(1, 4, 8), torch.zeros(1, 2, 2, 5, dtype=torch.uint8)
    book, keys, last = torch.zeros(1, 2, 2, 3, 4), torch.zeros(1, 2, 6, 8), torch.tensor(4)
    large = torch.zeros(1, 1, 256, 128, device=DEVICE)

    def choose(given, found):
        choose_by_codes(queries, given, codes, book, 1.0, 0, last, last, found)

    for message, call in (
        ("code_scores: vectors", lambda: code_scores(queries[..., :6], codes, book, 1.0, 0, last)),
        ("code_scores: vectors", lambda: code_scores(queries, codes.int(), book, 1.0, 0, last)),
        ("code_scores: vectors", lambda: code_scores(queries, codes, book.half(), 1.0, 0, last)),
        ("code_scores: vectors", lambda: code_scores(queries, codes, book[:, :, :, :0], 1.0, 0, last)),
        ("code_scores: vectors", lambda: code_scores(queries, codes[:, :, :1], book, 1.0, 0, last)),
        ("code_scores: queries", lambda: code_scores(queries[:, :3], codes, book, 1.0, 0, last)),
        ("code_scores: queries", lambda: code_scores(queries, codes, book, 1.0, -1, last)),
        ("code_scores: implementation", lambda: code_scores(queries, codes, book, 1.0, 0, last, implementation="fast")),
        ("encode: keys", lambda: encode(keys[..., :6], book)),
        ("encode: keys", lambda: encode(keys, book.half())),
        ("find_centroids: keys", lambda: find_centroids(keys, book[:, :1], 3)),
        ("find_centroids: 3 centroids of 2 rows", lambda: find_centroids(keys[:, :, :2], book, 3)),
        ("find_centroids: 3 centroids of 6 rows, -1 iterations", lambda: find_centroids(keys, book, -1)),
        (
            "encode: implementation triton takes at most 8192 numbers of a part, not 32768",
            lambda: encode(large, large[:, :, None], implementation="triton"),
        ),
        ("encode: implementation", lambda: encode(keys, book, implementation="fast")),
        ("choose_by_codes: vectors", lambda: choose(keys[..., :6], torch.zeros(1, 2, 3).long())),
        ("choose_by_codes: queries", lambda: choose(keys, torch.zeros(1, 2, 3))),
        ("choose_by_codes: queries", lambda: choose(keys, torch.zeros(1, 2, 6).long())),
        ("choose_by_codes: queries", lambda: choose(keys, torch.zeros(1, 2, 6).long()[..., ::2])),
    ):
        with pytest.raises(ValueError, match=f"^{message}"):
            call()


def ahead():
    from kvbench.kernels.product_quantization import clusters, pairs
    from kvbench.kernels.product_quantization import triton as own

    whole = {"codes": "*u8", "stop": "*i64", "last": "*i64", "scale": "fp32", "work": "*i32"}
    whole |= dict.fromkeys(("tables", "sums", "scores"), "*fp32")
    for dtype, dim, parts, group in (("bf16", 128, 2, 4), ("fp32", 128, 4, 8), ("fp16", 96, 1, 1), ("bf16", 64, 4, 32)):
        kinds = whole | dict.fromkeys(("queries", "codebook", "keys"), f"*{dtype}")
        wide = 1 << (dim // parts - 1).bit_length()
        sizes = {"M": max(16, group), "N": pairs.CENTROIDS, "E": wide, "G": group, "CAST": False, "q_d": 1, "k_d": 1}
        yield list_kernel(own._products, kinds, {**sizes, "ENCODE": True}, num_warps=4)
        sizes = {
            "PARTS": parts,
            "G": group,
            "N": min(own.SPAN, own.LOGITS // group),
            "COUNT": True,
            "CAP": 50.0 if group == 4 else None,
        }
        for kernel in (own._sums, own._scores):
            yield list_kernel(kernel, kinds, sizes, num_warps=8)
    numbers = dict.fromkeys(("counts", "totals", "rooms", "arrived", "tallies"), "*i32")
    kinds = whole | numbers | {"classes": "*u8", "rows": "*i64"}
    vectors = dict.fromkeys(("queries", "codebook", "keys"), "*bf16")
    for wide, group, early in ((64, 4, True), (16, 1, True), (64, 8, True), (64, 4, False)):
        sizes = {"WIDE": wide, "G": group, "M": 16, "E": 64, "N": pairs.MORE, "CENTROIDS": pairs.CENTROIDS}
        sizes |= {"COUNTED": pairs.COUNTED, "NEAR": pairs.NEAR, "STEPS": pairs.STEPS, "CAST": False, "AHEAD": early}
        sizes["CAP"] = 50.0 if group == 8 else None
        yield list_kernel(pairs._rank_pairs, kinds | vectors, sizes | {"q_d": 1, "k_d": 1}, num_warps=8)
        sizes = {"WIDE": wide, "MOST": pairs.MOST, "TILE": pairs.TILE, "AHEAD": early, "BEGIN": 0, "END": 2}
        for one in (True, False):
            yield list_kernel(pairs._list_pairs, kinds, sizes | {"ONE": one}, num_warps=8)
    kinds = dict.fromkeys(("centroids", "distances", "sums"), "*fp32") | {"sizes": "*i32", "codes": "*u8"}
    for dtype, dim, count in (("bf16", 64, 64), ("bf16", 32, 256), ("fp32", 64, 64), ("fp16", 24, 11)):
        sizes, short = clusters.choose_sizes(count, dim), dtype == "bf16"
        warps, more = sizes.pop("num_warps"), {"CAST": False, "k_d": 1}
        found = kinds | {"keys": f"*{dtype}"}
        yield list_kernel(clusters._assign, found, sizes | more | {"PIECES": 3 * short, "SUM": True}, num_warps=warps)
        one = found | {"centroids": f"*{dtype}"}
        yield list_kernel(clusters._assign, one, sizes | more | {"PIECES": int(short), "SUM": False}, num_warps=warps)
        sizes = {"K": sizes["K"], "E": sizes["E"], "SHARE": clusters.SHARE, "SPANS": clusters.SPANS}
        yield list_kernel(clusters._move, found, sizes | {"SEARCH": clusters.SEARCH, "k_d": 1}, num_warps=4)
