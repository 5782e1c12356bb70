"""Converts between the messages of `TrainerService` and values."""

from typing import Any

from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from fulmen.algorithm.v1 import trainer_service_pb2 as pb
from fulmen.errors import Violation
from fulmen_algorithm.loops.calls import Rendered, Sampled
from fulmen_algorithm.loops.record import AdamSettings
from fulmen_algorithm.loops.rules import GivenDraw, GivenRow, settings_of
from fulmen_algorithm.loops.trainer import LoopTrainer
from fulmen_algorithm.training.primitives_settings import PassResult
from fulmen_algorithm.training.settings import LoraSettings
from fulmen_algorithm.transport.encode import policy_message


def given_rows(rows: Any) -> list[GivenRow]:
    """Decodes rows."""
    return [
        GivenRow(
            token_ids=list(row.token_ids),
            weights=list(row.weights),
            advantages=list(row.advantages),
            sampler_logprobs=list(row.sampler_logprobs),
        )
        for row in rows
    ]


def given_draw(request: pb.SampleRequest) -> GivenDraw:
    """Decodes a request to sample."""
    return GivenDraw(
        prompt_ids=list(request.prompt_ids),
        messages_json=request.messages_json,
        count=request.completion_count or 1,
        max_tokens=request.max_tokens,
        temperature=request.temperature if request.HasField("temperature") else 1.0,
        top_p=request.top_p if request.HasField("top_p") else 1.0,
        stop_ids=list(request.stop_token_ids),
        stop_texts=list(request.stop_texts),
    )


def given_lora(message: pb.TrainerLora) -> tuple[LoraSettings | None, list[Violation]]:
    """Decodes adapters; returns them, None if there are problems, and these."""
    given: dict[str, Any] = {"dropout": message.dropout}
    given |= {"rank": message.rank} if message.rank else {}
    given |= {"alpha": message.alpha} if message.HasField("alpha") else {}
    given |= {"targets": tuple(message.targets)} if message.targets else {}
    settings, found = settings_of(LoraSettings, given, "lora")
    return settings, found


def given_adam(message: pb.AdamSettings, defaults: AdamSettings) -> tuple[AdamSettings, list[Violation]]:
    """Decodes settings of the optimizer; returns them, the defaults if there are problems, and these."""
    settings, found = settings_of(AdamSettings, {**defaults.model_dump(), **_present(message)}, "adam")
    return settings or defaults, found


def trainer_message(trainer: LoopTrainer) -> pb.Trainer:
    """Encodes a trainer."""
    record, at = trainer.record, trainer.progress
    return pb.Trainer(
        name=record.name,
        policy=policy_message(record.policy),
        lora=None if record.lora is None else _lora(record.lora),
        adam=pb.AdamSettings(**record.adam.model_dump(exclude_none=True)),
        seed=record.seed,
        autosave_steps=record.autosave_steps,
        step=at.step,
        sequence=at.sequence,
        saved_sequence=trainer.saved.sequence,
        loaded=trainer.loaded,
        policy_version=record.published[-1].name if record.published else "",
        checkpoints=[
            pb.TrainerCheckpoint(
                name=f"{record.name}/checkpoints/{each.id}",
                step=each.step,
                size_bytes=each.size_bytes,
                create_time=_timestamp(each.created_s),
            )
            for each in trainer.files.named()
        ],
        max_tokens=record.max_tokens,
        create_time=_timestamp(record.created_s),
        use_time=_timestamp(trainer.used_s),
        weight_sum=at.weight_sum,
    )


def pass_message(result: PassResult) -> pb.ForwardBackwardResponse:
    """Encodes the outcome of a pass."""
    return pb.ForwardBackwardResponse(
        loss_sum=result.loss_sum,
        weight_sum=result.weight_sum,
        metrics=result.metrics,
        rows=[pb.RowLogprobs(logprobs=row) for row in result.logprobs],
    )


def sample_message(sampled: Sampled, *, step: int) -> pb.SampleResponse:
    """Encodes completions."""
    return pb.SampleResponse(
        prompt_ids=sampled.prompt_ids,
        completions=[
            pb.SampledCompletion(token_ids=each.token_ids, logprobs=each.logprobs, text=each.text, stopped=each.stopped)
            for each in sampled.completions
        ],
        step=step,
    )


def rendered_message(rendered: Rendered) -> pb.RenderMessagesResponse:
    """Encodes rendered messages."""
    row = pb.TrainingRow(token_ids=rendered.token_ids, weights=[float(trains) for trains in rendered.trains])
    return pb.RenderMessagesResponse(row=row)


def _present(message: Message) -> dict[str, Any]:
    return {field.name: value for field, value in message.ListFields()}


def _lora(lora: LoraSettings) -> pb.TrainerLora:
    targets = () if lora.targets == "all-linear" else lora.targets
    return pb.TrainerLora(rank=lora.rank, alpha=lora.alpha, dropout=lora.dropout, targets=targets)


def _timestamp(unix_s: float) -> Timestamp:
    stamp = Timestamp()
    stamp.FromNanoseconds(round(unix_s * 1e9))
    return stamp
