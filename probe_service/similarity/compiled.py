"""Loops over similarities that torch has no operation for, compiled by numba.

Only modules that are about to search import this one, inside their functions: importing it loads numba, and the first time on
a machine compiles the loops (see `probe_service.loops`).
"""

from __future__ import annotations

import numba
import numpy as np
from numpy.typing import NDArray

from probe_service.loops import REORDERED, compiled, exponentials

__all__ = [
    "add_running_shares",
    "best_of_square",
    "count_tile",
    "quantize",
    "row_maxima",
    "scores",
    "search_tile",
    "softmax_sums",
]

Floats = NDArray[np.float32]
Exact = NDArray[np.float64]
Places = NDArray[np.int64]

_LONGEST = 2.0**20
"""Largest whole number that a length is scaled to, to find the largest one in whole numbers, as compilers can."""

_AT_ONCE = 512
"""Columns whose sums are made in float32, before they are added up in float64; what is noted of them stays in the cache."""


@numba.njit(fastmath=REORDERED)  # type: ignore[untyped-decorator]
def _dot(x: Floats, y: Floats) -> float:
    # Compiled once for all that call it, so that they add in the same order.
    total = 0.0
    for d in range(len(x)):
        total += np.float64(x[d]) * np.float64(y[d])
    return total


@compiled("void(float32[:,::1],float32[:,::1],int64[::1],int64[::1],float64[::1])")
def scores(left: Floats, right: Floats, row: Places, column: Places, out: Exact) -> None:
    """Put the products of pairs of rows into `out`, in float64; equal rows give equal products to the last bit."""
    for p in range(len(row)):
        out[p] = _dot(left[row[p]], right[column[p]])


@compiled("void(float32[:,::1],float32[::1],float32[::1],int8[:,::1],float32[:,::1])")
def quantize(rows: Floats, mean: Floats, other_mean: Floats, codes: NDArray[np.int8], terms: Floats) -> None:
    """Write each row, less the mean, as a scale times whole numbers from −127 to 127.

    Args:
        rows: (n, d).
        mean: (d,) what is taken from each row.
        other_mean: (d,) what is taken from the rows they are multiplied with.
        codes: (n, ≥ d) whose first d columns are filled with the whole numbers.
        terms: (4, n) filled with the scale, with `other_mean` · row, and with upper bounds of two lengths: of what the
            codes leave out, and of the row less the mean.
    """
    n, d = rows.shape
    # Of a sum of d squares in float32, each of them rounded a few times: γ of Higham 2002, §3.1.
    up = np.float32(1.0 + (d + 8) * 2.0**-23)
    for i in range(n):
        row = rows[i]
        squares = np.float32(0.0)
        lift = 0.0
        for k in range(d):
            rest = row[k] - mean[k]
            squares += rest * rest
            lift += np.float64(row[k]) * np.float64(other_mean[k])
        length = np.sqrt(squares)
        unit = np.float32(_LONGEST) / length if length > 0.0 else np.float32(0.0)
        longest = np.int32(0)
        for k in range(d):
            longest = max(longest, np.int32(abs(row[k] - mean[k]) * unit))
        scale = np.float32(longest + 1) * length / np.float32(_LONGEST * 127.0)
        inverse = np.float32(1.0) / scale if scale > 0.0 else np.float32(0.0)
        error = np.float32(0.0)
        for k in range(d):
            rest = row[k] - mean[k]
            code = np.rint(rest * inverse)
            codes[i, k] = np.int8(np.int32(code))
            left_out = rest - scale * code
            error += left_out * left_out
        terms[0, i] = scale
        terms[1, i] = lift
        terms[2, i] = np.sqrt(error) * up + length * np.float32(2.0**-21)
        terms[3, i] = length * up


