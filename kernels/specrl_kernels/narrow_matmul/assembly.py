"""LLVM assembly of y[o, t] = sum over k of w[o, k] x[t, k], as a handler that XLA can call.

The offsets below are those of XLA's C interface for foreign functions (xla/ffi/api/c_api.h, major
version 0, whose structures only ever grow at their ends).
"""

from collections.abc import Iterator

CHUNK = 1 << 14  # weights that a thread takes at once, about


def assembly(columns: int, lanes: int, tile: tuple[int, int]) -> str:
    """The module; its function `handler` takes w f32[O, K], x f32[T, K] and fills y f32[O, T].

    Args:
      columns: T.
      lanes: K is a multiple of this.
      tile: rows of w and columns of x whose sums are kept in registers at once.
    """
    rows, most = tile
    groups = [(start, min(most, columns - start)) for start in range(0, columns, most)]
    functions = [tile_function(rows, width, share, columns, lanes)
                 for width, share in _tiles(groups, rows)]
    functions += [tile_function(1, width, (0, 1), columns, lanes)
                  for width in sorted({width for _, width in groups})]
    return "\n".join([_HEADER.format(lanes=lanes), *functions, _work(groups, rows, columns),
                      _THREADS, _HANDLER.format(chunk=CHUNK, rows=rows)])


def _tiles(groups: list[tuple[int, int]], rows: int) -> list[tuple[int, tuple[int, int]]]:
    """(width, which part of the next rows it fetches) of each group of columns, each once."""
    return sorted({(width, (q, len(groups))) for q, (_, width) in enumerate(groups)})


def _name(rows: int, width: int, share: tuple[int, int]) -> str:
    return f"tile_{rows}_{width}_{share[0]}_{share[1]}"


def tile_function(rows: int, width: int, share: tuple[int, int], columns: int, lanes: int) -> str:
    """A function that makes y[:rows, :width]; w, x and y point at the first entry of each.

    Args:
      share: (q, P): rows of w are met by P groups of columns in turn, and the q-th fetches its part
        of the rows that come next, so that memory is asked evenly.
    """
    vector = f"<{lanes} x float>"
    at = [(r, c) for r in range(rows) for c in range(width)]
    fetched = [r for r in range(rows) if _fetches(r, rows, *share)]
    lines = [f"define internal void @{_name(rows, width, share)}"
             "(ptr %w, ptr %x, ptr %y, i64 %K) {", "entry:", f"  %ahead = mul i64 %K, {rows}"]
    for name, count in (("w", rows), ("x", width)):
        for i in range(count):
            lines += [f"  %{name}{i}_at = mul i64 %K, {i}",
                      f"  %{name}{i} = getelementptr float, ptr %{name}, i64 %{name}{i}_at"]
    lines += ["  br label %loop", "loop:", "  %k = phi i64 [0, %entry], [%next, %loop]"]
    lines += [f"  %s{r}_{c} = phi {vector} [zeroinitializer, %entry], [%t{r}_{c}, %loop]"
              for r, c in at]
    for c in range(width):
        lines += [f"  %x{c}_p = getelementptr float, ptr %x{c}, i64 %k",
                  f"  %x{c}_v = load {vector}, ptr %x{c}_p, align 4"]
    for r in range(rows):
        lines += [f"  %w{r}_p = getelementptr float, ptr %w{r}, i64 %k"]
        if r in fetched:
            lines += [f"  %w{r}_n = getelementptr float, ptr %w{r}_p, i64 %ahead",
                      f"  call void @llvm.prefetch.p0(ptr %w{r}_n, i32 0, i32 3, i32 1)"]
        lines += [f"  %w{r}_v = load {vector}, ptr %w{r}_p, align 4"]
        lines += [f"  %t{r}_{c} = call {vector} @llvm.fma.v{lanes}f32({vector} %w{r}_v, "
                  f"{vector} %x{c}_v, {vector} %s{r}_{c})" for c in range(width)]
    lines += [f"  %next = add i64 %k, {lanes}", "  %more = icmp slt i64 %next, %K",
              "  br i1 %more, label %loop, label %end", "end:"]
    lines += _sums([f"%t{r}_{c}" for r, c in at], lanes)
    for i, (r, c) in enumerate(at):
        lines += [f"  %y{i} = getelementptr float, ptr %y, i64 {r * columns + c}",
                  f"  store float %sum{i}, ptr %y{i}, align 4"]
    return "\n".join([*lines, "  ret void", "}"])


