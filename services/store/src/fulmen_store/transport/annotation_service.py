"""`AnnotationService` over gRPC: scores by people."""

from __future__ import annotations

import re
from typing import Final
from uuid import UUID

import grpc.aio

from fulmen.errors import Violation
from fulmen.ids import annotation_name, parse_annotation_name, parse_rollout_name, rollout_name
from fulmen.store.v1 import annotation_service_pb2 as pb
from fulmen.store.v1 import annotation_service_pb2_grpc
from fulmen_service_kit.rpc.message_sizes import fitting
from fulmen_service_kit.security.auth import current_caller, require_project
from fulmen_service_kit.security.tokens import Role
from fulmen_store.annotations.agreement import Level
from fulmen_store.annotations.annotations import Annotations
from fulmen_store.annotations.records import AnnotationView, NewAnnotation
from fulmen_store.annotations.table import AnnotationTable
from fulmen_store.malformed import malformed, malformed_request, noted
from fulmen_store.projects.names import ProjectNames
from fulmen_store.transport.page_tokens import decode_token, encode_token, page_size

__all__ = ["AnnotationService"]

DEFAULT_PAGE: Final = 100
PAGE_BYTES: Final = 1024 * 1024
FIRST_PAGE: Final = UUID(int=2**128 - 1)
ID_BYTES: Final = 16
MAX_VALUE: Final = 1e9
MAX_COMMENT: Final = 4096
MAX_AUTHOR: Final = 128
DEFAULT_DIMENSION: Final = "reward"
_DIMENSION: Final = re.compile(r"[a-z0-9_.-]{1,64}")


