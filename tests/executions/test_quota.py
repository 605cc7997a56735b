import asyncio
import os
from pathlib import Path

import pytest

from belljar.errors import TooLarge
from belljar.files.disk_usage import DiskQuota
from waiting import until

pytestmark = pytest.mark.anyio
MEBIBYTE = 1 << 20


async def test_room_is_measured_and_a_file_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    quota = DiskQuota([tmp_path], 2)
    (tmp_path / "file").write_bytes(bytes(MEBIBYTE))
    await quota.check_room(MEBIBYTE // 2)
    with pytest.raises(TooLarge, match="holds 1 MB, the limit is 2 MB") as refusal:
        await quota.check_room(MEBIBYTE)
    assert "Delete files" in refusal.value.hint
    assert not quota.is_over


async def test_no_limit_measures_nothing(tmp_path: Path) -> None:
    quota = DiskQuota([tmp_path], 0)
    (tmp_path / "file").write_bytes(bytes(MEBIBYTE))
    await quota.check_room(1 << 60)
    await quota.watch(is_busy=lambda: True, on_growth=lambda: None)
    assert (quota.used, quota.is_over, quota.is_far_over) == (0, False, False)


async def test_growth_past_the_limit_is_told_and_shrinking_is_not(tmp_path: Path) -> None:
    quota = DiskQuota([tmp_path], 1)
    (tmp_path / "there already").write_bytes(bytes(2 * MEBIBYTE))
    grown = asyncio.Event()
    watch = asyncio.create_task(quota.watch(is_busy=lambda: True, on_growth=grown.set))
    async with asyncio.timeout(20):
        await until(lambda: quota.is_over)
        os.truncate(tmp_path / "there already", MEBIBYTE + MEBIBYTE // 2)
        used = quota.used
        await until(lambda: quota.used != used)
        assert quota.is_over
        assert not grown.is_set()
        (tmp_path / "more").write_bytes(bytes(2 * MEBIBYTE))
        await grown.wait()
    assert quota.is_far_over
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)


async def test_what_one_cell_wrote_does_not_stop_the_next(tmp_path: Path) -> None:
    quota = DiskQuota([tmp_path], 2)
    grown = asyncio.Event()
    watch = asyncio.create_task(quota.watch(is_busy=lambda: False, on_growth=grown.set))
    async with asyncio.timeout(20):
        (tmp_path / "small").write_bytes(bytes(1))
        await until(lambda: quota.used > 0)
        (tmp_path / "file").write_bytes(bytes(3 * MEBIBYTE))
        await quota.measure()  # as after every cell
        (tmp_path / "small").unlink()
        used = quota.used
        await until(lambda: quota.used != used)  # the watch has looked again
        assert quota.is_over
        assert not grown.is_set()
        (tmp_path / "more").write_bytes(bytes(MEBIBYTE // 2))
        await grown.wait()
    watch.cancel()
    await asyncio.gather(watch, return_exceptions=True)
