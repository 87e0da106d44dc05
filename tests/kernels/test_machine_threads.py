"""How machine code divides its work over a thread pool: a pool that never comes delays nobody."""

import ctypes
import threading

import numpy as np
import pytest
from specrl_kernels.machine_code import runtime

POINTER, NUMBER = ctypes.c_void_p, ctypes.c_int64
Schedule = ctypes.CFUNCTYPE(POINTER, POINTER)
ROWS, INNER, COLUMNS = 5000, 64, 3  # chunks of 258 rows


class Pool:
    """What XLA's interface for foreign functions tells of a pool, see runtime's `handler`.

    Args:
      threads: how many it says it has.
      answer: of `schedule`; 0 is taken, anything else refused.
      runs: whether a task that it took is run, by a thread of its own.
    """

    def __init__(self, threads: int, answer: int, runs: bool) -> None:
        self.threads, self.answer, self.runs = threads, answer, runs
        self.asked, self.workers = 0, []
        self.count, self.schedule = Schedule(self._count), Schedule(self._schedule)

    def _count(self, record: int) -> int:
        fields = ctypes.cast(record, ctypes.POINTER(POINTER))
        ctypes.cast(fields[3], ctypes.POINTER(NUMBER))[0] = self.threads
        return 0

    def _schedule(self, record: int) -> int:
        fields = ctypes.cast(record, ctypes.POINTER(POINTER))
        self.asked += 1
        if self.runs:
            task = ctypes.CFUNCTYPE(None, POINTER)(fields[3])
            worker = threading.Thread(target=task, args=(fields[4],))
            self.workers.append(worker)
            worker.start()
        return self.answer


def call(pool: Pool, arrays: list[np.ndarray]) -> None:
    """narrow_matmul's handler on (w, x, y), the last of which it writes."""
    memory = [(NUMBER * array.ndim)(*array.shape) for array in arrays]
    buffers = [(POINTER * 6)(None, None, None, array.ctypes.data, None, ctypes.addressof(shape))
               for array, shape in zip(arrays, memory, strict=True)]
    addresses = [ctypes.addressof(buffer) for buffer in buffers]
    inputs, outputs = (POINTER * 2)(*addresses[:2]), (POINTER * 1)(addresses[2])
    api = (POINTER * 19)()
    api[17] = ctypes.cast(pool.schedule, POINTER)
    api[18] = ctypes.cast(pool.count, POINTER)
    frame = (POINTER * 15)()
    frame[2], frame[9], frame[14] = (ctypes.addressof(x) for x in (api, inputs, outputs))
    code = runtime.compiled("narrow_matmul", (COLUMNS,), 2)
    address = code.engine.get_function_address("handler")
    handler = ctypes.CFUNCTYPE(POINTER, POINTER)(address)
    assert handler(ctypes.addressof(frame)) is None


@pytest.mark.parametrize(("threads", "answer", "runs"), [
    (1, 0, False), (4, 1, False), (4, 0, False), (4, 0, True), (1000, 0, True)])
def test_rows_are_all_done_whichever_threads_come(threads, answer, runs):
    pytest.importorskip("llvmlite")
    runtime.require_cpu()
    rng = np.random.default_rng(0)
    w, x = (rng.standard_normal(shape).astype(np.float32) for shape in
            ((ROWS, INNER), (COLUMNS, INNER)))
    y, pool = np.full((ROWS, COLUMNS), np.nan, np.float32), Pool(threads, answer, runs)
    caller = threading.Thread(target=call, args=(pool, [w, x, y]), daemon=True)
    caller.start()
    caller.join(60)
    assert not caller.is_alive(), "it waits for threads that do not come"
    for worker in pool.workers:
        worker.join(60)
    assert pool.asked == min(threads, -(-ROWS // 258)) - 1
    np.testing.assert_allclose(y, w @ x.T, atol=1e-4)
