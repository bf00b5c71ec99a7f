"""Jobs: pictures that nobody holds a connection for."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request

from vllm_omni.entrypoints.openai.admission import Admission, Ticket
from vllm_omni.entrypoints.openai.api_images import get_base_url, to_response
from vllm_omni.entrypoints.openai.errors import ERROR_RESPONSES, APIError, to_api_error
from vllm_omni.entrypoints.openai.images import ImageService, ImageTask
from vllm_omni.entrypoints.openai.protocol import (
    ErrorInfo,
    ImageJobRequest,
    ImagesResponse,
    Job,
    JobList,
    JobStatus,
)

MAX_LISTED = 100
_PERCENT_BEFORE_END = 99  # steps are not all: the picture is still to be decoded and written


@dataclass(eq=False)
class JobRecord:
    """A job on its way, and what became of it."""

    job_id: str
    ticket: Ticket
    created_at: int
    status: JobStatus = "queued"
    progress: int = 0
    completed_at: int | None = None
    expires_at: float | None = None
    result: ImagesResponse | None = None
    error: ErrorInfo | None = None
    runner: asyncio.Task[None] | None = None

    @property
    def is_ended(self) -> bool:
        return self.completed_at is not None

    @property
    def num_bytes(self) -> int:
        """Of the pictures that it holds."""
        images = [] if self.result is None else self.result.data
        return sum(len(image.b64_json or "") for image in images)

    def note_progress(self, step: int, num_steps: int) -> None:
        if step and not self.is_ended:
            self.status = "in_progress"
            self.progress = min(_PERCENT_BEFORE_END, 100 * step // num_steps)

    def to_job(self, admission: Admission, with_result: bool = True) -> Job:
        position = estimate = None
        if not self.is_ended:
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


class JobStore:
    """All jobs, the oldest first. Those that have ended are forgotten after a while, or earlier
    where their number or their pictures are too many."""

    def __init__(self, images: ImageService, clock: Callable[[], float] = time.time) -> None:
        self.images = images
        self._clock = clock
        self._jobs: dict[str, JobRecord] = {}

    def add(self, body: ImageJobRequest, base_url: str) -> JobRecord:
        """Queue a job; refuses at once what can never run, or when there are too many."""
        job_id = f"job_{uuid.uuid4().hex}"
        task = self.images.make_task(body, job_id, base_url)
        most = self.images.config.max_jobs
        if sum(not job.is_ended for job in self._jobs.values()) >= most:
            raise APIError(
                429,
                f"too many jobs: {most} are under way",
                code="queue_full",
                headers={"Retry-After": str(self.images.admission.retry_after)},
            )
        ticket = self.images.admission.enter(*task.place)
        job = self._jobs[job_id] = JobRecord(job_id, ticket, int(self._clock()))
        job.runner = asyncio.create_task(self._run(job, task))
        self._tidy()
        return job

    def get(self, job_id: str) -> JobRecord:
        self._tidy()
        if job_id not in self._jobs:
            raise APIError(404, "no such job: it may have expired", "job_id", "job_not_found")
        return self._jobs[job_id]

    def list(self) -> list[JobRecord]:
        self._tidy()
        return list(self._jobs.values())

    def delete(self, job_id: str) -> JobRecord:
        """End a job at the next step, or forget one that has ended."""
        job = self.get(job_id)
        if job.is_ended:
            del self._jobs[job_id]
        else:
            self._cancel(job)
        return job

    def shutdown(self) -> None:
        for job in self._jobs.values():
            if not job.is_ended:
                self._cancel(job)

    async def _run(self, job: JobRecord, task: ImageTask) -> None:
        try:
            job.result = await self.images.run(task, job.ticket, job.note_progress)
        except Exception as error:  # the client is told when it asks
            job.error = to_api_error(error).info
            self._end(job, "failed")
        else:
            job.progress = 100
            self._end(job, "completed")

    def _cancel(self, job: JobRecord) -> None:
        assert job.runner is not None
        job.runner.cancel()
        self._end(job, "cancelled")

    def _end(self, job: JobRecord, status: JobStatus) -> None:
        self.images.admission.leave(job.ticket)
        now = self._clock()
        job.status, job.completed_at = status, int(now)
        job.expires_at = now + self.images.config.job_ttl
        self._tidy()

    def _tidy(self) -> None:
        """Forget what has expired; then, while there is too much, whatever ended first."""
        now, config = self._clock(), self.images.config
        ended = [job for job in self._jobs.values() if job.expires_at is not None]
        ended.sort(key=lambda job: job.expires_at or 0.0)
        num_bytes = sum(job.num_bytes for job in ended)
        for job in ended:
            is_too_much = len(self._jobs) > config.max_jobs or num_bytes > config.max_files_bytes
            if (job.expires_at or 0.0) > now and not is_too_much:
                break
            del self._jobs[job.job_id]
            num_bytes -= job.num_bytes


def make_router(jobs: JobStore) -> APIRouter:
    """The routes under /v1/images/jobs."""
    router = APIRouter(prefix="/v1/images/jobs", tags=["jobs"], responses=ERROR_RESPONSES)
    admission = jobs.images.admission

    @router.post("", status_code=202, summary="Queue a job", response_model=Job)
    async def create(body: ImageJobRequest, request: Request) -> Any:
        return jobs.add(body, get_base_url(request)).to_job(admission)

    @router.get("", summary="List jobs, without their pictures", response_model=JobList)
    async def list_jobs(
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        after: Annotated[str | None, Query(max_length=64)] = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Any:
        records = jobs.list()
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
    async def get(job_id: str) -> Any:
        return to_response(jobs.get(job_id).to_job(admission))

    @router.delete(
        "/{job_id}", summary="Cancel a job, or forget a finished one", response_model=Job
    )
    async def delete(job_id: str) -> Any:
        return jobs.delete(job_id).to_job(admission, with_result=False)

    return router
