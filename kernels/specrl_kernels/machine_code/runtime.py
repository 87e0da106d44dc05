"""What kernels share: how XLA calls them, and how its threads divide the work.

A kernel is an LLVM module with two functions over buffers, the addresses (data, shape) of each
operand and then of the result:

    void plan(ptr buffers, ptr sizes)           fills i64 sizes[2]: units of work, units of a chunk
    void work(ptr buffers, i64 first, i64 end)  does some units

The thread that XLA calls submits helpers to XLA's thread pool, works on chunks until none is left,
and waits for chunks that helpers have begun. It never waits for a helper that has not started, so a
busy pool delays no call. Each thread takes neighbouring chunks as long as it can: two cores that
read alternate pieces of 64 KB reached 50 GB/s, in two streams 65 GB/s (experiments/LOG.md).
"""

import ctypes
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from specrl_kernels.dispatch import Unsupported, traced_for


class Code(NamedTuple):
    """Machine code that is registered with XLA."""

    name: str
    engine: Any  # owns the memory of the code


def require_cpu() -> None:
    """
    Raises:
      Unsupported: programs are not made for a CPU, or their operands may be split by XLA.
    """
    platform = traced_for().platform
    if platform != "cpu":
        raise Unsupported(f"{platform}: CPUs only")
    mesh = jax.sharding.get_abstract_mesh()
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if kind != jax.sharding.AxisType.Manual and mesh.shape[name] > 1:
            raise Unsupported(f"the compiler may split operands over mesh axis {name!r}")


def register(name: str, operands: int, generate: Callable[[], Any]) -> Code:
    """Compiles a kernel and registers it as a target of jax.ffi.ffi_call, once in a process.

    Args:
      operands: how many buffers it reads; it writes one.
      generate: makes its llvmlite.ir.Module; called where llvmlite is known to be there.

    Raises:
      Unsupported: there is no code generator here.
    """
    try:
        import llvmlite.binding as llvm
    except ImportError as reason:
        raise Unsupported("needs the package llvmlite: pip install llvmlite") from reason
    if ctypes.sizeof(ctypes.c_void_p) != 8:
        raise Unsupported("needs a 64-bit CPU")
    if not has("fma"):  # LLVM would call the C library for each lane
        raise Unsupported("needs a CPU with fused multiply-add")
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    module = llvm.parse_assembly(_RUNTIME.format(
        operands=operands, buffers=operands + 1, line=_LINE,
        job=_FIELDS * 8 + 16 * (operands + 1)))
    module.link_in(llvm.parse_assembly(str(generate())))
    module.verify()
    engine = llvm.create_mcjit_compiler(module, _machine())
    engine.finalize_object()
    address = ctypes.c_void_p(engine.get_function_address("handler"))
    jax.ffi.register_ffi_target(name, jax.ffi.pycapsule(address), platform="cpu")
    return Code(name, engine)


def _machine() -> Any:
    import llvmlite.binding as llvm

    features = llvm.get_host_cpu_features()
    flags = features.flatten()
    if features.get("avx512f"):
        flags += ",-prefer-256-bit"
    return llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=flags, opt=3)


def has(feature: str) -> bool:
    """Returns whether the CPU has an x86 `feature`; 64-bit ARM has a counterpart of each."""
    import llvmlite.binding as llvm

    triple = llvm.get_default_triple()
    return triple.startswith(("aarch64", "arm64")) or bool(
        llvm.get_host_cpu_features().get(feature))