@compiled(
    "int64(int32[:,::1],float32[:,::1],float32[:,::1],int64[::1],int64[::1],float32[:,::1],float32[:,::1],"
    "int64,int64,boolean,float64,float64,float64,int64,float64[::1],int64[::1],int64[::1])"
)
def search_tile(
    products: NDArray[np.int32],
    left_terms: Floats,
    right_terms: Floats,
    left_ids: Places,
    right_ids: Places,
    left: Floats,
    right: Floats,
    first_row: int,
    first_column: int,
    ordered: bool,
    longest: float,
    rounding: float,
    floor: float,
    most: int,
    out_score: Exact,
    out_row: Places,
    out_column: Places,
) -> int:
    """Find the pairs of a tile whose product is at least `floor`, by their exact products.

    Args:
        products: (r, c) products of the codes of r rows and c columns.
        left_terms: (4, n) of all rows, see `quantize`.
        right_terms: (4, m) of all columns.
        left_ids: (n,) numbers of the rows.
        right_ids: (m,) numbers of the columns: a pair counts where the row's is below the column's …
        left: (n, d) the rows' vectors.
        right: (m, d) the columns' vectors.
        first_row: Where the tile begins.
        first_column: The same.
        ordered: … or, with this, where the two differ.
        longest: At least the length of every column less the mean.
        rounding: Bound of what float32 arithmetic adds to the error of a product.
        floor: Least product of interest.
        most: Pairs to look at exactly at most.
        out_score: (`most`,) filled with the products of the pairs found.
        out_row: (`most`,) filled with their rows.
        out_column: (`most`,) filled with their columns.

    Returns:
        How many were found; −1 where more than `most` would have had to be looked at.
    """
    rows, columns = products.shape
    # Views that begin with the tile: a loop is vectorized only where places cannot be negative.
    scales = right_terms[0, first_column : first_column + columns]
    lifts = right_terms[1, first_column : first_column + columns]
    errors = right_terms[2, first_column : first_column + columns]
    # Which columns are near, eight to a word, so that those that are not are passed by eight at a time.
    is_near = np.zeros((columns + 7) // 8 * 8, dtype=np.uint8)
    words = is_near.view(np.uint64)
    found = looked = 0
    for i in range(rows):
        row, line = first_row + i, products[i]
        scale, left_out = left_terms[0, row], left_terms[2, row]
        slope = left_terms[3, row] + left_out
        least = np.float32(floor - rounding - np.float64(left_terms[1, row]) - longest * np.float64(left_out))
        near = np.int32(0)
        for j in range(columns):
            bound = scale * (scales[j] * np.float32(line[j])) + (lifts[j] + errors[j] * slope)
            near += np.int32(bound >= least)
        if near == 0:
            continue
        for j in range(columns):
            bound = scale * (scales[j] * np.float32(line[j])) + (lifts[j] + errors[j] * slope)
            is_near[j] = np.uint8(bound >= least)
        for word in range(len(words)):
            if words[word] == 0:
                continue
            for column in range(first_column + 8 * word, first_column + 8 * word + 8):
                if not is_near[column - first_column]:
                    continue
                if not (left_ids[row] < right_ids[column] or (ordered and left_ids[row] > right_ids[column])):
                    continue
                if looked == most:
                    return -1
                looked += 1
                score = _dot(left[row], right[column])
                if score >= floor:
                    out_score[found], out_row[found], out_column[found] = score, row, column
                    found += 1
    return found


@compiled(
    "void(int32[:,::1],float32[:,::1],float32[:,::1],float32[:,::1],float32[:,::1],"
    "int64,boolean,float64,float64,float64[::1])"
)
def best_of_square(
    products: NDArray[np.int32],
    left_terms: Floats,
    right_terms: Floats,
    left: Floats,
    right: Floats,
    first: int,
    ordered: bool,
    longest: float,
    rounding: float,
    out: Exact,
) -> None:
    """Find the largest products of different rows and columns of one small batch, each pair once unless `ordered`.

    Args:
        products: (N, N) products of the codes.
        left_terms: (4, n) of the rows of many batches, see `quantize`.
        right_terms: (4, n) of their columns.
        left: (n, d) the rows' vectors.
        right: (n, d) the columns' vectors.
        first: Where this batch begins among them.
        ordered: Whether row i, column j is another pair than row j, column i.
        longest: As in `search_tile`.
        rounding: As in `search_tile`.
        out: (k,) filled with them, descending; −inf where there are fewer. k is small.
    """
    size, k = len(products), len(out)
    # The best pairs of k rows, one each, are a floor that all of the k best pairs reach.
    rough, rough_row = np.full(k, -np.inf), np.full(k, -1)
    for i in range(size - 1):
        line = products[i, i + 1 :]
        largest = line[0]
        for j in range(len(line)):
            largest = max(largest, line[j])
        value = np.float64(largest) * np.float64(left_terms[0, first + i])
        if value > rough[k - 1]:
            at = k - 1
            while at > 0 and rough[at - 1] < value:
                rough[at], rough_row[at] = rough[at - 1], rough_row[at - 1]
                at -= 1
            rough[at], rough_row[at] = value, i
    floor = -np.inf
    if k < size:
        floor = np.inf
        for at in range(k):
            i = rough_row[at]
            best = i + 1
            for j in range(i + 2, size):
                if products[i, j] > products[i, best]:
                    best = j
            floor = min(floor, _dot(left[first + i], right[first + best]))
    out[:] = -np.inf
    for i in range(size):
        row = first + i
        scale, left_out = left_terms[0, row], left_terms[2, row]
        slope = left_terms[3, row] + left_out
        given = rounding + np.float64(left_terms[1, row]) + longest * np.float64(left_out)
        least = np.float32(floor - given)
        start = 0 if ordered else i + 1
        line = products[i, start:]
        scales = right_terms[0, first + start : first + size]
        lifts = right_terms[1, first + start : first + size]
        errors = right_terms[2, first + start : first + size]
        near = np.int32(0)
        for j in range(len(line)):
            bound = scale * (scales[j] * np.float32(line[j])) + (lifts[j] + errors[j] * slope)
            near += np.int32(bound >= least)
        if near == 0:
            continue
        for j in range(len(line)):
            bound = scale * (scales[j] * np.float32(line[j])) + (lifts[j] + errors[j] * slope)
            if bound < least or start + j == i:
                continue
            score = _dot(left[row], right[first + start + j])
            if score <= out[k - 1]:
                continue
            at = k - 1
            while at > 0 and out[at - 1] < score:
                out[at] = out[at - 1]
                at -= 1
            out[at] = score
            if out[k - 1] > floor:
                floor = out[k - 1]
                least = np.float32(floor - given)


@compiled(
    "void(float32[:,::1],uint32[::1],boolean[::1],boolean[::1],float32,float32[::1],"
    "int32[:,::1],int32[:,::1],int64[::1])",
    reordered=False,
)
def count_tile(
    similarities: Floats,
    column_bins: NDArray[np.uint32],
    row_open: NDArray[np.bool_],
    column_open: NDArray[np.bool_],
    floor: np.float32,
    thresholds: Floats,
    counts: NDArray[np.int32],
    open_counts: NDArray[np.int32],
    above: Places,
) -> None:
    """Add the similarities of a tile to the histograms of its rows.

    The bin of similarity s is (s + 1) · 1024, rounded to even and clamped to 0 … 2048.

    Args:
        similarities: (r, c).
        column_bins: (c,) where the bins of each column's kind begin.
        row_open: (r,) rows all of whose pairs are open.
        column_open: (c,) columns all of whose pairs are open.
        floor: The least similarity of open pairs that count.
        thresholds: (t,) ascending.
        counts: (r, kinds · 2049) added to.
        open_counts: (r, 2049) added to for open pairs; (0, 2049) where they are of no interest.
        above: (t,) added to: similarities that reach each threshold.
    """
    rows, columns = similarities.shape
    places = np.empty(
        columns, dtype=np.uint32
    )  # unsigned: no place is looked at for being counted from the end
    for i in range(rows):
        line, count = similarities[i], counts[i]
        for j in range(columns):
            place = np.int32(np.rint((line[j] + np.float32(1.0)) * np.float32(1024.0)))
            places[j] = np.uint32(min(max(place, np.int32(0)), np.int32(2048))) + column_bins[j]
        for j in range(columns):
            count[places[j]] += np.int32(1)
        for t in range(len(thresholds)):
            reached = np.int32(0)
            for j in range(columns):
                reached += np.int32(line[j] >= thresholds[t])
            if reached == 0:
                break
            above[t] += reached
        if len(open_counts):
            reached = np.int32(0)
            for j in range(columns):
                reached += np.int32(line[j] >= floor)
            if reached == 0:
                continue
            count = open_counts[i]
            for j in range(columns):
                if line[j] >= floor and (row_open[i] or column_open[j]):
                    count[places[j] - column_bins[j]] += np.int32(1)


@compiled("void(float32[:,::1],float32[::1],float32[::1],int64[:,::1])", reordered=False)
def row_maxima(similarities: Floats, thresholds: Floats, maxima: Floats, above: Places) -> None:
    """Find the largest similarity of each row, and count what reaches thresholds.

    Args:
        similarities: (b · rows, c), batch after batch.
        thresholds: (t,).
        maxima: (b · rows,) filled.
        above: (b, t) added to: similarities of the batch that reach each threshold.
    """
    rows, columns = similarities.shape
    rows_each = rows // len(above)
    for i in range(rows):
        line = similarities[i]
        largest = line[0]
        for j in range(columns):
            largest = line[j] if line[j] > largest else largest
        maxima[i] = largest
        for t in range(len(thresholds)):
            if largest >= thresholds[t]:
                reached = np.int32(0)
                for j in range(columns):
                    reached += np.int32(line[j] >= thresholds[t])
                above[i // rows_each, t] += reached


@compiled(
    "void(float32[:,::1],float32[::1],float32,boolean[::1],boolean[:,::1],float32,float32[::1],float64[:,::1])"
)
def softmax_sums(
    similarities: Floats,
    maxima: Floats,
    temperature: np.float32,
    row_open: NDArray[np.bool_],
    column_open: NDArray[np.bool_],
    floor: np.float32,
    chances: Floats,
    sums: Exact,
) -> None:
    """Put weights in the place of similarities, exp((s − row's maximum) / T), and add them up by row.

    Args:
        similarities: (b · rows, c), batch after batch; −inf has weight 0. Overwritten.
        maxima: (b · rows,) at least the largest of each row.
        temperature: T.
        row_open: (b · rows,) rows all of whose pairs are open.
        column_open: (b, c) columns all of whose pairs are open; (b, 0) where no pair is open, whatever `row_open` says.
        floor: The least similarity of open pairs that count in the worst case.
        chances: (k,) what open pairs count as at k evenly spaced similarities from −1 to 1; (0,): nothing.
        sums: (5, b · rows) filled with the sums of the weights, of their squares, of those of open pairs that count, with the
            number of these pairs, and with the sum of the weights times chances of open pairs.
    """
    rows, columns = similarities.shape
    rows_each = rows // len(column_open)
    per_t = np.float32(1.0) / temperature
    any_open, any_chances = column_open.shape[1] > 0, len(chances) > 0
    last, half = np.int32(len(chances) - 1), np.float32((len(chances) - 1) / 2)
    octaves = np.empty(_AT_ONCE, dtype=np.int32)
    counts, chance = np.zeros(_AT_ONCE, dtype=np.float32), np.zeros(_AT_ONCE, dtype=np.float32)
    for i in range(rows):
        top, this_open = maxima[i], row_open[i]
        open_here = column_open[i // rows_each]
        sums[:, i] = 0.0
        for first in range(0, columns, _AT_ONCE):
            line = similarities[i, first : first + _AT_ONCE]
            width = len(line)
            if any_open:
                is_open = open_here[first : first + _AT_ONCE]
                number = np.float32(0.0)
                for j in range(width):
                    reaches = (line[j] >= floor) & (this_open | is_open[j]) & (line[j] > -np.inf)
                    counts[j] = np.float32(reaches)
                    number += counts[j]
                sums[3, i] += number
                if any_chances:
                    for j in range(width):
                        place = (
                            np.int32(np.rint((line[j] + np.float32(1.0)) * half))
                            if line[j] > -1.0
                            else np.int32(0)
                        )
                        chance[j] = chances[min(place, last)] * np.float32(this_open | is_open[j])
            for j in range(width):
                line[j] = (line[j] - top) * per_t
            exponentials(line, octaves)
            total, squares, worst, expected = (
                np.float32(0.0),
                np.float32(0.0),
                np.float32(0.0),
                np.float32(0.0),
            )
            for j in range(width):
                weight = line[j]
                total += weight
                squares += weight * weight
                worst += weight * counts[j]
                expected += weight * chance[j]
            sums[0, i] += total
            sums[1, i] += squares
            sums[2, i] += worst
            sums[4, i] += expected


@compiled(
    "void(float32[:,::1],int64,float64,int64[::1],int64[::1],boolean[::1],float64,float64[::1],float64[::1])",
    reordered=False,
)
def add_running_shares(
    similarities: Floats,
    first: int,
    temperature: float,
    known_starts: Places,
    known_columns: Places,
    is_open: NDArray[np.bool_],
    floor: float,
    false_sum: Exact,
    worst_sum: Exact,
) -> None:
    """Add, for each number of candidates, the share of the softmax that marked ones have, summed over some rows.

    The candidates of a row come in the order of the columns after it, going round, without itself. Weights are relative to
    the largest so far, so that none overflows and they never all vanish.

    Args:
        similarities: (r, M) of rows first … first + r − 1 to all M.
        first: Column of the first row itself.
        temperature: T.
        known_starts: (r + 1,) where each row's known false negatives begin in …
        known_columns: … (p,) their columns.
        is_open: (M,) rows whose pairs count in the worst case from `floor` on; (0,) if there are none.
        floor: The least similarity of those.
        false_sum: (M − 1,) added to: the share of the known ones among the first 1, 2, … candidates.
        worst_sum: (M − 1,) added to: with the open ones; (0,) if there are none.
    """
    rows, columns = similarities.shape
    is_known = np.zeros(columns, dtype=np.bool_)
    bounded = len(worst_sum) > 0
    for i in range(rows):
        line, column = similarities[i], first + i
        own_open = bounded and is_open[column]
        known = known_columns[known_starts[i] : known_starts[i + 1]]
        for j in known:
            is_known[j] = True
        highest, total, false, worst = -1e300, 0.0, 0.0, 0.0
        for t in range(columns - 1):
            column += 1
            if column == columns:
                column = 0
            logit = np.float64(line[column]) / temperature
            weight = 1.0
            if logit > highest:
                shrink = np.exp(highest - logit)
                total, false, worst = total * shrink, false * shrink, worst * shrink
                highest = logit
            else:
                weight = np.exp(logit - highest)
            total += weight
            if is_known[column]:
                false += weight
                worst += weight
            elif bounded and line[column] >= floor and (own_open or is_open[column]):
                worst += weight
            if false > 0.0:
                false_sum[t] += false / total
            if worst > 0.0 and bounded:
                worst_sum[t] += worst / total
        for j in known:
            is_known[j] = False
