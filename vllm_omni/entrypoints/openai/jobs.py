"""Jobs: pictures that nobody holds a connection for."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import JSONResponse

from vllm_omni.entrypoints.openai.api_images import get_base_url
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


class JobRecord:
    """A job on its way, and what became of it."""

    def __init__(self, job_id: str, images: ImageService, task: ImageTask) -> None:
        self.job_id = job_id
        self.created_at = int(time.time())
        self.completed_at: int | None = None
        self.expires_at: float | None = None
        self.status: JobStatus = "queued"
        self.progress = 0
        self.result: ImagesResponse | None = None
        self.error: ErrorInfo | None = None
        self._images = images
        self._ticket = images.admission.enter(task.cost)
        self._runner = asyncio.create_task(self._run(task))

    @property
    def is_ended(self) -> bool:
        return self.completed_at is not None

    def cancel(self) -> None:
        """End it at the next step."""
        if not self.is_ended:
            self._runner.cancel()
            self._end("cancelled")

    def to_job(self, with_result: bool = True) -> Job:
        admission = self._images.admission
        position = estimate = None
        if not self.is_ended:
            position = admission.get_position(self._ticket)
            estimate = round(admission.estimate(self._ticket), 1)
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

    async def _run(self, task: ImageTask) -> None:
        try:
            self.result = await self._images.run(task, self._ticket, self._note_progress)
        except Exception as error:  # the client is told when it asks
            self.error = to_api_error(error).info
            self._end("failed")
        else:
            self.progress = 100
            self._end("completed")

    def _note_progress(self, step: int, num_steps: int) -> None:
        if step and not self.is_ended:
            self.status = "in_progress"
            self.progress = min(_PERCENT_BEFORE_END, 100 * step // num_steps)

    def _end(self, status: JobStatus) -> None:
        self._images.admission.leave(self._ticket)
        self.status = status
        self.completed_at = int(time.time())
        self.expires_at = time.time() + self._images.config.job_ttl


class JobStore:
    """All jobs, the oldest first; finished ones are forgotten after a while."""

    def __init__(self, images: ImageService, clock: Callable[[], float] = time.time) -> None:
        self._images = images
        self._clock = clock
        self._jobs: dict[str, JobRecord] = {}

    def add(self, body: ImageJobRequest, base_url: str) -> JobRecord:
        """Queue a job; refuses at once what can never run, or when there are too many."""
        self._expire()
        job_id = f"job_{uuid.uuid4().hex}"
        task = self._images.make_task(body, job_id, base_url)
        if not self._make_room():
            raise APIError(
                429,
                f"too many jobs: {self._images.config.max_jobs} are under way",
                code="queue_full",
                headers={"Retry-After": str(self._images.admission.retry_after)},
            )
        job = self._jobs[job_id] = JobRecord(job_id, self._images, task)
        return job

    def get(self, job_id: str) -> JobRecord:
        self._expire()
        if job_id not in self._jobs:
            raise APIError(404, "no such job: it may have expired", "job_id", "job_not_found")
        return self._jobs[job_id]

    def forget(self, job_id: str) -> None:
        del self._jobs[job_id]

    def list(self) -> Iterator[JobRecord]:
        self._expire()
        return iter(self._jobs.values())

    def shutdown(self) -> None:
        for job in self._jobs.values():
            job.cancel()

    def _expire(self) -> None:
        now = self._clock()
        for job_id, job in list(self._jobs.items()):
            if job.expires_at is not None and job.expires_at <= now:
                del self._jobs[job_id]

    def _make_room(self) -> bool:
        """Whether there is room for one more; the oldest that has ended gives way."""
        if len(self._jobs) < self._images.config.max_jobs:
            return True
        ended = next((id for id, job in self._jobs.items() if job.is_ended), None)
        if ended is not None:
            del self._jobs[ended]
        return ended is not None


def make_router(jobs: JobStore) -> APIRouter:
    """The routes under /v1/images/jobs."""
    router = APIRouter(prefix="/v1/images/jobs", tags=["jobs"], responses=ERROR_RESPONSES)

    @router.post("", status_code=202, summary="Queue a job", response_model=Job)
    async def create(body: ImageJobRequest, request: Request) -> Any:
        return jobs.add(body, get_base_url(request)).to_job()

    @router.get("", summary="List jobs, without their pictures", response_model=JobList)
    async def list_jobs(
        limit: Annotated[int, Query(ge=1, le=MAX_LISTED)] = 20,
        after: Annotated[str | None, Query(max_length=64)] = None,
        order: Literal["asc", "desc"] = "desc",
    ) -> Any:
        records = list(jobs.list())
        if order == "desc":
            records.reverse()
        if after is not None:
            ids = [record.job_id for record in records]
            if after not in ids:
                raise APIError(400, f"after={after!r} is not a job here", "after")
            records = records[ids.index(after) + 1 :]
        page = [record.to_job(with_result=False) for record in records[:limit]]
        return JobList(data=page, has_more=len(records) > limit)

    @router.get("/{job_id}", summary="How a job is doing, and its pictures", response_model=Job)
    async def get(job_id: str) -> Any:
        # Not through FastAPI's own check: it would go over megabytes of base64.
        return JSONResponse(jobs.get(job_id).to_job().model_dump(mode="json"))

    @router.delete(
        "/{job_id}", summary="Cancel a job, or forget a finished one", response_model=Job
    )
    async def delete(job_id: str) -> Any:
        job = jobs.get(job_id)
        if job.is_ended:
            jobs.forget(job_id)
        job.cancel()
        return job.to_job(with_result=False)

    return router
