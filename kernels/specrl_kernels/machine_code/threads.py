"""The function that XLA calls, and how XLA's threads divide a kernel's work.

A kernel is an LLVM module with two functions over buffers, the addresses (data, shape) of each
operand and then of the result:

    void plan(ptr buffers, ptr sizes)           fills i64 sizes[2]: units of work, units of a chunk
    void work(ptr buffers, i64 first, i64 end)  does some units

The thread that XLA calls submits helpers to XLA's thread pool, works on chunks until none is left,
and waits for chunks that helpers have begun. It never waits for a helper that has not started, so a
busy pool delays no call. Each thread takes neighbouring chunks as long as it can: two cores that
read alternate pieces of 64 KB reached 50 GB/s, in two streams 65 GB/s (experiments/LOG.md).
"""

from llvmlite import ir

from specrl_kernels.machine_code.emit import I32, I64, POINTER, VOID, Function

BEGAN, DONE, HOLDERS, CHUNKS, UNITS, EACH, RANGES, BUFFERS = range(8)
"""Fields of a job, 8 bytes each: threads that began, chunks done, threads that hold the job, chunks
in all, units in all, units of a chunk, ranges of chunks; then all buffers, two addresses each. A
cache line for each range follows, which counts how many of its chunks are taken."""
LINE = 64  # bytes of a cache line
# Fields of XLA's C interface for foreign functions, whose structures only grow at their ends
# (xla/ffi/api/c_api.h, major version 0); 8 bytes each.
EXTENSION, API, CONTEXT, ARGS, RESULTS = 1, 2, 3, 9, 14  # of XLA_FFI_CallFrame
VERSION, SCHEDULE, THREADS = 4, 17, 18  # of XLA_FFI_Api
DATA, SHAPE = 3, 5  # of XLA_FFI_Buffer
NULL = ir.Constant(POINTER, None)