def _fetches(row: int, rows: int, q: int, groups: int) -> bool:
    if groups <= rows:
        return row % groups == q
    return row == q * rows // groups and q * rows % groups < rows


def _sums(vectors: list[str], lanes: int) -> Iterator[str]:
    """Lines that set %sum{i} to the sum of vectors[i]: halves are added until one lane is left.

    Two vectors' halves share a vector, which does not change the order of any sum.
    """
    held = vectors + ["zeroinitializer"] * (-len(vectors) % lanes)
    each, vector = lanes, f"<{lanes} x float>"
    while each > 1:
        joined = []
        for pair in zip(held[::2], held[1::2], strict=True):
            name = f"%l{each}_{len(joined)}"
            for half, offset in (("a", 0), ("b", each // 2)):
                index = ", ".join(f"i32 {lane}" for start in range(offset, 2 * lanes, each)
                                  for lane in range(start, start + each // 2))
                yield (f"  {name}{half} = shufflevector {vector} {pair[0]}, {vector} {pair[1]}, "
                       f"<{lanes} x i32> <{index}>")
            yield f"  {name} = fadd {vector} {name}a, {name}b"
            joined.append(name)
        held, each = joined, each // 2
    for i in range(len(vectors)):
        yield f"  %sum{i} = extractelement {vector} {held[i // lanes]}, i32 {i % lanes}"


def _work(groups: list[tuple[int, int]], rows: int, columns: int) -> str:
    """A function that makes rows [lo, hi) of a job: tiles of `rows`, then of one."""
    return "\n".join([
        "define internal void @work(ptr %job, i64 %lo, i64 %hi) {", "entry:",
        *(f"  %{name}_f = getelementptr %job, ptr %job, i32 0, i32 {field}\n"
          f"  %{name} = load {kind}, ptr %{name}_f"
          for name, field, kind in (("w", 3, "ptr"), ("x", 4, "ptr"), ("y", 5, "ptr"),
                                    ("K", 6, "i64"))),
        "  %count = sub i64 %hi, %lo", f"  %left = urem i64 %count, {rows}",
        "  %full = sub i64 %hi, %left", "  br label %many_if",
        *_row_loop("many", "%entry", "%lo", "%full", rows, "one_if", groups, columns),
        *_row_loop("one", "%many_if", "%full", "%hi", 1, "end", groups, columns),
        "end:", "  ret void", "}"])


def _row_loop(name: str, before: str, start: str, stop: str, rows: int, after: str,
              groups: list[tuple[int, int]], columns: int) -> Iterator[str]:
    """Blocks that make rows [start, stop), `rows` at a time, then go to block `after`."""
    yield f"{name}_if:"
    yield f"  %{name} = phi i64 [{start}, {before}], [%{name}_next, %{name}_do]"
    yield f"  %{name}_more = icmp slt i64 %{name}, {stop}"
    yield f"  br i1 %{name}_more, label %{name}_do, label %{after}"
    yield f"{name}_do:"
    yield f"  %{name}_wo = mul i64 %{name}, %K"
    yield f"  %{name}_w = getelementptr float, ptr %w, i64 %{name}_wo"
    for q, (first, width) in enumerate(groups):
        at, share = f"%{name}{q}", (q, len(groups)) if rows > 1 else (0, 1)
        yield f"  {at}_xo = mul i64 %K, {first}"
        yield f"  {at}_x = getelementptr float, ptr %x, i64 {at}_xo"
        yield f"  {at}_ro = mul i64 %{name}, {columns}"
        yield f"  {at}_yo = add i64 {at}_ro, {first}"
        yield f"  {at}_y = getelementptr float, ptr %y, i64 {at}_yo"
        yield (f"  call void @{_name(rows, width, share)}(ptr %{name}_w, ptr {at}_x, ptr {at}_y, "
               "i64 %K)")
    yield f"  %{name}_next = add i64 %{name}, {rows}"
    yield f"  br label %{name}_if"


_HEADER = """\
; next chunk, chunks done, threads that hold the job, w, x, y, K, O, rows of a chunk, chunks
%job = type {{ i64, i64, i64, ptr, ptr, ptr, i64, i64, i64, i64 }}
declare <{lanes} x float> @llvm.fma.v{lanes}f32(<{lanes} x float>, <{lanes} x float>, <{lanes} x float>)
declare void @llvm.prefetch.p0(ptr, i32, i32, i32)
declare ptr @malloc(i64)
declare void @free(ptr)
declare i32 @sched_yield()
"""  # noqa: E501

_THREADS = """\
; Takes chunks until none is left.
define internal void @take(ptr %job) {
entry:
  %done = getelementptr %job, ptr %job, i32 0, i32 1
  %rows_f = getelementptr %job, ptr %job, i32 0, i32 7
  %rows = load i64, ptr %rows_f
  %each_f = getelementptr %job, ptr %job, i32 0, i32 8
  %each = load i64, ptr %each_f
  %chunks_f = getelementptr %job, ptr %job, i32 0, i32 9
  %chunks = load i64, ptr %chunks_f
  br label %next
next:
  %chunk = atomicrmw add ptr %job, i64 1 acq_rel
  %more = icmp slt i64 %chunk, %chunks
  br i1 %more, label %run, label %end
run:
  %lo = mul i64 %chunk, %each
  %upto = add i64 %lo, %each
  %whole = icmp slt i64 %upto, %rows
  %hi = select i1 %whole, i64 %upto, i64 %rows
  call void @work(ptr %job, i64 %lo, i64 %hi)
  atomicrmw add ptr %done, i64 1 acq_rel
  br label %next
end:
  ret void
}

; The last to leave a job frees it.
define internal void @leave(ptr %job) {
entry:
  %holders = getelementptr %job, ptr %job, i32 0, i32 2
  %before = atomicrmw sub ptr %holders, i64 1 acq_rel
  %last = icmp eq i64 %before, 1
  br i1 %last, label %clear, label %end
clear:
  call void @free(ptr %job)
  br label %end
end:
  ret void
}

; What another thread of XLA's runs, perhaps after all is done.
define internal void @task(ptr %job) {
entry:
  call void @take(ptr %job)
  call void @leave(ptr %job)
  ret void
}
"""

_HANDLER = """\
; XLA_FFI_Error* handler(XLA_FFI_CallFrame*)
define ptr @handler(ptr %frame) {{
entry:
  %extension_p = getelementptr i8, ptr %frame, i64 8
  %extension = load ptr, ptr %extension_p
  %api_p = getelementptr i8, ptr %frame, i64 16
  %api = load ptr, ptr %api_p
  %asked = icmp ne ptr %extension, null
  br i1 %asked, label %describe, label %run

; XLA asks which version of its interface this is, and for traits, which are none.
describe:
  %metadata_p = getelementptr i8, ptr %extension, i64 24
  %metadata = load ptr, ptr %metadata_p
  %version_p = getelementptr i8, ptr %api, i64 32
  %version = load i64, ptr %version_p
  %version_out = getelementptr i8, ptr %metadata, i64 24
  store i64 %version, ptr %version_out
  %traits_out = getelementptr i8, ptr %metadata, i64 32
  store i32 0, ptr %traits_out
  ret ptr null

run:
  %context_p = getelementptr i8, ptr %frame, i64 24
  %context = load ptr, ptr %context_p
  %args_p = getelementptr i8, ptr %frame, i64 72
  %args = load ptr, ptr %args_p
  %results_p = getelementptr i8, ptr %frame, i64 112
  %results = load ptr, ptr %results_p
  %w_b = load ptr, ptr %args
  %x_bp = getelementptr i8, ptr %args, i64 8
  %x_b = load ptr, ptr %x_bp
  %y_b = load ptr, ptr %results
  %w_p = getelementptr i8, ptr %w_b, i64 24
  %w = load ptr, ptr %w_p
  %x_p = getelementptr i8, ptr %x_b, i64 24
  %x = load ptr, ptr %x_p
  %y_p = getelementptr i8, ptr %y_b, i64 24
  %y = load ptr, ptr %y_p
  %shape_p = getelementptr i8, ptr %w_b, i64 40
  %shape = load ptr, ptr %shape_p
  %rows = load i64, ptr %shape
  %inner_p = getelementptr i8, ptr %shape, i64 8
  %K = load i64, ptr %inner_p
  %chunk_0 = sdiv i64 {chunk}, %K
  %chunk_1 = sdiv i64 %chunk_0, {rows}
  %chunk_2 = add i64 %chunk_1, 1
  %each = mul i64 %chunk_2, {rows}
  %short = sub i64 %each, 1
  %upper = add i64 %rows, %short
  %chunks = sdiv i64 %upper, %each

  %record = alloca [5 x i64]
  %field_1 = getelementptr i64, ptr %record, i64 1
  %field_2 = getelementptr i64, ptr %record, i64 2
  %field_3 = getelementptr i64, ptr %record, i64 3
  %field_4 = getelementptr i64, ptr %record, i64 4
  store ptr null, ptr %field_1
  store ptr %context, ptr %field_2
  %threads_p = alloca i64
  store i64 1, ptr %threads_p
  store i64 32, ptr %record
  store ptr %threads_p, ptr %field_3
  %count_p = getelementptr i8, ptr %api, i64 144
  %count = load ptr, ptr %count_p
  call ptr %count(ptr %record)
  %threads = load i64, ptr %threads_p
  %fewer = icmp slt i64 %threads, %chunks
  %crew = select i1 %fewer, i64 %threads, i64 %chunks

  %job = call ptr @malloc(i64 80)
  store i64 0, ptr %job
  %done = getelementptr %job, ptr %job, i32 0, i32 1
  store i64 0, ptr %done
  %holders = getelementptr %job, ptr %job, i32 0, i32 2
  store i64 %crew, ptr %holders
  %w_f = getelementptr %job, ptr %job, i32 0, i32 3
  store ptr %w, ptr %w_f
  %x_f = getelementptr %job, ptr %job, i32 0, i32 4
  store ptr %x, ptr %x_f
  %y_f = getelementptr %job, ptr %job, i32 0, i32 5
  store ptr %y, ptr %y_f
  %K_f = getelementptr %job, ptr %job, i32 0, i32 6
  store i64 %K, ptr %K_f
  %rows_f = getelementptr %job, ptr %job, i32 0, i32 7
  store i64 %rows, ptr %rows_f
  %each_f = getelementptr %job, ptr %job, i32 0, i32 8
  store i64 %each, ptr %each_f
  %chunks_f = getelementptr %job, ptr %job, i32 0, i32 9
  store i64 %chunks, ptr %chunks_f
  %schedule_p = getelementptr i8, ptr %api, i64 136
  %schedule = load ptr, ptr %schedule_p
  br label %ask

ask:
  %asked_n = phi i64 [1, %run], [%asked_next, %asking], [%asked_next, %alone]
  %ask_more = icmp slt i64 %asked_n, %crew
  br i1 %ask_more, label %asking, label %mine
asking:
  store i64 40, ptr %record
  store ptr null, ptr %field_1
  store ptr %context, ptr %field_2
  store ptr @task, ptr %field_3
  store ptr %job, ptr %field_4
  %refused = call ptr %schedule(ptr %record)
  %asked_next = add i64 %asked_n, 1
  %no = icmp ne ptr %refused, null
  br i1 %no, label %alone, label %ask
alone:
  call void @leave(ptr %job)
  br label %ask

mine:
  call void @take(ptr %job)
  br label %wait
wait:
  %ready = load atomic i64, ptr %done acquire, align 8
  %all = icmp sge i64 %ready, %chunks
  br i1 %all, label %finish, label %idle
idle:
  call i32 @sched_yield()
  br label %wait
finish:
  call void @leave(ptr %job)
  ret ptr null
}}
"""
