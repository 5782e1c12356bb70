package dev.fulmen.client;

import com.google.gson.JsonObject;
import com.google.gson.JsonParser;
import com.google.protobuf.ByteString;
import com.google.protobuf.util.Timestamps;
import io.grpc.Context;
import io.grpc.stub.StreamObserver;
import java.security.SecureRandom;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import java.util.concurrent.CompletableFuture;
import java.util.concurrent.CountDownLatch;
import java.util.concurrent.ExecutionException;
import java.util.concurrent.TimeUnit;
import stubs.fulmen.llm_proxy.v1.CompleteRequest;
import stubs.fulmen.llm_proxy.v1.CompletionServiceGrpc;
import stubs.fulmen.store.v1.AppendSpansRequest;
import stubs.fulmen.store.v1.AppendSpansResponse;
import stubs.fulmen.store.v1.Assignment;
import stubs.fulmen.store.v1.AttemptResult;
import stubs.fulmen.store.v1.FailureKind;
import stubs.fulmen.store.v1.Reward;
import stubs.fulmen.store.v1.SpanBatch;
import stubs.fulmen.store.v1.SpanChunk;
import stubs.fulmen.store.v1.SpanCodec;
import stubs.fulmen.store.v1.SpanRecord;
import stubs.fulmen.store.v1.SpanServiceGrpc;
import stubs.opentelemetry.proto.common.v1.AnyValue;
import stubs.opentelemetry.proto.common.v1.KeyValue;
import stubs.opentelemetry.proto.trace.v1.Span;

/**
 * Runs assignments. A real agent replaces {@code solve}. The rest is what any runner must do: keep the time limit, stop
 * when requested, record a span, and report how the attempt ended.
 */
record Agent(Connection store, Assignment assignment, Options options, Context.CancellableContext context) {
  private static final SecureRandom RANDOM = new SecureRandom();

  /** Runs the attempt to its end, in its context; never throws: a failure is part of the result. */
  AttemptResult attempted() {
    var result =
        AttemptResult.newBuilder()
            .setAttempt(assignment.getAttempt())
            .setLeaseId(assignment.getLeaseId())
            .setEpoch(assignment.getEpoch());
    try {
      var beganMs = System.currentTimeMillis();
      var question = json(assignment.getRollout().getInput()).get("question").getAsString();
      var factors = question.replace("=", "").split("\\*");
      var product = String.valueOf(Integer.parseInt(factors[0]) * Integer.parseInt(factors[1]));
      var answer = solve(question, product);
      reportSpan(beganMs, Map.of("question", question, "answer", answer));
      return result
          .addRewards(Reward.newBuilder().setValue(answer.contains(product) ? 1 : 0))
          .setOutput(ByteString.copyFromUtf8(Main.JSON.toJson(Map.of("answer", answer))))
          .setOutputContentType("application/json")
          .build();
    } catch (Exception failure) {
      var message = String.valueOf(failure.getMessage());
      return result.setFailureKind(failureKind(failure)).setFailureMessage(message).build();
    }
  }

  private FailureKind failureKind(Exception failure) {
    if (context.getDeadline().isExpired()) return FailureKind.FAILURE_KIND_TIMEOUT;
    if (context.isCancelled()) return FailureKind.FAILURE_KIND_CANCELLED;
    return FulmenException.of(failure).isUnreachable()
        ? FailureKind.FAILURE_KIND_INFRA
        : FailureKind.FAILURE_KIND_AGENT_ERROR;
  }