_FIELDS, _LINE = 7, 64  # of a job; bytes of a cache line
# The offsets in `handler` are those of XLA's C interface for foreign functions, whose structures
# only ever grow at their ends (xla/ffi/api/c_api.h, major version 0).
_RUNTIME = """
; threads that began, chunks done, threads that hold the job, chunks, units, units of a chunk,
; ranges of chunks, buffers; behind it, in a cache line each, how many of a range's are taken
%job = type {{ i64, i64, i64, i64, i64, i64, i64, [{buffers} x {{ ptr, ptr }}] }}
declare void @plan(ptr, ptr)
declare void @work(ptr, i64, i64)
declare ptr @malloc(i64)
declare void @free(ptr)
declare i32 @sched_yield()

; Takes the chunks of a range of its own in order, then what is left of the others'.
define internal void @take(ptr %job) {{
entry:
  %me = atomicrmw add ptr %job, i64 1 acq_rel
  %done = getelementptr %job, ptr %job, i32 0, i32 1
  %chunks_f = getelementptr %job, ptr %job, i32 0, i32 3
  %chunks = load i64, ptr %chunks_f
  %units_f = getelementptr %job, ptr %job, i32 0, i32 4
  %units = load i64, ptr %units_f
  %each_f = getelementptr %job, ptr %job, i32 0, i32 5
  %each = load i64, ptr %each_f
  %ranges_f = getelementptr %job, ptr %job, i32 0, i32 6
  %ranges = load i64, ptr %ranges_f
  %buffers = getelementptr %job, ptr %job, i32 0, i32 7
  %counters = getelementptr %job, ptr %job, i32 1
  %last_turn = add i64 %me, %ranges
  br label %turn
turn:
  %t = phi i64 [%me, %entry], [%t_next, %drained]
  %t_more = icmp slt i64 %t, %last_turn
  br i1 %t_more, label %open, label %end
open:
  %range = srem i64 %t, %ranges
  %range_next = add i64 %range, 1
  %from_all = mul i64 %range, %chunks
  %from = sdiv i64 %from_all, %ranges
  %to_all = mul i64 %range_next, %chunks
  %to = sdiv i64 %to_all, %ranges
  %counter = getelementptr [{line} x i8], ptr %counters, i64 %range
  br label %next
next:
  %taken = atomicrmw add ptr %counter, i64 1 acq_rel
  %chunk = add i64 %from, %taken
  %more = icmp slt i64 %chunk, %to
  br i1 %more, label %run, label %drained
run:
  %first = mul i64 %chunk, %each
  %upto = add i64 %first, %each
  %whole = icmp slt i64 %upto, %units
  %last = select i1 %whole, i64 %upto, i64 %units
  call void @work(ptr %buffers, i64 %first, i64 %last)
  atomicrmw add ptr %done, i64 1 acq_rel
  br label %next
drained:
  %t_next = add i64 %t, 1
  br label %turn
end:
  ret void
}}

; The last to leave a job frees it.
define internal void @leave(ptr %job) {{
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
}}

; What another thread of the pool runs, perhaps after all is done.
define internal void @task(ptr %job) {{
entry:
  call void @take(ptr %job)
  call void @leave(ptr %job)
  ret void
}}

; Copies the addresses of one XLA_FFI_Buffer's data and shape.
define internal void @enter(ptr %job, ptr %list, i64 %from, i64 %to) {{
entry:
  %buffer_p = getelementptr ptr, ptr %list, i64 %from
  %buffer = load ptr, ptr %buffer_p
  %data_p = getelementptr i8, ptr %buffer, i64 24
  %data = load ptr, ptr %data_p
  %shape_p = getelementptr i8, ptr %buffer, i64 40
  %shape = load ptr, ptr %shape_p
  %data_out = getelementptr %job, ptr %job, i32 0, i32 7, i64 %to, i32 0
  store ptr %data, ptr %data_out
  %shape_out = getelementptr %job, ptr %job, i32 0, i32 7, i64 %to, i32 1
  store ptr %shape, ptr %shape_out
  ret void
}}

; XLA_FFI_Error* handler(XLA_FFI_CallFrame*)
define ptr @handler(ptr %frame) {{
entry:
  %extension_p = getelementptr i8, ptr %frame, i64 8
  %extension = load ptr, ptr %extension_p
  %api_p = getelementptr i8, ptr %frame, i64 16
  %api = load ptr, ptr %api_p
  %record = alloca [5 x i64]
  %threads_p = alloca i64
  %asked = icmp ne ptr %extension, null
  br i1 %asked, label %describe, label %run

; XLA asks which version of its interface this is, and for traits, of which there are none.
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

  ; XLA_FFI_ThreadPool_NumThreads
  %field_1 = getelementptr i64, ptr %record, i64 1
  %field_2 = getelementptr i64, ptr %record, i64 2
  %field_3 = getelementptr i64, ptr %record, i64 3
  %field_4 = getelementptr i64, ptr %record, i64 4
  store i64 1, ptr %threads_p
  store i64 32, ptr %record
  store ptr null, ptr %field_1
  store ptr %context, ptr %field_2
  store ptr %threads_p, ptr %field_3
  %count_p = getelementptr i8, ptr %api, i64 144
  %count = load ptr, ptr %count_p
  call ptr %count(ptr %record)
  %threads = load i64, ptr %threads_p
  %some_threads = icmp sgt i64 %threads, 1
  %most = select i1 %some_threads, i64 %threads, i64 1
  %lines = mul i64 %most, {line}
  %size = add i64 %lines, {job}
  %job = call ptr @malloc(i64 %size)
  store i64 0, ptr %job
  %done = getelementptr %job, ptr %job, i32 0, i32 1
  store i64 0, ptr %done
  br label %copy
copy:
  %i = phi i64 [0, %run], [%i_next, %copy]
  call void @enter(ptr %job, ptr %args, i64 %i, i64 %i)
  %i_next = add i64 %i, 1
  %i_more = icmp slt i64 %i_next, {operands}
  br i1 %i_more, label %copy, label %divide

divide:
  call void @enter(ptr %job, ptr %results, i64 0, i64 {operands})
  %buffers = getelementptr %job, ptr %job, i32 0, i32 7
  %units_f = getelementptr %job, ptr %job, i32 0, i32 4
  call void @plan(ptr %buffers, ptr %units_f)
  %units = load i64, ptr %units_f
  %each_f = getelementptr %job, ptr %job, i32 0, i32 5
  %each = load i64, ptr %each_f
  %short = sub i64 %each, 1
  %upper = add i64 %units, %short
  %chunks = sdiv i64 %upper, %each
  %chunks_f = getelementptr %job, ptr %job, i32 0, i32 3
  store i64 %chunks, ptr %chunks_f

  %fewer = icmp slt i64 %threads, %chunks
  %least = select i1 %fewer, i64 %threads, i64 %chunks
  %some = icmp sgt i64 %least, 1
  %crew = select i1 %some, i64 %least, i64 1
  %holders = getelementptr %job, ptr %job, i32 0, i32 2
  store i64 %crew, ptr %holders
  %ranges_f = getelementptr %job, ptr %job, i32 0, i32 6
  store i64 %crew, ptr %ranges_f
  %counters = getelementptr %job, ptr %job, i32 1
  %schedule_p = getelementptr i8, ptr %api, i64 136
  %schedule = load ptr, ptr %schedule_p
  br label %clear
clear:
  %c = phi i64 [0, %divide], [%c_next, %clear]
  %counter = getelementptr [{line} x i8], ptr %counters, i64 %c
  store i64 0, ptr %counter
  %c_next = add i64 %c, 1
  %c_more = icmp slt i64 %c_next, %crew
  br i1 %c_more, label %clear, label %ask

ask:
  %member = phi i64 [1, %clear], [%member_next, %asking], [%member_next, %alone]
  %missing = icmp slt i64 %member, %crew
  br i1 %missing, label %asking, label %mine
asking:
  ; XLA_FFI_ThreadPool_Schedule
  store i64 40, ptr %record
  store ptr null, ptr %field_1
  store ptr %context, ptr %field_2
  store ptr @task, ptr %field_3
  store ptr %job, ptr %field_4
  %refused = call ptr %schedule(ptr %record)
  %member_next = add i64 %member, 1
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