class AnnotationService(annotation_service_pb2_grpc.AnnotationServiceServicer):
    """Serves annotations."""

    def __init__(self, *, annotations: Annotations, table: AnnotationTable, projects: ProjectNames) -> None:
        self._annotations = annotations
        self._table = table
        self._projects = projects

    async def CreateAnnotation(
        self, request: pb.CreateAnnotationRequest, context: grpc.aio.ServicerContext
    ) -> pb.CreateAnnotationResponse:
        """Adds the caller's score of a rollout."""
        given, problems = request.annotation, _value_problems(request.annotation)
        with noted(problems):
            dimension = _dimension(given.dimension, "annotation.dimension")
        with noted(problems):
            rollout = parse_rollout_name(given.rollout, field="annotation.rollout")
        if problems:
            raise malformed_request(problems)
        project = require_project(rollout.project)
        new = NewAnnotation(
            project_id=await self._projects.require(project),
            rollout_id=rollout.rollout_id,
            dimension=dimension,
            author=current_caller().subject,
            value=given.value,
            comment=given.comment,
        )
        view = await self._annotations.create(new, project=project)
        return pb.CreateAnnotationResponse(annotation=_message(view, project))

    async def UpdateAnnotation(
        self, request: pb.UpdateAnnotationRequest, context: grpc.aio.ServicerContext
    ) -> pb.UpdateAnnotationResponse:
        """Changes value and comment."""
        given, problems = request.annotation, _value_problems(request.annotation)
        with noted(problems):
            parse_annotation_name(given.name, field="annotation.name")
        if problems:
            raise malformed_request(problems)
        project, project_id, annotation_id = await self._find(given.name, "annotation.name")
        view = await self._annotations.update(
            annotation_id, project_id, project, author=_own(), value=given.value, comment=given.comment
        )
        return pb.UpdateAnnotationResponse(annotation=_message(view, project))

    async def DeleteAnnotation(
        self, request: pb.DeleteAnnotationRequest, context: grpc.aio.ServicerContext
    ) -> pb.DeleteAnnotationResponse:
        """Deletes an annotation."""
        project, project_id, annotation_id = await self._find(request.name, "name")
        await self._annotations.delete(annotation_id, project_id, project, author=_own())
        return pb.DeleteAnnotationResponse()

    async def ListAnnotations(
        self, request: pb.ListAnnotationsRequest, context: grpc.aio.ServicerContext
    ) -> pb.ListAnnotationsResponse:
        """Lists annotations, newest first."""
        rollout = parse_rollout_name(request.rollout, field="rollout") if request.rollout else None
        project = require_project(request.project or (rollout.project if rollout else ""))
        if len(request.author) > MAX_AUTHOR or "\0" in request.author:
            raise malformed("author", f"has a NUL character or more than {MAX_AUTHOR} characters")
        dimension = _dimension(request.dimension, "dimension") if request.dimension else ""
        listed = f"annotations/{project}/{request.rollout}/{dimension}/{request.author}"
        last = decode_token(request.page_token, listed=listed, key_bytes=ID_BYTES)
        limit = page_size(request.page_size, default=DEFAULT_PAGE)
        project_id = await self._projects.require(project)
        if rollout is not None and rollout.project != project:
            return pb.ListAnnotationsResponse()
        found = await self._table.page(
            project_id,
            before=FIRST_PAGE if last is None else UUID(bytes=last),
            rollout_id=None if rollout is None else rollout.rollout_id,
            author=request.author,
            dimension=dimension,
            limit=limit + 1,
        )
        shown = fitting((_message(view, project) for view in found[:limit]), max_bytes=PAGE_BYTES)
        token = encode_token(found[len(shown) - 1].id.bytes, listed=listed) if len(shown) < len(found) else ""
        return pb.ListAnnotationsResponse(annotations=shown, next_page_token=token)

    async def GetAgreement(
        self, request: pb.GetAgreementRequest, context: grpc.aio.ServicerContext
    ) -> pb.GetAgreementResponse:
        """Computes how far authors agree."""
        project = require_project(request.project)
        dimension = _dimension(request.dimension, "dimension")
        level = _level(request.level)
        found = await self._annotations.agreement(await self._projects.require(project), dimension, level)
        return pb.GetAgreementResponse(
            alpha=found.alpha,
            rollout_count=found.rollout_count,
            truncated=found.is_truncated,
            authors=[
                pb.AuthorScores(author=author, annotation_count=count, mean=mean)
                for author, count, mean in found.authors
            ],
            pairs=[
                pb.AuthorPair(
                    author=pair.author,
                    other_author=pair.other,
                    rollout_count=pair.rollout_count,
                    equal_share=pair.equal_share,
                    kappa=pair.kappa,
                )
                for pair in found.pairs
            ],
        )

    async def _find(self, name: str, field: str) -> tuple[str, int, UUID]:
        """Returns the project of an annotation, its number, and the annotation's id."""
        project, annotation_id = parse_annotation_name(name, field=field)
        return project, await self._projects.require(require_project(project)), annotation_id


def _own() -> str | None:
    """Returns the only author whose annotations the caller may change; None for all."""
    caller = current_caller()
    return None if caller.role is Role.ADMIN else caller.subject


def _dimension(given: str, field: str) -> str:
    dimension = given or DEFAULT_DIMENSION
    if not _DIMENSION.fullmatch(dimension):
        raise malformed(field, "is not 1 to 64 characters of [a-z0-9_.-]")
    return dimension


def _level(number: int) -> Level:
    try:
        return Level(number or Level.INTERVAL)
    except ValueError:
        raise malformed("level", "is not a known level") from None


def _value_problems(given: pb.Annotation) -> list[Violation]:
    problems = []
    # Also false for NaN.
    if not -MAX_VALUE <= given.value <= MAX_VALUE:
        problems.append(Violation(field="annotation.value", description="is not a number from -1e9 to 1e9"))
    if len(given.comment) > MAX_COMMENT or "\0" in given.comment:
        text = f"has a NUL character or more than {MAX_COMMENT} characters"
        problems.append(Violation(field="annotation.comment", description=text))
    return problems


def _message(view: AnnotationView, project: str) -> pb.Annotation:
    message = pb.Annotation(
        name=annotation_name(project, view.id),
        rollout=rollout_name(project, view.rollout_id),
        dimension=view.dimension,
        value=view.value,
        comment=view.comment,
        author=view.author,
    )
    message.create_time.FromDatetime(view.created_at)
    message.update_time.FromDatetime(view.updated_at)
    return message