  /** Asks the model, if there is one; otherwise computes the answer. */
  private String solve(String question, String product) throws InterruptedException {
    var stopped = new CountDownLatch(1);
    context.addListener(ended -> stopped.countDown(), Runnable::run);
    if (stopped.await(options.milliseconds("work-s"), TimeUnit.MILLISECONDS)) throw new InterruptedException("stopped");
    if (options.text("model").isEmpty()) return product;

    var messages = List.of(Map.of("role", "user", "content", question));
    var body = Main.JSON.toJson(Map.of("model", options.text("model"), "messages", messages));
    var request =
        CompleteRequest.newBuilder().setPath("/v1/chat/completions").setBodyJson(ByteString.copyFromUtf8(body)).build();
    // The attempt key names the attempt: the proxy records the call for it, and refuses the key once it ends.
    var model = store.as(assignment.getAttemptKey(), CompletionServiceGrpc.newBlockingStub(store.proxy()));
    var answer = model.complete(request);
    // A refusal by the backend or the proxy is an answer with its HTTP status, not an error of the rpc.
    if (answer.getHttpStatus() != 200) {
      var code = answer.getHttpStatus() >= 500 ? "UNAVAILABLE" : "FAILED";
      var text = answer.getBodyJson().toStringUtf8();
      throw new FulmenException(code, "the model answered " + answer.getHttpStatus() + ": " + text);
    }
    var choice = json(answer.getBodyJson()).getAsJsonArray("choices").get(0).getAsJsonObject();
    return choice.getAsJsonObject("message").get("content").getAsString();
  }

  /** Appends one span and waits until it is durable, so that readers of the finished attempt find it. */
  private void reportSpan(long beganMs, Map<String, String> about) throws InterruptedException {
    var endedMs = System.currentTimeMillis();
    var span =
        Span.newBuilder()
            .setTraceId(random(16))
            .setSpanId(random(8))
            .setName("solve")
            .setStartTimeUnixNano(TimeUnit.MILLISECONDS.toNanos(beganMs))
            .setEndTimeUnixNano(TimeUnit.MILLISECONDS.toNanos(endedMs));
    about.forEach(
        (key, text) ->
            span.addAttributes(KeyValue.newBuilder().setKey(key).setValue(AnyValue.newBuilder().setStringValue(text))));
    var record = SpanRecord.newBuilder().setOtlpSpan(span.build().toByteString()).setScope("client");
    var chunk =
        SpanChunk.newBuilder()
            .setAttempt(assignment.getAttempt())
            .setChunkId(UUID.randomUUID().toString()) // a chunk that is sent again with the same id is stored once
            .setSpanCount(1)
            .setCodec(SpanCodec.SPAN_CODEC_IDENTITY)
            .setPayload(SpanBatch.newBuilder().addSpans(record).build().toByteString())
            .setStartTime(Timestamps.fromMillis(beganMs))
            .setEndTime(Timestamps.fromMillis(endedMs));
    var answer = new CompletableFuture<AppendSpansResponse>();
    var store = store().as(assignment.getAttemptKey(), SpanServiceGrpc.newStub(store().store()));
    var spans = store.appendSpans(firstOf(answer));
    spans.onNext(AppendSpansRequest.newBuilder().addChunks(chunk).build());
    spans.onCompleted();
    try {
      for (var rejected : answer.get().getRejectedList()) { // the call ends at its deadline, or with the attempt
        throw new IllegalStateException("the store rejected the span: " + rejected.getMessage());
      }
    } catch (ExecutionException failed) {
      throw FulmenException.of(failed.getCause());
    }
  }

  private static <T> StreamObserver<T> firstOf(CompletableFuture<T> future) {
    return new StreamObserver<>() {
      @Override
      public void onNext(T message) {
        future.complete(message);
      }

      @Override
      public void onError(Throwable thrown) {
        future.completeExceptionally(thrown);
      }

      @Override
      public void onCompleted() {
        future.completeExceptionally(new IllegalStateException("the store did not answer"));
      }
    };
  }

  private static JsonObject json(ByteString text) {
    return JsonParser.parseString(text.toStringUtf8()).getAsJsonObject();
  }

  private static ByteString random(int size) {
    var bytes = new byte[size];
    RANDOM.nextBytes(bytes);
    return ByteString.copyFrom(bytes);
  }
}
