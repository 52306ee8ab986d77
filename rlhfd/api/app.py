"""The routes. Each is one call of the Service; those that change something ask `permit` first."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Annotated, Any

import msgspec
from fastapi import APIRouter, Depends, FastAPI, Query, Request, Response
from fastapi import Path as InPath
from fastapi.exceptions import RequestValidationError
from fastapi.responses import StreamingResponse
from starlette.exceptions import HTTPException
from starlette.types import Receive, Scope, Send

from rlhfd import __version__
from rlhfd.api.peer import permit
from rlhfd.api.service import Object, Service, SubmitBody, Verb
from rlhfd.api.transfer import receive_file, tar_stream
from rlhfd.core.types import JobId
from rlhfd.errors import (
    DiskFullError,
    JobFileError,
    NotPermittedError,
    RlhfdError,
    StateError,
    UnknownJobError,
    UsageError,
)

MAX_FILE = 16 * 1024**3
MAX_JSON = 8 * 1024**2
MAX_WAIT = 60.0
MAX_SAMPLES = 1000
HTTP_STATUS: tuple[tuple[type[RlhfdError], int], ...] = (  # the first that fits
    (UnknownJobError, 404),
    (UsageError, 409),
    (JobFileError, 400),
    (StateError, 400),
    (NotPermittedError, 403),
    (DiskFullError, 507),
)

Id = Annotated[int, InPath(ge=1)]
Hash = Annotated[str, InPath(pattern="^[0-9a-f]{64}$")]
Permit = Depends(permit)


class Json(Response):
    """msgspec's JSON: fast, and a NaN is null."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        """Encode plain data."""
        return msgspec.json.encode(content)


class _Export(StreamingResponse):
    """Closes what it streams from, also when the client goes away."""

    def __init__(self, content: AsyncIterator[bytes], held: AsyncExitStack) -> None:
        super().__init__(content, media_type="application/x-tar")
        self.held = held

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with self.held:
            await super().__call__(scope, receive, send)


def create_app(service: Service) -> FastAPI:
    """The API over a daemon."""
    app = FastAPI(title="rlhfd", version=__version__, docs_url=None, redoc_url=None, openapi_url=None)
    for router in (_daemon(service), _listings(service), _changes(service), _transfers(service)):
        app.include_router(router, prefix="/v1")
    app.add_exception_handler(RlhfdError, _on_error)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(RequestValidationError, _on_validation)
    app.add_exception_handler(Exception, _on_bug)
    return app


def _daemon(service: Service) -> APIRouter:
    router = APIRouter()

    @router.get("/ping")
    async def ping() -> Json:
        return Json(service.ping())

    @router.get("/doctor")
    async def doctor() -> Json:
        return Json(await service.doctor())

    return router


def _listings(service: Service) -> APIRouter:
    router = APIRouter(prefix="/jobs")

    @router.get("")
    async def jobs() -> Json:
        return Json(await service.jobs())

    @router.get("/{job_id}")
    async def job(job_id: Id) -> Json:
        return Json(await service.job(JobId(job_id)))

    @router.get("/{job_id}/metrics")
    async def metrics(job_id: Id, after: int = 0) -> Json:
        return Json(await service.metrics(JobId(job_id), after))

    @router.get("/{job_id}/samples")
    async def samples(job_id: Id, n: Annotated[int, Query(ge=1, le=MAX_SAMPLES)] = 4) -> Json:
        return Json(await service.samples(JobId(job_id), n))

    @router.get("/{job_id}/events")
    async def events(job_id: Id, after: int = 0, wait: Annotated[float, Query(ge=0, le=MAX_WAIT)] = 0.0) -> Json:
        return Json(await service.events(JobId(job_id), after, wait))

    @router.get("/{job_id}/logs")
    async def logs(job_id: Id, worker: str | None = None, offset: int = 0) -> Json:
        return Json(await service.logs(JobId(job_id), worker, offset))

    return router


def _changes(service: Service) -> APIRouter:
    router = APIRouter(prefix="/jobs", dependencies=[Permit])

    @router.post("")
    async def submit(request: Request) -> Json:
        return Json(await service.submit(await _submission(request)))

    @router.post("/{job_id}/audit")
    async def audit(job_id: Id) -> StreamingResponse:
        objects = service.audit(JobId(job_id))
        first = await anext(objects)  # an unknown id still gets its status code
        return StreamingResponse(_ndjson(first, objects), media_type="application/x-ndjson")

    @router.post("/{job_id}/{verb}")
    async def transition(job_id: Id, verb: Verb) -> Json:
        return Json(await service.transition(JobId(job_id), verb))

    return router


def _transfers(service: Service) -> APIRouter:
    router = APIRouter()

    @router.head("/files/{sha256}")
    async def has_file(sha256: Hash) -> Response:
        return Response(status_code=200 if service.file_path(sha256).is_file() else 404)

    @router.put("/files/{sha256}", dependencies=[Permit])
    async def put_file(sha256: Hash, request: Request) -> Json:
        size = await receive_file(request.stream(), service.file_path(sha256), sha256, MAX_FILE)
        return Json({"sha256": sha256, "bytes": size})

    @router.get("/jobs/{job_id}/export")
    async def export(job_id: Id, version: Annotated[int | None, Query(ge=0)] = None) -> Response:
        async with AsyncExitStack() as stack:
            directory = await stack.enter_async_context(service.export(JobId(job_id), version))
            return _Export(tar_stream(directory), stack.pop_all())

    return router


async def _submission(request: Request) -> SubmitBody:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MAX_JSON:
            raise HTTPException(413, f"the job is over the limit of {MAX_JSON} bytes; put its data into files")
    try:
        return msgspec.json.decode(body, type=SubmitBody)
    except msgspec.DecodeError as error:
        raise JobFileError(f"the request is no submission: {error}; is this rlhfd of the daemon's version?") from error


async def _ndjson(first: Object, rest: AsyncIterator[Object]) -> AsyncIterator[bytes]:
    """One object a line; an error after the first is the last line, in the shape of every error."""
    yield msgspec.json.encode(first) + b"\n"
    try:
        async for item in rest:
            yield msgspec.json.encode(item) + b"\n"
    except RlhfdError as error:
        yield msgspec.json.encode(_error(str(error), error.exit_status)) + b"\n"


def _error(sentence: str, exit_status: int) -> Object:
    return {"error": sentence, "exit_status": exit_status}


async def _on_error(_: Request, error: Exception) -> Json:
    status = next((code for kind, code in HTTP_STATUS if isinstance(error, kind)), 500)
    return Json(_error(str(error), getattr(error, "exit_status", 1)), status_code=status)


async def _on_http(request: Request, error: Exception) -> Json:
    status: int = getattr(error, "status_code", 500)
    unknown = f"the daemon knows no {request.method} {request.url.path}; is this rlhfd of its version?"
    sentence = str(getattr(error, "detail", "")) if status == 413 else unknown
    return Json(_error(sentence, JobFileError.exit_status if status == 413 else UsageError.exit_status), status)


async def _on_validation(request: Request, error: Exception) -> Json:
    details: Any = error.errors() if isinstance(error, RequestValidationError) else []
    what = "; ".join(f"{d['loc'][-1]}: {d['msg']}" for d in details)
    return Json(_error(f"{request.method} {request.url.path} was asked wrongly: {what}", UsageError.exit_status), 400)


async def _on_bug(_: Request, error: Exception) -> Json:
    """The last resort: the caller gets a sentence, the server's log the trace."""
    return Json(_error(f"the daemon has a bug: {type(error).__name__}: {error}; its log has the trace", 1), 500)
