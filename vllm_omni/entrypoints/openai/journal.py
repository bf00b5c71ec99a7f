"""`JobJournal`: jobs on disk, one file for each, so that they outlive the server."""

from __future__ import annotations

import asyncio
import logging
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from vllm_omni.entrypoints.openai.errors import storage_full
from vllm_omni.entrypoints.openai.protocol import ErrorInfo, ImagesResponse, JobStatus
from vllm_omni.entrypoints.openai.state_dir import JOBS, make_folder, sweep, write_whole

logger = logging.getLogger(__name__)


class JobEntry(BaseModel):
    """All that is known of a job: what was asked for, by whom, and what became of it."""

    model_config = ConfigDict(extra="forbid")

    version: Literal[1] = 1
    job_id: str
    owner: str
    created_at: int
    body: dict[str, Any]
    base_url: str
    status: JobStatus
    num_starts: int = 0  # servers that had begun it and were killed
    retry_key: str | None = None
    completed_at: int | None = None
    expires_at: float | None = None  # time.time()
    result: ImagesResponse | None = None
    files: dict[str, str] = {}  # of pictures that the result names by their urls, in base64
    error: ErrorInfo | None = None


class JobJournal:
    """The files. All writing is done by one thread, in the order in which it is asked for."""

    def __init__(self, state_dir: Path) -> None:
        self._folder = make_folder(state_dir, JOBS)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="vllm-omni-journal")

    def read(self) -> list[JobEntry]:
        """All jobs, the oldest first; what was half written is swept away."""
        sweep(self._folder)
        entries = [self._read_one(path) for path in sorted(self._folder.glob("job_*.json"))]
        return sorted((e for e in entries if e is not None), key=lambda entry: entry.created_at)

    async def write(self, entry: JobEntry) -> None:
        """Once this is over, the job survives anything; raises an error 507 if it cannot be."""
        call = partial(self._write, entry, is_durable=True)
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, call)
        except OSError as error:
            logger.error("a job cannot be written down: %s", error.strerror)
            raise storage_full() from error

    def note(self, entry: JobEntry) -> None:
        """Write something that may be lost."""
        self._submit(partial(self._write, entry, is_durable=False))

    def forget(self, job_id: str) -> None:
        self._submit(partial(self._get_path(job_id).unlink, missing_ok=True))

    def close(self) -> None:
        """Wait until all is written."""
        self._writer.shutdown()

    def _submit(self, call: partial[None]) -> None:
        self._writer.submit(call).add_done_callback(_tell_failure)

    def _write(self, entry: JobEntry, is_durable: bool) -> None:
        data = entry.model_dump_json(exclude_none=True).encode()
        write_whole(self._get_path(entry.job_id), data, is_durable)

    def _get_path(self, job_id: str) -> Path:
        return self._folder / f"{job_id}.json"

    @staticmethod
    def _read_one(path: Path) -> JobEntry | None:
        try:
            return JobEntry.model_validate_json(path.read_bytes())
        except (OSError, ValidationError) as error:
            # Not ours to throw away: somebody may want to know what it was.
            logger.error("%s is left alone: %s", path.name, type(error).__name__)
            return None


def _tell_failure(done: Future[None]) -> None:
    if (error := done.exception()) is not None:
        logger.error("the journal of jobs: %s", error)
