"""Pictures behind urls: kept for a while, and within a budget."""

from __future__ import annotations

import pytest

from vllm_omni.entrypoints.openai.errors import APIError
from vllm_omni.entrypoints.openai.files import PATH, FileStore


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def files(clock: Clock) -> FileStore:
    return FileStore(ttl=60.0, max_bytes=10, clock=clock)


def get_data(files: FileStore, path: str) -> bytes | None:
    file = files.get(path.removeprefix(f"{PATH}/"))
    return None if file is None else file.data


def test_a_picture_is_there_until_its_time_is_over(files: FileStore, clock: Clock) -> None:
    first = files.add(b"123", "png")
    clock.now += 30
    second = files.add(b"45", "webp")
    file = files.get(first.removeprefix(f"{PATH}/"))
    assert file is not None
    assert (file.data, file.media_type, files.get_seconds_left(file)) == (b"123", "image/png", 30)
    clock.now += 30
    assert (get_data(files, first), get_data(files, second)) == (None, b"45")
    assert files.used_bytes == 2
    clock.now += 30
    assert get_data(files, second) is None
    assert files.used_bytes == 0


def test_the_oldest_give_way(files: FileStore) -> None:
    paths = [files.add(data, "png") for data in (b"1234", b"5678", b"90")]
    assert files.used_bytes == 10
    paths.append(files.add(b"abcde", "png"))
    assert [get_data(files, path) for path in paths] == [None, None, b"90", b"abcde"]
    assert files.used_bytes == 7


def test_one_that_is_larger_than_all_is_refused(files: FileStore) -> None:
    kept = files.add(b"12", "png")
    with pytest.raises(APIError, match="ask for b64_json") as caught:
        files.add(bytes(11), "png")
    assert (caught.value.status, caught.value.param) == (400, "response_format")
    assert get_data(files, kept) == b"12"


def test_names_cannot_be_guessed(files: FileStore) -> None:
    names = {files.add(b"1", "jpeg") for _ in range(100)}
    assert len(names) == 100
    assert all(len(name.removeprefix(f"{PATH}/").removesuffix(".jpeg")) == 32 for name in names)