def add_handler(module: ir.Module, operands: int) -> None:
    """Adds `handler`, which XLA calls with an XLA_FFI_CallFrame, to a kernel's module."""
    counters = BUFFERS + 2 * (operands + 1)
    _add_take(module, counters)
    _add_leave(module)
    task = Function(module, "task", [POINTER], internal=True)  # may run after all is done
    for name in ("take", "leave"):
        task.call(name, VOID, *task.args)
    task.b.ret_void()
    f = Function(module, "handler", [POINTER], POINTER)
    frame, = f.args
    api, context = (f.get(frame, i, kind=POINTER) for i in (API, CONTEXT))
    _describe(f, f.get(frame, EXTENSION, kind=POINTER), api)
    record = f.call("malloc", POINTER, f.number(6 * 8))  # llvmlite types what alloca returns
    threads = f.at(record, 5, kind=I64)
    f.b.store(f.number(1), threads)
    _ask(f, api, THREADS, record, context, threads)
    threads = f.b.load(threads, typ=I64)
    job = f.call("malloc", POINTER, f.total(8 * counters, (f.larger(threads, 1), LINE)))
    chunks, crew = _fill(f, job, frame, operands, threads)
    f.each(0, crew, 1, lambda i: f.b.store(
        f.number(0), f.at(job, counters, (i, LINE // 8), kind=I64)))

    def hire(_: ir.Value) -> None:
        refused = _ask(f, api, SCHEDULE, record, context, task.ir, job)
        with f.b.if_then(f.b.icmp_unsigned("!=", refused, NULL)):
            f.call("leave", VOID, job)

    f.each(1, crew, 1, hire)
    f.call("free", VOID, record)
    f.call("take", VOID, job)
    f.repeat(lambda: _less(f, f.b.load_atomic(f.at(job, DONE, kind=I64), "acquire", 8, typ=I64),
                           chunks), lambda _: f.call("sched_yield", I32))
    f.call("leave", VOID, job)
    f.b.ret(NULL)


def _add_take(module: ir.Module, counters: int) -> None:
    """take(job) works on the chunks of a range of its own in order, then on other ranges' rest."""
    f = Function(module, "take", [POINTER], internal=True)
    job, = f.args
    me = f.atomic_add(f.at(job, BEGAN, kind=I64), 1)
    chunks, units, each, ranges = (f.get(job, i, kind=I64) for i in (CHUNKS, UNITS, EACH, RANGES))

    def work(chunk: ir.Value) -> None:
        first = f.b.mul(chunk, each)
        f.call("work", VOID, f.at(job, BUFFERS, kind=I64), first,
               f.smaller(f.b.add(first, each), units))
        f.atomic_add(f.at(job, DONE, kind=I64), 1)

    def turn(number: ir.Value) -> None:
        own = f.b.srem(number, ranges)
        start, end = (f.b.sdiv(f.b.mul(i, chunks), ranges) for i in (own, f.total(own, 1)))
        taken = f.at(job, counters, (own, LINE // 8), kind=I64)
        f.repeat(lambda: _less(f, f.total(start, f.atomic_add(taken, 1)), end), work)

    f.each(me, f.b.add(me, ranges), 1, turn)
    f.b.ret_void()


def _add_leave(module: ir.Module) -> None:
    """leave(job): the last thread to leave a job frees it."""
    f = Function(module, "leave", [POINTER], internal=True)
    job, = f.args
    before = f.atomic_add(f.at(job, HOLDERS, kind=I64), -1)
    with f.b.if_then(f.b.icmp_signed("==", before, f.number(1))):
        f.call("free", VOID, job)
    f.b.ret_void()


def _describe(f: Function, extension: ir.Value, api: ir.Value) -> None:
    """Answers XLA where it asks for the interface's version, and for traits: there are none."""
    with f.b.if_then(f.b.icmp_unsigned("!=", extension, NULL)):
        metadata = f.get(extension, 3, kind=POINTER)
        f.b.store(f.get(api, VERSION, kind=I64), f.at(metadata, 3, kind=I64))
        f.b.store(ir.Constant(I32, 0), f.at(metadata, 8, kind=I32))
        f.b.ret(NULL)


def _ask(f: Function, api: ir.Value, function: int, record: ir.Value, *fields: ir.Value
         ) -> ir.Value:
    """Calls a function of XLA's interface with a record: its size, no extension, and `fields`."""
    for i, value in enumerate((f.number(8 * (2 + len(fields))), NULL, *fields)):
        f.b.store(value, f.at(record, i, kind=I64))
    kind = ir.FunctionType(POINTER, [POINTER]).as_pointer()
    return f.b.call(f.b.inttoptr(f.get(api, function, kind=I64), kind), [record])


def _fill(f: Function, job: ir.Value, frame: ir.Value, operands: int, threads: ir.Value
          ) -> tuple[ir.Value, ir.Value]:
    """Fills a job's fields; returns its number of chunks, and of threads that it has work for."""
    args, results = (f.get(frame, i, kind=POINTER) for i in (ARGS, RESULTS))
    buffers = [*(f.get(args, i, kind=POINTER) for i in range(operands)),
               f.get(results, 0, kind=POINTER)]
    for i, buffer in enumerate(buffers):
        for j, field in enumerate((DATA, SHAPE)):
            f.b.store(f.get(buffer, field, kind=POINTER),
                      f.at(job, BUFFERS + 2 * i + j, kind=I64))
    f.call("plan", VOID, f.at(job, BUFFERS, kind=I64), f.at(job, UNITS, kind=I64))
    units, each = (f.get(job, i, kind=I64) for i in (UNITS, EACH))
    chunks = f.b.sdiv(f.total(units, each, -1), each)
    crew = f.larger(f.smaller(threads, chunks), 1)
    zero = f.number(0)
    for i, value in ((BEGAN, zero), (DONE, zero), (CHUNKS, chunks), (HOLDERS, crew),
                     (RANGES, crew)):
        f.b.store(value, f.at(job, i, kind=I64))
    return chunks, crew


def _less(f: Function, x: ir.Value, y: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Returns x, and whether it is less than y."""
    return x, f.b.icmp_signed("<", x, y)
