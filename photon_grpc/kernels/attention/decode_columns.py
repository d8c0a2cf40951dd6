"""The columns of a decode program's products, for `gluon_decode.py`: (query, head of the group) pairs.

Pair c of a program is head c % GROUP of query c // GROUP, counted from the program's first query. Columns that are no
pair, or the pair of a query that the row does not have, see no key and are neither loaded nor stored.

`queries` is the program's first query, and how many the row has.
"""

from __future__ import annotations

from photon_grpc.kernels.attention.decode_ring import PageShape, dimensions_of
from photon_grpc.kernels.lang.gluon import constexpr_function, gl, gluon_jit

#: Heads whose sums leave registers for 8 columns.
WIDE_HEAD_DIM = 256


@constexpr_function
def queries_at_once(group: int, queries: int, head_dim: int, pairs: int) -> int:
    """Return the queries of a row that one program takes, of at most `pairs` pairs where it takes several."""
    pairs = min(pairs, 8) if head_dim >= WIDE_HEAD_DIM else pairs
    return max(1, min(queries, pairs // group))


@constexpr_function
def programs_a_head(group: int, queries: int, head_dim: int, pairs: int) -> int:
    """Return the programs that share the queries of one (row, key head)."""
    return -(-queries // queries_at_once(group, queries, head_dim, pairs))


def programs_and_pairs(shape: PageShape) -> tuple[int, int]:
    """Return the programs of one (row, key head), and the pairs of each."""
    sizes = shape.GROUP, shape.QUERIES, shape.HEAD_DIM, shape.PAIRS
    return programs_a_head(*sizes), shape.GROUP * queries_at_once(*sizes)


@gluon_jit
def query_of(member, queries, SHAPE: gl.constexpr):
    """Return the query of each column, and whether it is a pair of the row's."""
    first_query, count = queries
    query = first_query + member // SHAPE.GROUP
    pairs: gl.constexpr = SHAPE.GROUP * queries_at_once(SHAPE.GROUP, SHAPE.QUERIES, SHAPE.HEAD_DIM, SHAPE.PAIRS)
    return query, (member < pairs) & (query < count)


@gluon_jit
def load_query(q, q_stride, queries, SHAPE: gl.constexpr, TILE: gl.constexpr, right: gl.constexpr):
    """Load the queries of a program [D, COLUMNS] from q, the group's heads of its row; zeros where none is.

    Their D is in the order of the operand of keys.
    """
    member = gl.arange(0, TILE.COLUMNS, layout=gl.SliceLayout(0, right))[None, :]
    column = dimensions_of(gl.arange(0, SHAPE.HEAD_DIM, layout=gl.SliceLayout(1, right)), SHAPE)[:, None]
    if SHAPE.QUERIES == 1:
        inside = (member < SHAPE.GROUP) & (column >= 0)
        at = q + (member * SHAPE.HEAD_DIM + column)
    else:
        query, is_pair = query_of(member, queries, SHAPE)
        inside = is_pair & (column >= 0)
        at = q + (query * q_stride + member % SHAPE.GROUP * SHAPE.HEAD_DIM + column)
    return gl.load(at, mask=inside, other=0.0)


@gluon_jit
def limits(context, queries, SHAPE: gl.constexpr, TILE: gl.constexpr, right: gl.constexpr):
    """Return the key after the last one that each column sees, [1, COLUMNS] or one number; 0 of a column without."""
    if SHAPE.QUERIES == 1:
        return context
    else:
        member = gl.arange(0, TILE.COLUMNS, layout=gl.SliceLayout(0, right))[None, :]
        query, is_pair = query_of(member, queries, SHAPE)
        return gl.where(is_pair, context - queries[1] + query + 1, 0)


@gluon_jit
def store_answers(to, answer, member, column, queries, SHAPE: gl.constexpr):
    """Write answers, whose pairs and columns are `member` and `column`, to `to`, the group's heads of the row."""
    if SHAPE.QUERIES == 1:
        at = member * SHAPE.HEAD_DIM
        inside = member < SHAPE.GROUP
    else:
        query, inside = query_of(member, queries, SHAPE)
        at = (query * (SHAPE.KV_HEADS * SHAPE.GROUP) + member % SHAPE.GROUP) * SHAPE.HEAD_DIM
    gl.store(to + (at + column), answer.to(to.dtype.element_ty), mask=inside & (column >= 0))
