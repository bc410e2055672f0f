from __future__ import annotations

import asyncio
import gc
import mmap
import os
import weakref
from collections.abc import Callable

import pytest

from tiermem.slab import Pin, SlabPool


def test_slabs_are_page_aligned_disjoint_and_writable() -> None:
    pool = SlabPool(4097, 3)
    assert pool.slab_bytes == 8192

    async def main() -> None:
        slabs = [await pool.acquire() for _ in range(3)]
        for i, slab in enumerate(slabs):
            assert slab.address % mmap.PAGESIZE == 0
            assert slab.nbytes == len(slab.view) == 8192
            slab.view[:] = bytes([i + 1]) * 8192
        for i, slab in enumerate(slabs):
            assert bytes(slab.view) == bytes([i + 1]) * 8192
            slab.give_back()

    asyncio.run(main())
    assert pool.available == 3


def test_loans_are_bounded_and_served_in_order() -> None:
    pool = SlabPool(1, 2)
    served: list[int] = []
    on_loan = peak = 0

    async def borrow(name: int) -> None:
        nonlocal on_loan, peak
        async with pool.loan():
            served.append(name)
            on_loan += 1
            peak = max(peak, on_loan)
            await asyncio.sleep(0)
            on_loan -= 1

    async def main() -> None:
        await asyncio.gather(*(borrow(i) for i in range(20)))

    asyncio.run(main())
    assert served == list(range(20))
    assert peak == 2
    assert pool.available == 2


def test_giving_back_twice_is_an_error() -> None:
    pool = SlabPool(1, 1)

    async def main() -> None:
        slab = await pool.acquire()
        slab.give_back()
        with pytest.raises(AssertionError, match="twice"):
            slab.give_back()

    asyncio.run(main())
    assert pool.available == 1


def test_a_cancelled_waiter_loses_no_slab() -> None:
    pool = SlabPool(1, 1)

    async def main() -> None:
        slab = await pool.acquire()
        waiters = [asyncio.create_task(pool.acquire()) for _ in range(3)]
        await asyncio.sleep(0)
        waiters[0].cancel()  # while it waits
        slab.give_back()
        waiters[1].cancel()  # after the slab was handed to it, before it ran
        third = await waiters[2]
        third.give_back()
        await asyncio.gather(*waiters, return_exceptions=True)

    asyncio.run(main())
    assert pool.available == 1


def test_an_exception_in_a_loan_gives_the_slab_back() -> None:
    pool = SlabPool(1, 1)

    async def main() -> None:
        with pytest.raises(ZeroDivisionError):
            async with pool.loan():
                raise ZeroDivisionError

    asyncio.run(main())
    assert pool.available == 1


def test_pin_sees_the_whole_mapping_and_is_undone_once() -> None:
    pinned: list[tuple[int, int]] = []
    unpinned: list[bool] = []

    def pin(address: int, nbytes: int):  # type: ignore[no-untyped-def]
        pinned.append((address, nbytes))
        return lambda: unpinned.append(True)

    pool = SlabPool(5000, 7, pin)
    assert pinned == [(pool.address, 7 * 8192)]
    pool.close()
    pool.close()
    assert unpinned == [True]


def test_several_pins_are_undone_in_reverse_also_when_one_fails() -> None:
    log: list[str] = []

    def pin(name: str, fails: bool = False) -> Pin:
        def one(address: int, nbytes: int) -> Callable[[], None]:
            if fails:
                raise RuntimeError(f"{name} fails")
            log.append(name)
            return lambda: log.append(f"un{name}")

        return one

    SlabPool(1, 1, [pin("a"), pin("b")]).close()
    assert log == ["a", "b", "unb", "una"]
    log.clear()
    with pytest.raises(RuntimeError, match="b fails"):
        SlabPool(1, 1, [pin("a"), pin("b", fails=True)])
    assert log == ["a", "una"]


def test_a_forked_child_has_no_part_in_the_memory() -> None:
    pool = SlabPool(1 << 20, 2)
    slab = asyncio.run(pool.acquire())
    slab.view[:] = b"x" * slab.nbytes
    pid = os.fork()
    if pid == 0:
        os._exit(0 if set(slab.view) == {0} else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert set(slab.view) == {ord("x")}


def test_close_wakes_waiters_with_an_error_and_leaves_loans_readable() -> None:
    pool = SlabPool(4096, 1)

    async def main() -> None:
        slab = await pool.acquire()
        slab.view[:4] = b"kept"
        waiter = asyncio.create_task(pool.acquire())
        await asyncio.sleep(0)
        pool.close()
        with pytest.raises(RuntimeError, match="closed"):
            await waiter
        with pytest.raises(RuntimeError, match="closed"):
            await pool.acquire()
        assert bytes(slab.view[:4]) == b"kept"
        slab.give_back()

    asyncio.run(main())


def test_memory_is_returned_when_the_last_view_is_gone() -> None:
    def resident_bytes() -> int:
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * mmap.PAGESIZE

    pool = SlabPool(32 << 20, 1)
    slab = asyncio.run(pool.acquire())
    before = resident_bytes()
    slab.view[:: mmap.PAGESIZE] = bytes(len(slab.view[:: mmap.PAGESIZE]))
    assert resident_bytes() - before > 30 << 20
    reference = weakref.ref(pool)
    pool.close()
    del slab, pool
    gc.collect()
    assert reference() is None
    assert resident_bytes() - before < 4 << 20


@pytest.mark.parametrize(("slab_bytes", "count"), [(0, 1), (1, 0), (-1, 3)])
def test_impossible_pools_are_refused(slab_bytes: int, count: int) -> None:
    with pytest.raises(ValueError, match="at least one"):
        SlabPool(slab_bytes, count)
