"""Jobs: pictures that nobody holds a connection for."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from itertools import takewhile
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from vllm_omni.entrypoints.openai.admission import Admission, Ticket
from vllm_omni.entrypoints.openai.api_images import get_base_url, to_response
from vllm_omni.entrypoints.openai.errors import ERROR_RESPONSES, APIError, to_api_error
from vllm_omni.entrypoints.openai.images import ImageService, ImageTask
from vllm_omni.entrypoints.openai.journal import JobEntry, JobJournal
from vllm_omni.entrypoints.openai.protocol import (
    ErrorInfo,
    ImageJobRequest,
    ImagesResponse,
    Job,
    JobList,
    JobStatus,
)
from vllm_omni.entrypoints.openai.retries import RetryKey, check_same, get_fingerprint

logger = logging.getLogger(__name__)

MAX_LISTED = 100
MAX_STARTS = 3  # servers that may be killed while they work on a job
_PERCENT_BEFORE_END = 99  # steps are not all: the picture is still to be decoded and written


@dataclass(eq=False)
class JobRecord:
    """A job on its way, and what became of it."""

    job_id: str
    owner: str  # whose key it came with: nobody else sees it
    created_at: int
    body: ImageJobRequest
    base_url: str  # of urls to pictures
    retry_key: str | None = None
    num_starts: int = 0  # servers that have begun it
    status: JobStatus = "queued"
    progress: int = 0
    completed_at: int | None = None
    expires_at: float | None = None
    result: ImagesResponse | None = None
    error: ErrorInfo | None = None
    ticket: Ticket | None = None  # its place in the queue, until its end
    accepting: asyncio.Task[None] | None = None
    runner: asyncio.Task[None] | None = None

    @property
    def is_ended(self) -> bool:
        return self.completed_at is not None

    @property
    def num_bytes(self) -> int:
        """Of the pictures that it holds."""
        images = [] if self.result is None else self.result.data
        return sum(len(image.b64_json or "") for image in images)

    def to_job(self, admission: Admission, with_result: bool = True) -> Job:
        position = estimate = None
        if self.ticket is not None:
            position = admission.get_position(self.ticket)
            estimate = round(admission.estimate(self.ticket), 1)
        return Job(
            id=self.job_id,
            status=self.status,
            progress=self.progress,
            queue_position=position,
            estimated_seconds=estimate,
            created_at=self.created_at,
            completed_at=self.completed_at,
            expires_at=None if self.expires_at is None else int(self.expires_at),
            result=self.result if with_result else None,
            error=self.error,
        )

    def to_entry(self) -> JobEntry:
        return JobEntry(
            job_id=self.job_id,
            owner=self.owner,
            created_at=self.created_at,
            body=self.body.model_dump(mode="json", exclude_unset=True),
            base_url=self.base_url,
            status=self.status,
            num_starts=self.num_starts,
            retry_key=self.retry_key,
            completed_at=self.completed_at,
            expires_at=self.expires_at,
            result=self.result,
            error=self.error,
        )

    @classmethod
    def from_entry(cls, entry: JobEntry) -> JobRecord:
        return cls(
            job_id=entry.job_id,
            owner=entry.owner,
            created_at=entry.created_at,
            body=ImageJobRequest.model_validate(entry.body),
            base_url=entry.base_url,
            retry_key=entry.retry_key,
            num_starts=entry.num_starts,
            status=entry.status,
            progress=100 if entry.status == "completed" else 0,
            completed_at=entry.completed_at,
            expires_at=entry.expires_at,
            result=entry.result,
            error=entry.error,
        )


class JobStore:
    """All jobs, the oldest first. Those that have ended are forgotten after a while, or earlier
    where their number or their pictures are too many.

    With a journal each is on disk before it is accepted, and its result before it is shown.
    """

    def __init__(
        self,
        images: ImageService,
        clock: Callable[[], float] = time.time,
        journal: JobJournal | None = None,
    ) -> None:
        self.images = images
        self._clock = clock
        self._journal = journal
        self._jobs: dict[str, JobRecord] = {}
        # Of those, by owner, the ones that have ended, in that order; and what they hold together.
        self._ended: defaultdict[str, dict[str, JobRecord]] = defaultdict(dict)
        self._num_ended = 0
        self._num_bytes = 0
        self._by_retry_key: dict[tuple[str, str], JobRecord] = {}

    async def add(
        self, body: ImageJobRequest, base_url: str, owner: str = "", retry_key: str | None = None
    ) -> JobRecord:
        """Queue a job; refuses at once what can never run, or when there are too many.

        Args:
            retry_key: the job that was made with it before is the answer.
        """
        job = self._by_retry_key.get((owner, retry_key or ""))
        if job is not None:
            check_same(get_fingerprint(body), get_fingerprint(job.body))
        else:
            job_id, now = f"job_{uuid.uuid4().hex}", int(self._clock())
            job = JobRecord(job_id, owner, now, body, base_url, retry_key)
            task = self._make_task(job)
            self._check_number()
            job.ticket = self.images.admission.enter(*task.place)
            self._remember(job)
            job.accepting = asyncio.create_task(self._accept(job, task))
        if job.accepting is not None:  # once it is begun it is finished, whoever leaves
            await asyncio.shield(job.accepting)
        return job

    def resume(self) -> None:
        """Go on with what an earlier server has left."""
        entries = self._journal.read() if self._journal is not None else []
        for entry in entries:
            self._remember(JobRecord.from_entry(entry))
            self.images.files.restore(entry.files)
        jobs = [self._jobs[entry.job_id] for entry in entries]
        for job in sorted(jobs, key=lambda job: job.expires_at or math.inf):
            if job.is_ended:
                self._note_ended(job)
            else:
                self._resume(job)
        self._tidy()

    def get(self, job_id: str, owner: str = "") -> JobRecord:
        self._tidy()
        job = self._jobs.get(job_id)
        if job is None or job.owner != owner:
            raise APIError(404, "no such job: it may have expired", "job_id", "job_not_found")
        return job

    def list(self, owner: str = "") -> list[JobRecord]:
        self._tidy()
        return [job for job in self._jobs.values() if job.owner == owner]

    def delete(self, job_id: str, owner: str = "") -> JobRecord:
        """End a job at the next step, or forget one that has ended."""
        job = self.get(job_id, owner)
        if job.is_ended:
            self._forget(job)
        else:
            self._cancel(job)
        return job

    def suspend(self) -> None:
        """Of jobs that the next server will find on disk, end those that have not begun."""
        for job in self._jobs.values() if self._journal is not None else ():
            if job.ticket is not None and not job.ticket.is_started:
                self._stop(job)

    def shutdown(self) -> None:
        """End all; what is on disk goes on from its beginning when there is a server again."""
        for job in list(self._jobs.values()):  # those that have expired are forgotten meanwhile
            if job.is_ended:
                continue
            if self._journal is None:
                self._cancel(job)
            elif job.result is None and job.error is None:  # or its end is being written
                self._stop(job)
                self._journal.note(job.to_entry())
        if self._journal is not None:
            self._journal.close()

    # --- a job's life ---

    def _make_task(self, job: JobRecord) -> ImageTask:
        task = self.images.make_task(job.body, job.job_id, job.base_url, owner=job.owner)
        waited = max(0.0, self._clock() - job.created_at - 1.0)  # which is a whole second
        assert task.request.arrival_time is not None
        task.request.arrival_time -= waited
        return task

    async def _accept(self, job: JobRecord, task: ImageTask) -> None:
        try:
            if self._journal is not None:
                await self._journal.write(job.to_entry())
        except APIError:
            self._leave_queue(job)
            self._forget(job)
            raise
        if not job.is_ended:  # somebody has been quick
            job.runner = asyncio.create_task(self._run(job, task))
        self._tidy()

    def _resume(self, job: JobRecord) -> None:
        job.num_starts += job.status == "in_progress"
        job.status = "queued"
        try:
            if job.num_starts >= MAX_STARTS:
                logger.error("%s is given up: servers were killed while they drew it", job.job_id)
                message = f"{job.num_starts} servers were killed while they worked on this job"
                raise APIError(500, message, code="too_many_attempts")
            task = self._make_task(job)
        except APIError as error:  # or the settings are others now
            job.error = error.info
            self._end(job, "failed")
            return
        job.ticket = self.images.admission.enter(*task.place, is_promised=True)
        job.runner = asyncio.create_task(self._run(job, task))

    async def _run(self, job: JobRecord, task: ImageTask) -> None:
        assert job.ticket is not None
        try:
            job.result = await self.images.run(
                task, job.ticket, lambda step, num_steps: self._note_step(job, step, num_steps)
            )
        except Exception as error:  # the client is told when it asks
            job.error = to_api_error(error).info
            await self._finish(job, "failed")
        else:
            await self._finish(job, "completed")

    def _note_step(self, job: JobRecord, step: int, num_steps: int) -> None:
        if not step or job.is_ended:
            return
        if job.status == "queued":
            job.status = "in_progress"
            if self._journal is not None:
                self._journal.note(job.to_entry())
        job.progress = min(_PERCENT_BEFORE_END, 100 * step // num_steps)

    async def _finish(self, job: JobRecord, status: JobStatus) -> None:
        """Nobody sees a result that a crash could take back."""
        if self._journal is not None:
            entry = job.to_entry()
            entry.status, entry.completed_at, entry.expires_at = status, *self._get_end()
            urls = [image.url for image in job.result.data] if job.result is not None else []
            entry.files = self.images.files.dump(filter(None, urls))
            # If it cannot be written, which has been logged, this server still has the result.
            with suppress(APIError):
                await self._journal.write(entry)
        job.progress = 100 if status == "completed" else job.progress
        self._end(job, status)

    def _cancel(self, job: JobRecord) -> None:
        self._stop(job)
        self._end(job, "cancelled")
        if self._journal is not None:
            self._journal.forget(job.job_id)

    def _stop(self, job: JobRecord) -> None:
        if job.runner is not None:
            job.runner.cancel()
        job.status = "queued"
        self._leave_queue(job)

    def _end(self, job: JobRecord, status: JobStatus) -> None:
        self._leave_queue(job)
        job.status = status
        job.completed_at, job.expires_at = self._get_end()
        self._note_ended(job)
        self._tidy()

    def _get_end(self) -> tuple[int, float]:
        now = self._clock()
        return int(now), now + self.images.config.job_ttl

    # --- how many ---

    def _check_number(self) -> None:
        most = self.images.config.max_jobs
        if len(self._jobs) - self._num_ended >= most:
            self.images.admission.note_shed("jobs")
            raise APIError(
                429,
                f"too many jobs: {most} are under way",
                code="queue_full",
                headers={"Retry-After": str(self.images.admission.retry_after)},
            )

    def _leave_queue(self, job: JobRecord) -> None:
        if job.ticket is not None:
            self.images.admission.leave(job.ticket)
            job.ticket = None

    def _remember(self, job: JobRecord) -> None:
        self._jobs[job.job_id] = job
        if job.retry_key is not None:
            self._by_retry_key[job.owner, job.retry_key] = job

    def _note_ended(self, job: JobRecord) -> None:
        self._ended[job.owner][job.job_id] = job
        self._num_ended += 1
        self._num_bytes += job.num_bytes

    def _forget(self, job: JobRecord) -> None:
        del self._jobs[job.job_id]
        if self._ended[job.owner].pop(job.job_id, None) is not None:
            self._num_ended -= 1
            self._num_bytes -= job.num_bytes
        if job.retry_key is not None:
            self._by_retry_key.pop((job.owner, job.retry_key), None)
        if self._journal is not None:
            self._journal.forget(job.job_id)

    def _tidy(self) -> None:
        """Forget what has expired; then, while there is too much, whatever ended first of the key
        that has the most."""
        now, config = self._clock(), self.images.config
        for jobs in list(self._ended.values()):
            for job in list(takewhile(lambda job: (job.expires_at or 0.0) <= now, jobs.values())):
                self._forget(job)
        while len(self._jobs) > config.max_jobs or self._num_bytes > config.max_files_bytes:
            most = max(self._ended.values(), key=len, default={})
            if not most:
                break
            self._forget(next(iter(most.values())))


def make_router(jobs: JobStore) -> APIRouter:
    """The routes under /v1/images/jobs."""
    router = APIRouter(prefix="/v1/images/jobs", tags=["jobs"], responses=ERROR_RESPONSES)
    admission = jobs.images.admission

    @router.post("", status_code=202, summary="Queue a job", response_model=Job)
    async def create(
        body: ImageJobRequest, request: Request, idempotency_key: RetryKey = None
    ) -> Any:
        owner = request.state.owner
        job = await jobs.add(body, get_base_url(request), owner, idempotency_key)
        return job.to_job(admission, with_result=False)

    @router.get("", summary="List jobs, without their pictures", response_model=JobList)
    async def list_jobs(
        request: Request,
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        after: Annotated[str | None, Query(max_length=64)] = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Any:
        records = jobs.list(request.state.owner)
        if order == "desc":
            records.reverse()
        if after is not None:
            ids = [record.job_id for record in records]
            if after not in ids:
                raise APIError(400, f"after={after!r} is not a job here", "after")
            records = records[ids.index(after) + 1 :]
        page = [record.to_job(admission, with_result=False) for record in records[:limit]]
        return JobList(data=page, has_more=len(records) > limit)

    @router.get("/{job_id}", summary="How a job is doing, and its pictures", response_model=Job)
    async def get(job_id: str, request: Request) -> Any:
        return to_response(jobs.get(job_id, request.state.owner).to_job(admission))

    @router.delete(
        "/{job_id}", summary="Cancel a job, or forget a finished one", response_model=Job
    )
    async def delete(job_id: str, request: Request) -> Any:
        job = jobs.delete(job_id, request.state.owner)
        return job.to_job(admission, with_result=False)

    return router
