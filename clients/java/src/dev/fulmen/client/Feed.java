package dev.fulmen.client;

import com.google.protobuf.ByteString;
import io.grpc.Context;
import java.util.ArrayList;
import java.util.Collections;
import java.util.List;
import java.util.Map;
import java.util.UUID;
import stubs.fulmen.store.v1.Attempt;
import stubs.fulmen.store.v1.BatchCreateRolloutsRequest;
import stubs.fulmen.store.v1.FinishedGroup;
import stubs.fulmen.store.v1.Reward;
import stubs.fulmen.store.v1.Rollout;
import stubs.fulmen.store.v1.RolloutServiceGrpc;
import stubs.fulmen.store.v1.WatchRolloutsRequest;

/** The two ends of the queue: creating rollouts, and reading the feed of those that are final. */
final class Feed {
  private Feed() {}

  /** Creates a group of rollouts with the same input. The request id makes the request idempotent. */
  static void create(Connection store, Options options) throws Exception {
    var count = options.number("count");
    var rollout =
        Rollout.newBuilder()
            .setProject(options.text("project"))
            .setTrainingRun(options.text("training-run"))
            .setGroupId(options.text("group-id"))
            .setGroupSize(options.text("group-id").isEmpty() ? 1 : count)
            .putAllRequiredLabels(options.labels())
            .setInput(ByteString.copyFromUtf8(options.text("input")))
            .build();
    var requestId = options.text("request-id");
    var request =
        BatchCreateRolloutsRequest.newBuilder()
            .addAllRollouts(Collections.nCopies(count, rollout))
            .setRequestId(requestId.isEmpty() ? UUID.randomUUID().toString() : requestId)
            .build();
    store.whileUnavailable(
        () -> {
          var created = store.own(RolloutServiceGrpc.newBlockingStub(store.store())).batchCreateRollouts(request);
          for (var one : created.getRolloutsList()) {
            Main.emit(Map.of("rollout", one.getName(), "state", one.getState().name()));
          }
          return null;
        });
  }

  /** Reads finished groups. A broken stream is opened again after the last group that was handled. */
  static void watch(Connection store, Options options) throws Exception {
    var handled = new int[] {0};
    var request =
        WatchRolloutsRequest.newBuilder()
            .setProject(options.text("project"))
            .setTrainingRun(options.text("training-run"))
            .setCursor(options.text("cursor"));
    try (var call = Context.current().withCancellation()) { // ends the stream
      call.call(
          () -> {
            store.whileUnavailable(
                () -> {
                  var rollouts = store.own(RolloutServiceGrpc.newBlockingStub(store.store()));
                  var messages = rollouts.watchRollouts(request.build());
                  var members = new ArrayList<Rollout>();
                  while (messages.hasNext()) {
                    for (var part : messages.next().getGroupsList()) {
                      members.addAll(part.getRolloutsList());
                      if (part.getCursor().isEmpty()) continue; // more of a large group follows
                      Main.emit(described(part, members));
                      members.clear();
                      request.setCursor(part.getCursor());
                      if (++handled[0] == options.number("count")) return null;
                    }
                  }
                  return null;
                });
            return null;
          });
    }
  }

  private static Map<String, ?> described(FinishedGroup group, List<Rollout> members) {
    var rollouts = members.stream().map(Feed::described).toList();
    return Map.of("group_id", group.getGroupId(), "cursor", group.getCursor(), "rollouts", rollouts);
  }

  private static Map<String, ?> described(Rollout rollout) {
    var attempts = rollout.getAttemptsList().stream().map(Feed::described).toList();
    return Map.of("rollout", rollout.getName(), "state", rollout.getState().name(), "attempts", attempts);
  }

  private static Map<String, ?> described(Attempt attempt) {
    List<Double> rewards = attempt.getRewardsList().stream().map(Reward::getValue).toList();
    return Map.of(
        "attempt", attempt.getName(),
        "state", attempt.getState().name(),
        "failure_kind", attempt.getFailureKind().name(),
        "rewards", rewards,
        "output", attempt.getOutput().toStringUtf8());
  }
}
